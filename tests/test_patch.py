"""`ropext patch` end to end: real checkpoints, the real command line, and stock transformers 4 and 5 as judges."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ropext
from ropext.errors import Refused, RopextError, UsageError
from tests.bare import ABSENT, bare_checkpoint, edit_json, snapshot
from tests.tiny import make_checkpoint

ROOT = Path(__file__).parents[1]
THETA = {"linear": 10000.0, "ntk": 10000 * 4 ** (16 / 14), "progressive": 10000 * 4 ** (16 / 14)}
DIVISOR = {"linear": 4.0, "ntk": 1.0, "progressive": 1.0}


def command(*arguments, cwd=None):
    """The real command line in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "ropext", *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True
    )


def patch(source, out, **options):
    return ropext.patch(str(source), **({"method": "linear", "factor": 4.0, "out": out, "verify": False} | options))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return {
        "llama": make_checkpoint(root / "llama"),
        "newer": make_checkpoint(root / "newer", layout="new"),
        "shards": make_checkpoint(root / "shards", shards=2, tie_word_embeddings=True),
        "mistral": make_checkpoint(root / "mistral", "mistral"),
        "qwen2": make_checkpoint(root / "qwen2", "qwen2"),
        "qwen3": make_checkpoint(root / "qwen3", "qwen3"),
        "gpt_neox": make_checkpoint(root / "gpt_neox", "gpt_neox", rotary_pct=1.0),
    }


@pytest.fixture(scope="module")
def outputs(sources, tmp_path_factory):
    """Every source by every method, verified: (source name, method) -> directory."""
    root = tmp_path_factory.mktemp("outputs")
    found = {}
    for name, source in sources.items():
        for method in THETA:
            found[name, method] = root / f"{name}-{method}"
            result = patch(source, found[name, method], method=method, verify=True)
            assert result.verified and result.written
    return found


@pytest.fixture(scope="module", params=["this_reader", "other_reader"])
def readings(request, sources, outputs):
    """What one transformers major does with each output, and with the unpatched llama: one start for all of them."""
    folders = {("llama", "unpatched"): sources["llama"], **outputs}
    found = request.getfixturevalue(request.param)([256, 1024], list(folders.values()))
    return dict(zip(folders, found, strict=True))


def test_stock_transformers_computes_the_planned_table_without_a_rope_warning(readings, outputs):
    for name, method in outputs:
        reading = readings[name, method]
        expected = [THETA[method] ** (-pair / 8) / DIVISOR[method] for pair in range(8)]
        for length in (256, 1024):
            assert reading.table(length) == pytest.approx(expected, rel=1e-6), (name, method)
            assert set(reading.scaling[length].values()) == {1.0}
        assert not reading.log and not reading.warnings, (name, method)


def test_linear_divides_every_frequency_by_exactly_4(readings):
    before, after = (readings["llama", method].table(256) for method in ("unpatched", "linear"))
    assert after == [frequency / 4 for frequency in before]  # division by 4 is exact in float32


def test_weights_and_every_other_file_are_byte_identical(sources, outputs):
    for (name, method), out in outputs.items():
        before, after = snapshot(sources[name]), snapshot(out)
        changed = {"config.json", "tokenizer_config.json"}
        assert {file for file in before if after.get(file) != before[file]} == changed, (name, method)
        assert set(after) - set(before) == {"ropext.json"}


def test_a_patched_checkpoint_loads_whole_with_the_logits_of_its_weights(sources, outputs):
    """Position 0 turns by no angle, so the first token's logits do not depend on the rope."""
    import torch
    from transformers import AutoModelForCausalLM

    for name in ("llama", "shards"):
        logits = []
        for folder in (sources[name], outputs[name, "ntk"]):
            model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
            assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
            assert model.config.tie_word_embeddings == (name == "shards")
            with torch.no_grad():
                logits.append(model(torch.tensor([[5, 6, 7]])).logits[0, 0])
        assert torch.equal(*logits)


def test_the_tokenizer_of_a_patched_checkpoint_states_the_new_window(outputs):
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(outputs["llama", "ntk"]).model_max_length == 1024


def test_null_empty_absent_and_default_scaling_give_four_identical_configs(tmp_path):
    written = set()
    for number, form in enumerate((None, {}, ABSENT, {"rope_type": "default"})):
        source = bare_checkpoint(tmp_path / f"m{number}", rope_scaling=form)
        patch(source, tmp_path / f"p{number}", method="ntk")
        written.add((tmp_path / f"p{number}" / "config.json").read_bytes())
    assert len(written) == 1 and b"{}" not in written.pop()


def test_only_rope_keys_differ_in_a_config_full_of_other_things(tmp_path):
    extras = {
        "auto_map": {"AutoModelForCausalLM": "modeling_x.Model"},
        "quantization_config": {"quant_method": "gptq", "bits": 4},
        "my_key": 1,
        "note": "naïve — 漢字 \u2028",
        "nested": {"a": [1, 2.5, None, True]},
        "original_max_position_embeddings": 256,
    }
    source = bare_checkpoint(tmp_path / "m", **extras)
    (source / "modeling_x.py").write_text("raise RuntimeError('never run')\n")
    result = patch(source, tmp_path / "p", method="ntk", verify=True)
    before, after = (json.loads((folder / "config.json").read_bytes()) for folder in (source, tmp_path / "p"))
    rope = {"max_position_embeddings", "rope_theta", "rope_parameters"}
    assert (
        {key for key in after if key not in before or after[key] != before[key]} == rope == set(result.config_changes)
    )
    assert "漢字" in (tmp_path / "p" / "config.json").read_text(encoding="utf-8")


def test_the_result_tells_what_was_taken_and_written(tmp_path):
    source = bare_checkpoint(tmp_path / "m", max_position_embeddings=320, limit=320)
    result = patch(source, tmp_path / "p")
    assert (result.native_length, result.target_length, result.factor) == (320, 1280, 4.0)
    assert any("taking 320 as the native length" in found.message for found in result.findings)
    stated = patch(source, tmp_path / "q", native_length=256)
    assert (stated.native_length, stated.target_length, stated.factor) == (256, 1024, 4.0)
    with pytest.raises(Refused, match="321 is above max_position_embeddings 320"):
        patch(source, tmp_path / "r", native_length=321)


def test_a_target_length_gives_the_exact_factor(tmp_path):
    result = patch(bare_checkpoint(tmp_path / "m"), tmp_path / "p", factor=None, to=1000)
    assert result.factor == 3.90625 and result.target_length == 1000
    assert json.loads((tmp_path / "p" / "config.json").read_text())["rope_scaling"]["factor"] == 3.90625


def test_a_dry_run_gives_the_same_answer_and_touches_nothing(tmp_path):
    source = bare_checkpoint(tmp_path / "m")
    before = snapshot(tmp_path)
    dry = patch(source, tmp_path / "p", dry_run=True)
    assert snapshot(tmp_path) == before and not (tmp_path / "p").exists() and not dry.written
    wet = patch(source, tmp_path / "p")
    assert dry.config_changes == wet.config_changes and dry.findings == wet.findings


def test_a_window_that_was_raised_by_hand_is_refused_before_anything_is_written(tmp_path):
    source = bare_checkpoint(tmp_path / "m")
    edit_json(source / "config.json", max_position_embeddings=1024)
    with pytest.raises(Refused, match=r"--native-length 256.*\[RPX003\]"):
        patch(source, tmp_path / "p")
    assert patch(source, tmp_path / "p", native_length=256).target_length == 1024
    edit_json(tmp_path / "p" / "config.json", max_position_embeddings=4096)
    for options in ({}, {"native_length": 256}):
        with pytest.raises(Refused, match=r"is 4096, ropext\.json wrote 1024.*\[RPX001\]"):
            patch(tmp_path / "p", tmp_path / "q", **options)
    assert not (tmp_path / "q").exists()


def test_what_was_patched_once_is_not_patched_again(tmp_path):
    patch(bare_checkpoint(tmp_path / "m"), tmp_path / "p", method="ntk")
    with pytest.raises(Refused, match=rf"already extended by 4\.0\. .*{tmp_path / 'm'}.*\[RPX004\]"):
        patch(tmp_path / "p", tmp_path / "q")


@pytest.mark.parametrize(
    ("family", "words"),
    [("gpt2", "learned positions"), ("bloom", "ALiBi"), ("falcon", "ALiBi"), ("gptj", "rotary code of its own")],
)
def test_models_without_a_rope_that_the_keys_reach_are_refused_with_nothing_written(tmp_path, family, words):
    source = make_checkpoint(tmp_path / "m", family, **({"alibi": True} if family == "falcon" else {}))
    with pytest.raises(Refused, match=words):
        patch(source, tmp_path / "p")
    assert not (tmp_path / "p").exists()


JUNK = [
    None,
    True,
    0,
    -1,
    1,
    2.5,
    1e308,
    10**400,
    math.nan,
    math.inf,
    "",
    "4",
    "x",
    [],
    [1],
    {},
    {"a": {}},
    {"type": []},
]
KEYS = ["model_type", "hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_theta"]
KEYS += ["rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct", "rotary_emb_base", "sliding_window"]
KEYS += ["use_sliding_window", "auto_map", "text_config", "seq_length", "n_positions", "alibi", "unrelated"]


@pytest.mark.parametrize("method", ["linear", "ntk"])
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "qwen2", "falcon"])
def test_no_value_of_any_key_ends_in_anything_but_a_plan_or_a_short_refusal(tmp_path, model_type, method):
    source = bare_checkpoint(tmp_path / "m", model_type=model_type)
    plain = json.loads((source / "config.json").read_text())
    for key in KEYS:
        for value in JUNK:
            (source / "config.json").write_text(json.dumps(plain | {key: value}))
            try:
                result = patch(source, tmp_path / "p", method=method, dry_run=True)
            except RopextError as error:
                assert len(str(error).splitlines()) <= 2 and len(str(error)) < 500, (key, value)
            else:
                assert 1 < result.rope_theta < math.inf and result.target_length == 4 * result.native_length


@pytest.mark.parametrize("key", ["type", "rope_type", "factor", "rope_theta", "partial_rotary_factor", "mrope_section"])
def test_no_value_inside_a_rope_block_ends_in_anything_but_a_plan_or_a_short_refusal(tmp_path, key):
    for block in ("rope_scaling", "rope_parameters"):
        for value in JUNK:
            source = bare_checkpoint(tmp_path / "m", **{block: {"rope_type": "default", key: value}})
            try:
                result = patch(source, tmp_path / "p", method="ntk", dry_run=True)
            except RopextError as error:
                assert len(str(error).splitlines()) <= 2 and len(str(error)) < 500, (block, value)
            else:
                assert result.rope_theta == pytest.approx(THETA["ntk"]), (block, value)


def test_weights_are_one_of_three_ways(tmp_path):
    with pytest.raises(UsageError, match="--weights is one of clone, link, copy: found 'move'"):
        patch(bare_checkpoint(tmp_path / "m"), tmp_path / "p", weights="move")


def test_the_command_line_writes_a_loadable_checkpoint_and_prints_what_is_in_force(tmp_path):
    source = bare_checkpoint(tmp_path / "with space é")
    before = snapshot(source)
    done = command("patch", source, "--method", "NTK", "--factor", "4", "--out", tmp_path / "p")
    assert done.returncode == 0 and not done.stderr, done.stderr
    first, *_ = done.stdout.splitlines()
    assert first.startswith("source ") and str(source) in first
    for shown in (
        "ntk, factor 4",
        "256 -> 1024 tokens",
        "48760.5",
        "16 rotary dimensions",
        "transformers",
        str(tmp_path),
    ):
        assert shown in done.stdout
    assert snapshot(source) == before and (tmp_path / "p" / "ropext.json").exists()


def test_json_is_exactly_one_document_with_the_keys_of_the_contract(tmp_path):
    source = bare_checkpoint(tmp_path / "m", limits=[0.0, float("inf")])
    done = command("patch", source, "--method", "pi", "--to", "1k", "--json", "--no-verify", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert found["source"] == str(source)
    assert (tmp_path / found["out"] / "config.json").exists()
    assert (found["method"], found["factor"], found["native_length"], found["target_length"]) == (
        "linear",
        4.0,
        256,
        1024,
    )
    assert (found["rope_theta"], found["rotary_dims"], found["verified"]) == (10000.0, 16, [])
    assert found["config_changes"]["max_position_embeddings"] == [256, 1024]
    assert found["config_changes"]["rope_scaling"] == [None, {"rope_type": "linear", "factor": 4.0}]
    assert [set(finding) for finding in found["findings"]] == [{"code", "severity", "message", "fix"}]
