"""What a model's code makes of positions that jump: checks before training on packed rows or on skipped positions.

Model types and attention kernels differ in this, and a silent mistake would be trained in. The model is in eval mode.
Shapes: B rows of two halves, T tokens in a row, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ropext.errors import RopextError
from ropext.feed import Batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

HALF = 8  # tokens of each document, or chunk
LEAK = 1e-3  # of what one document does to another that sees it: far above rounding, far below any layer's attention


def check_packing(model: PreTrainedModel) -> None:
    """Raises RopextError unless the model keeps the documents of a packed row apart.

    State space layers carry everything along, flash attention reads positions in a way of its own. So the first of two
    documents is changed: the second must not notice, measured by what it notices where it may look.
    """
    for rows in (1, 2):  # kernels treat a single row differently
        seen, apart = (_noticed(model, rows, packed=packed) for packed in (False, True))
        if apart > LEAK * seen:
            raise _unfit(
                model,
                "packed documents must not see each other",
                f"a change in one moves the next by {apart / seen:.2g} of what it does where it may look",
                "train on whole windows alone, or with sdpa attention",
            )


def check_skipping(model: PreTrainedModel) -> None:
    """Raises RopextError unless positions skipped inside a document move its second chunk, which still sees the first.

    Only static tables are trained right by skipping: one that depends on the input's length (dynamic, longrope) would
    be chosen anew by the largest position of each batch. That is the caller's to refuse.
    """
    rule, remedy = "skipped positions must count and be seen across", "train it at full length"
    if _noticed(model, 1, packed=False) == 0:
        raise _unfit(model, rule, "what follows a skip sees nothing of what is before it", remedy)
    near, far = (_second_half(model, _ids(model, 1), _positions(1, skip), packed=False) for skip in (0, HALF))
    if float((near - far).norm()) == 0:
        raise _unfit(model, rule, "its code takes no notice of them", remedy)


def _noticed(model: PreTrainedModel, rows: int, *, packed: bool) -> float:
    """How far the second half of each row moves where the first is turned round."""
    ids = _ids(model, rows)
    turned = ids.copy()
    turned[:, :HALF] = ids[:, HALF - 1 :: -1]
    positions = _positions(rows, HALF)
    one, other = (_second_half(model, found, positions, packed=packed) for found in (ids, turned))
    return float((one - other).norm())


def _ids(model: PreTrainedModel, rows: int) -> NDArray[np.int64]:
    import numpy as np

    embeddings: Any = model.get_input_embeddings()
    return np.arange(rows * 2 * HALF).reshape(rows, 2 * HALF) % int(embeddings.weight.shape[0])


def _positions(rows: int, skip: int) -> NDArray[np.int64]:
    import numpy as np

    return np.tile(np.concatenate([np.arange(HALF), skip + np.arange(HALF, 2 * HALF)]), (rows, 1))


def _second_half(
    model: PreTrainedModel, ids: NDArray[np.int64], positions: NDArray[np.int64], *, packed: bool
) -> Tensor:
    """Hidden states `[B, HALF, D]` in float32. Raises RopextError where the model takes no positions."""
    import torch

    batch = Batch(ids=ids, labels=ids, positions=positions, packed=packed)
    try:
        with torch.no_grad():
            found = model.base_model(
                input_ids=torch.from_numpy(ids).to(model.device), use_cache=False, **batch.arguments(model.device)
            ).last_hidden_state
    except TypeError as error:
        raise _unfit(
            model, "rows of several documents need positions", f"its code takes none ({error})", "use whole windows"
        ) from error
    half: Tensor = found[:, HALF:].float()
    return half


def _unfit(model: PreTrainedModel, rule: str, found: str, remedy: str) -> RopextError:
    kind, attention = type(model).__name__, getattr(model.config, "_attn_implementation", "its own")
    return RopextError(f"{rule}: with {kind} and {attention} attention, {found}; {remedy}")
