"""`ropext.patch_model` in memory does what `ropext patch` does on disk: the same plan, rules and logits."""

from __future__ import annotations

import pytest

import ropext
from ropext.errors import Refused, UsageError
from tests.tiny import make_checkpoint

LISTS = {"short_factor": (1.0,) * 8, "long_factor": (1.0, 1.1, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)}
REQUESTS = [
    {"method": "linear"},
    {"method": "ntk"},
    {"method": "abf", "theta": 5e5},
    {"method": "dynamic"},
    {"method": "ntk-by-parts"},
    {"method": "yarn", "attention_factor": 1.25, "truncate": False},
    {"method": "longrope", **LISTS},
    {"method": "llama3"},
    {"method": "progressive", "inner": "yarn", "beta_fast": 16.0},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("m") / "llama")


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model, length):
    import torch

    with torch.no_grad():
        return model(torch.arange(length)[None] % 320, use_cache=False).logits


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request["method"])
def test_a_model_patched_in_memory_equals_the_written_checkpoint(source, tmp_path, request_):
    import torch

    written = ropext.patch(str(source), factor=4.0, out=tmp_path / "p", **request_)
    model = load(source)
    result = ropext.patch_model(model, factor=4.0, **request_)
    for length in (200, 900):
        assert torch.equal(logits(model, length), logits(load(tmp_path / "p"), length))
        model_anew = load(source)
        if length == 900:
            assert not torch.allclose(logits(model_anew, length), logits(model, length), atol=1e-2)
    assert model.config.max_position_embeddings == (256 if request_["method"] == "dynamic" else 1024)
    assert (result.target_length, result.rope_theta) == (written.target_length, written.rope_theta)
    assert result.verified in written.verified
    codes = {finding.code for finding in written.findings}
    assert {finding.code for finding in result.findings} == codes


def test_gpt_neox_with_its_share_of_a_head_and_grouped_models_are_patched_alike(tmp_path):
    import torch

    for family in ("gpt_neox", "qwen3"):
        source = make_checkpoint(tmp_path / family, family)
        ropext.patch(str(source), method="yarn", factor=4.0, out=tmp_path / f"{family}-yarn")
        model = load(source)
        ropext.patch_model(model, method="yarn", factor=4.0)
        assert torch.equal(logits(model, 900), logits(load(tmp_path / f"{family}-yarn"), 900))


@pytest.mark.parametrize("method", ["ntk", "yarn"])
def test_a_model_is_not_patched_twice_by_accident_wherever_the_first_patch_was_made(source, tmp_path, method):
    import torch

    model = load(source)
    ropext.patch_model(model, method=method, factor=4.0)
    ropext.patch(str(source), method=method, factor=4.0, out=tmp_path / "p", verify=False)
    for patched in (model, load(tmp_path / "p")):
        before = logits(patched, 300)
        with pytest.raises(Refused, match=r"factors never multiply: this checkpoint was already extended by 4\.0"):
            ropext.patch_model(patched, method=method, factor=2.0)
        assert torch.equal(logits(patched, 300), before)
        ropext.patch_model(patched, method=method, factor=2.0, extend_scaling=True)
        whole = load(source)
        ropext.patch_model(whole, method=method, factor=8.0)
        assert torch.equal(logits(patched, 900), logits(whole, 900))


def test_a_refused_request_leaves_the_model_as_it_was(source):
    import torch

    model = load(source)
    before, config = logits(model, 300), model.config.to_dict()
    for options, error in (
        ({"method": "yarn", "factor": 0.25}, Refused),
        ({"method": "foo", "factor": 4.0}, UsageError),
        ({"method": "longrope", "factor": 4.0, "short_factor": (1.0,), "long_factor": (1.0,)}, Refused),
    ):
        with pytest.raises(error):
            ropext.patch_model(model, **options)
    assert torch.equal(logits(model, 300), before) and model.config.to_dict() == config


def test_a_model_without_a_rotary_embedding_is_refused(tmp_path):
    with pytest.raises(Refused, match="learned positions"):
        ropext.patch_model(load(make_checkpoint(tmp_path / "m", "gpt2")), method="ntk", factor=4.0)
