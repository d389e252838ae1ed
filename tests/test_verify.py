"""What stock transformers computes from a planned config is the plan's table, or nothing is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

import ropext
from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused, RopextError
from ropext.facts import read_facts
from ropext.plan import make_plan
from ropext.stock import read_stock
from ropext.verify import verify
from tests.bare import bare_checkpoint

LAYERS = ["sliding_attention", "full_attention"]


@pytest.fixture
def planned(tmp_path):
    def plan(method="linear", **config):
        checkpoint = open_checkpoint(bare_checkpoint(tmp_path / "m", **config))
        return make_plan(checkpoint.config, read_facts(checkpoint), method=method, factor=4.0)

    return plan


@pytest.mark.parametrize("method", ["linear", "ntk", "progressive"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gpt_neox"])
def test_the_plan_of_every_known_model_type_is_proved(planned, method, model_type):
    plan = planned(method, model_type=model_type, head_dim=16)
    import transformers

    assert verify(plan) == f"transformers {transformers.__version__}"
    reading = read_stock(plan.config)
    assert len(reading.tables) == 1 and not reading.warnings
    assert reading.tables[0].frequencies == pytest.approx(plan.frequencies, rel=1e-6)


def test_a_table_that_differs_in_one_pair_is_an_error_that_names_it(planned):
    plan = planned("ntk")
    off = (*plan.frequencies[:3], plan.frequencies[3] * 1.001, *plan.frequencies[4:])
    with pytest.raises(RopextError, match="turns pair 3 by .* planned was"):
        verify(replace(plan, frequencies=off))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"frequencies": (1.0,)}, "rotates 8 pairs, planned were 1"),
        ({"frequencies": (float("nan"),) * 8}, "planned was nan"),
        ({"attention_scaling": 1.1}, "scales attention by 1, planned was 1.1"),
    ],
)
def test_another_size_a_nan_and_another_temperature_are_errors(planned, change, reason):
    with pytest.raises(RopextError, match=reason):
        verify(replace(planned("linear"), **change))


def test_a_config_that_only_the_newer_reader_would_obey_elsewhere_is_noticed(planned):
    plan = planned("linear")
    ignored = {**plan.config, "rope_scaling": None, "rope_parameters": None}
    with pytest.raises(RopextError, match="the table that a reader computes must be the planned one"):
        verify(replace(plan, config=ignored))


def test_what_transformers_warns_about_rope_is_an_error(planned):
    plan = planned("linear")
    block = {**plan.config["rope_parameters"], "attn_factor": 1.0}
    with pytest.raises(RopextError, match="without a rope warning: .*attn_factor"):
        verify(replace(plan, config={**plan.config, "rope_scaling": block, "rope_parameters": block}))


def test_a_config_that_transformers_cannot_read_is_an_error_of_one_line(planned):
    plan = planned("linear")
    with pytest.raises(RopextError, match="must be able to read the config") as failure:
        verify(replace(plan, config={**plan.config, "hidden_act": "no such"}))
    assert len(str(failure.value).splitlines()) == 1 and len(str(failure.value)) < 400


def test_a_model_without_a_rotary_module_cannot_be_proved(planned):
    plan = planned("linear")
    with pytest.raises(RopextError, match="builds none"):
        verify(replace(plan, config={**plan.config, "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2}))


def test_another_model_type_is_taken_where_its_table_proves_right(tmp_path):
    source = bare_checkpoint(tmp_path / "m", model_type="olmo2")
    result = ropext.patch(str(source), method="ntk", factor=4.0, out=tmp_path / "p")
    assert result.verified and (tmp_path / "p" / "config.json").exists()


@pytest.mark.parametrize(
    ("config", "method", "reason"),
    [
        ({"model_type": "phi3", "pad_token_id": 0}, "linear", "phi3 cannot carry linear, .* Use ntk or longrope"),
        ({"model_type": "phi3", "pad_token_id": 0}, "yarn", "phi3 cannot carry yarn, .* Use ntk or longrope"),
        ({"model_type": "gptj", "n_embd": 64, "n_head": 4}, "linear", "gptj has rotary code of its own"),
        ({"model_type": "olmo3", "layer_types": LAYERS}, "ntk", "olmo3 cannot carry ntk, .* one theta"),
        ({"model_type": "granitemoehybrid", "position_embedding_type": None}, "linear", "builds none for this"),
        ({"model_type": "no_such_type"}, "linear", "does not know 'no_such_type'"),
    ],
)
def test_a_model_type_that_cannot_be_extended_is_refused_for_the_true_reason_and_nothing_written(
    tmp_path, config, method, reason
):
    source = bare_checkpoint(tmp_path / "m", **config)
    with pytest.raises(Refused, match=reason) as refusal:
        ropext.patch(str(source), method=method, factor=4.0, out=tmp_path / "p")
    assert len(str(refusal.value).splitlines()) <= 2 and not (tmp_path / "p").exists()


def test_a_table_that_is_none_to_be_extended_must_stay_as_it_is(planned):
    plan = planned("ntk", model_type="gemma3_text", head_dim=16, layer_types=LAYERS)
    assert [table.layer_type for table in plan.kept_tables] == ["sliding_attention"]
    verify(plan)
    nested = plan.config["rope_parameters"]
    moved = {**nested, "sliding_attention": nested["full_attention"]}
    with pytest.raises(Refused, match="sliding_attention changes, though it is none to be extended"):
        verify(replace(plan, config={**plan.config, "rope_parameters": moved}))


def test_verifying_runs_no_code_of_the_checkpoint_and_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    import logging

    auto_map = {"AutoConfig": "configuration_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}
    source = bare_checkpoint(tmp_path / "m", auto_map=auto_map)
    for name in ("configuration_x.py", "modeling_x.py"):
        (source / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise RuntimeError\n")
    logger = logging.getLogger("transformers")
    before = (list(logger.handlers), logger.propagate)
    assert ropext.patch(str(source), method="ntk", factor=4.0, out=tmp_path / "p").verified
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "p" / "modeling_x.py").read_bytes() == (source / "modeling_x.py").read_bytes()
    assert (list(logger.handlers), logger.propagate) == before
