"""What stock transformers makes of packed rows and of skipped positions, and the checks that notice another model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, masking_utils
from transformers.models.llama import modeling_llama

from ropext.errors import RopextError
from ropext.feed import UNSCORED
from ropext.jumps import check_packing, check_skipping
from ropext.pack import Corpus
from ropext.packing import pack
from ropext.pose import Posed
from tests.tiny import make_checkpoint

LENGTH = 48


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(family, attention="sdpa", **overrides):
        key = (family, attention, *overrides.items())
        if key not in made:
            folder = make_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)
            made[key] = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()
        return made[key]

    return model


def losses(model, ids, labels, **arguments):
    """The plain loss of each label `[B, T]`, by the model's own forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids), use_cache=False, **arguments).logits[:, :-1]
    found = F.cross_entropy(logits.mT, torch.from_numpy(labels[:, 1:]), reduction="none")
    return F.pad(found, (1, 0)).numpy()


def rows_of(tokens, ends, bos=0):
    feed = pack(Corpus(tokens=np.asarray(tokens, np.int32), ends=np.asarray(ends), bos=bos), LENGTH)
    return feed.batch(seed=0, stage=0, step=0, size=feed.supply)


def pieces(batch):
    """Row and slice of each document with a label."""
    for row, positions in enumerate(batch.positions):
        borders = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1), len(positions)]
        for begin, end in zip(borders[:-1], borders[1:], strict=True):
            if (batch.labels[row, begin:end] != UNSCORED).any():
                yield row, slice(begin, end)


@pytest.fixture(scope="module")
def batch():
    """Six documents in three rows, one of them of two tokens, with padding in the last."""
    sizes = [30, 16, 46, 20, 1, 11]
    tokens = np.random.default_rng(0).integers(2, 258, sum(sizes))
    found = rows_of(tokens, np.cumsum(sizes))
    assert len(found.ids) == 3 and (found.labels == UNSCORED).sum() > 6 and len(list(pieces(found))) == 6
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_the_losses_of_packed_documents_are_those_of_each_alone(models, batch, family, attention):
    model = models(family, attention)
    packed = losses(model, batch.ids, batch.labels, **batch.arguments("cpu"))
    for row, own in pieces(batch):
        ids = batch.ids[row : row + 1, own]
        alone = losses(model, ids, ids)
        assert np.abs(packed[row, own] - alone)[0, 1:].max() < 2e-5
    joined = losses(model, batch.ids, batch.labels)
    assert np.abs(packed - joined).max() > 0.1, "the comparison would notice a document that sees another"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_no_loss_moves_in_a_document_when_another_of_its_row_changes(models, batch, family):
    model = models(family)
    (row, first), (same, second) = list(pieces(batch))[1:3]
    assert row == same
    changed = batch.ids.copy()
    changed[row, first] = 259 - changed[row, first]
    before, after = (losses(model, ids, batch.labels, **batch.arguments("cpu"))[row] for ids in (batch.ids, changed))
    assert np.array_equal(before[second], after[second]) and not np.array_equal(before[first], after[first])
    before, after = (losses(model, ids, batch.labels)[row] for ids in (batch.ids, changed))
    assert not np.array_equal(before[second], after[second]), "unpacked it does"


def test_documents_laid_end_to_end_without_a_jump_would_see_each_other(models, batch):
    (row, first), (_, second) = list(pieces(batch))[1:3]
    plain = torch.arange(LENGTH)[None].expand(3, -1)
    changed = batch.ids.copy()
    changed[row, first] = 259 - changed[row, first]
    before, after = (
        losses(models("llama"), ids, batch.labels, position_ids=plain)[row] for ids in (batch.ids, changed)
    )
    assert not np.array_equal(before[second], after[second])


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_what_follows_a_skip_sees_what_is_before_it_only_because_of_the_mask(models, family):
    model = models(family)
    tokens = np.random.default_rng(0).integers(2, 258, 200)
    windows = Corpus(tokens=tokens.astype(np.int32), ends=np.array([200]), bos=None).windows(LENGTH)
    posed = Posed(windows=windows, target=200).batch(seed=0, stage=0, step=0, size=4)
    jumps = [int(np.flatnonzero(np.diff(row) != 1)[0]) + 1 for row in posed.positions]
    changed = posed.ids.copy()
    for row, jump in enumerate(jumps):
        changed[row, :jump] = 259 - changed[row, :jump]
    arguments = posed.arguments("cpu")
    for mask, sees in ((arguments, True), ({"position_ids": arguments["position_ids"]}, False)):
        before, after = (losses(model, ids, posed.labels, **mask) for ids in (posed.ids, changed))
        for row, jump in enumerate(jumps):
            assert np.array_equal(before[row, jump + 1 :], after[row, jump + 1 :]) != sees


def test_a_skip_gives_the_losses_of_the_distances_that_it_stands_for(models):
    """A window with a hole, against the whole text with the tokens of the hole masked out."""
    model, cut, skip = models("llama"), 20, 100
    tokens = np.random.default_rng(1).integers(2, 258, (1, LENGTH))
    posed = losses(
        model,
        tokens,
        tokens,
        position_ids=torch.cat([torch.arange(cut), torch.arange(cut + skip, LENGTH + skip)])[None],
        attention_mask=torch.ones(1, LENGTH, dtype=torch.long),
    )
    whole = np.insert(tokens, [cut] * skip, 5, axis=1)
    mask = torch.ones(1, LENGTH + skip, dtype=torch.long)
    mask[:, cut : cut + skip] = 0
    masked = losses(model, whole, whole, attention_mask=mask, position_ids=torch.arange(LENGTH + skip)[None])
    assert np.abs(posed[0, cut + 1 :] - masked[0, cut + skip + 1 :]).max() < 2e-5
    assert np.abs(posed - losses(model, tokens, tokens)).max() > 0.01


# Checks of a model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt_neox", "falcon"])
def test_stock_families_pass(models, family, attention):
    check_packing(models(family, attention))
    check_skipping(models(family, attention))


def test_a_model_of_bfloat16_passes(models):
    model = AutoModelForCausalLM.from_pretrained(models("llama").name_or_path, dtype=torch.bfloat16).eval()
    check_packing(model)
    check_skipping(model)


def test_code_that_joins_packed_documents_is_refused(models, monkeypatch):
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    with pytest.raises(
        RopextError, match="LlamaForCausalLM and sdpa attention, a change in one moves the next by 1 of"
    ):
        check_packing(models("llama"))


def test_one_layer_that_joins_packed_documents_is_noticed(models):
    model = models("qwen2")
    handle = model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )
    try:
        with pytest.raises(RopextError, match="must not see each other"):
            check_packing(model)
    finally:
        handle.remove()


def test_a_kernel_that_parts_documents_only_in_a_single_row_is_noticed(models, monkeypatch):
    """As flash attention does."""
    real = masking_utils.find_packed_sequence_indices
    single = lambda positions: real(positions) if len(positions) == 1 else None  # noqa: E731
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", single)
    with pytest.raises(RopextError, match="must not see each other"):
        check_packing(models("llama"))


def test_a_state_space_model_is_refused():
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.5)
    with pytest.raises(RopextError, match="must not see each other: with MambaForCausalLM"):
        check_packing(MambaForCausalLM(config).eval())


def test_a_model_that_silently_drops_positions_is_refused(models):
    with pytest.raises(RopextError, match="BloomForCausalLM and eager attention, a change in one moves the next"):
        check_packing(models("bloom", "eager"))
    with pytest.raises(RopextError, match="BloomForCausalLM and eager attention, its code takes no notice of them"):
        check_skipping(models("bloom", "eager"))


def test_a_model_that_takes_no_positions_is_refused(models, monkeypatch):
    model = models("llama")
    monkeypatch.setattr(type(model.model), "forward", lambda self, input_ids, use_cache: None)
    for check in (check_packing, check_skipping):
        with pytest.raises(RopextError, match="LlamaForCausalLM.*its code takes none.*use whole windows"):
            check(model)


def test_code_that_ignores_positions_is_refused_for_skipping(models, monkeypatch):
    real = modeling_llama.LlamaRotaryEmbedding.forward

    def counted(self, x, position_ids):
        return real(self, x, torch.arange(x.shape[1])[None])

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", counted)
    with pytest.raises(RopextError, match="its code takes no notice of them; train it at full length"):
        check_skipping(models("llama"))
    check_packing(models("llama"))


def test_code_that_parts_at_a_skip_in_spite_of_the_mask_is_refused(models, monkeypatch):
    model = models("llama")
    real = type(model.model).forward
    monkeypatch.setattr(
        type(model.model), "forward", lambda self, attention_mask=None, **rest: real(self, attention_mask=None, **rest)
    )
    with pytest.raises(RopextError, match="sees nothing of what is before it"):
        check_skipping(model)
