"""Scores a model on documents: the loss of each token, from which every figure is computed (ropext.summary).

How documents are cut is the definition of the perplexity (ropext.cut). With a static rotary table a token's loss does
not depend on what follows it, so one pass over the longest windows serves all lengths.
Shapes: N rows, T tokens in one (BOS counted), B rows in a batch, S scored tokens of a pass. Losses in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ropext.cut import Pass
from ropext.errors import RopextError
from ropext.load import refresh_rotary
from ropext.loss import check_head, token_losses
from ropext.process import ALONE, Team, out_of_memory
from ropext.summary import Scored, scored_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PretrainedConfig, PreTrainedModel

    Losses = NDArray[np.float64]


def has_changing_table(config: PretrainedConfig) -> bool:
    """Whether a rotary table of the model depends on the length of its input: dynamic and longrope.

    Such a model takes a pass a length, each forward pass with a fresh rotary state.
    """
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    blocks = [found, *(block for block in found.values() if isinstance(block, dict))]  # gemma3: one a layer type
    return any(block.get("rope_type") in ("dynamic", "longrope") for block in blocks)


def check_scorable(model: PreTrainedModel, passes: Sequence[Pass]) -> None:
    """Raises RopextError for a model whose logits are more than its head (loss.check_head), and for a text with tokens
    that the model has no embedding for."""
    embeddings: Any = model.get_input_embeddings()
    known, largest = embeddings.weight.shape[0], max(int(row.max()) for one in passes for row in one.rows)
    if largest >= known:
        raise RopextError(
            f"tokenizer and model must belong together: the text has token {largest}, the model knows {known} tokens"
        )
    check_head(model)


def score_pass(
    model: PreTrainedModel,
    one: Pass,
    *,
    batch_size: int = 1,
    team: Team = ALONE,
    begun: Losses | None = None,
    keep: Callable[[list[Losses]], None] | None = None,
    told: Callable[[int], None] | None = None,
) -> Scored:
    """The losses of a pass. Where memory does not suffice, batches become single rows, then the rows shorter, down to
    the next of the pass's lengths: what fits is kept, `too_long` names what did not.

    `begun` are the losses of its first rows, from an earlier run; `keep` gets those so far, in parts, after each batch;
    `told` hears how many rows are done. The model has passed check_scorable.
    """
    import numpy as np

    asked, run = one.lengths, one
    while run.lengths:
        whole = run is one  # what fits is another pass, of which nothing is begun
        losses = _losses(model, run, batch_size, team, begun if whole else None, keep if whole else None, told)
        if losses is not None:
            return Scored(run=run, losses=losses, too_long=tuple(n for n in asked if n not in run.lengths))
        if batch_size > 1:
            batch_size = 1
        else:
            run = run.shorter(max((n for n in run.lengths if n < max(run.lengths)), default=0))
    return Scored(run=run, losses=np.zeros(0), too_long=asked)


def _losses(
    model: PreTrainedModel,
    one: Pass,
    batch_size: int,
    team: Team,
    begun: Losses | None,
    keep: Callable[[list[Losses]], None] | None,
    told: Callable[[int], None] | None,
) -> Losses | None:
    """The loss of each scored token, row after row: `[S]`; None where memory did not suffice in some process.

    Rows go through the model up to `batch_size` of equal length at a time, each batch in one process of the team.
    """
    import numpy as np

    batches = list(_batches(one.rows, batch_size))
    found = np.zeros(0) if begun is None else begun
    ends = np.cumsum(scored_of(one))  # of each row in `[S]`
    begin = sum(bool(ends[batch.stop - 1] <= len(found)) for batch in batches)
    parts = [found[: ends[batches[begin - 1].stop - 1]]] if begin else []
    for start in range(begin, len(batches), team.size):
        turn = batches[start : start + team.size]  # one batch for each process
        own = _batch_losses(model, one, turn[team.rank]) if team.rank < len(turn) else np.zeros(0)
        for losses in team.gather(own):
            if losses is None:
                return None
            parts.append(losses)
        if keep:
            keep(parts)
        if told:
            told(turn[-1].stop)
    return np.concatenate(parts)


def _batch_losses(model: PreTrainedModel, one: Pass, batch: slice) -> Losses | None:
    """The scored ones of a batch, row after row, or None where memory did not suffice."""
    import numpy as np
    import torch

    if has_changing_table(model.config):
        refresh_rotary(model)
    rows = torch.from_numpy(np.stack(one.rows[batch]).astype(np.int64))
    try:
        losses = token_losses(model, rows.to(model.device)).numpy()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return None
    return np.concatenate([row[first - 1 :] for row, first in zip(losses, one.first[batch], strict=True)])


def _batches(rows: Sequence[NDArray[np.int32]], batch_size: int) -> Iterator[slice]:
    """Runs of at most `batch_size` neighbouring rows of one length: padding would change a dynamic table."""
    start = 0
    while start < len(rows):
        end = start + 1
        while end < min(start + batch_size, len(rows)) and len(rows[end]) == len(rows[start]):
            end += 1
        yield slice(start, end)
        start = end
