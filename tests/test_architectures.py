"""Every causal model type of transformers, by every method: patched right in both majors, or refused for a true reason.

The sources are default configs (tests/sweep.py); what was written is read back by the installed transformers, and by
the other one where ROPEXT_OTHER_READER names it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter

import pytest

import ropext
from ropext.errors import Refused
from ropext.families import FLAT_BESIDE_NESTED, LIMITS, NEEDS_HEAD_DIM, NOT_EXTENDABLE
from tests.bare import ABSENT, CONFIG, bare_checkpoint
from tests.sweep import METHODS, model_types, read_back, sweep, table

# What a refusal may say; each is followed by the model type or by what was found.
TRUE_REASONS = re.compile(
    "only a rotary embedding that reads rope keys can be extended"
    "|only a rotary embedding can be extended: transformers .* builds none"
    "|only plain rope can be extended: .* has rope_type 'proportional'"
    "|only rotary layers can be extended"
    "|one kind of layers must see the whole context"
    "|rotary dimensions come in pairs"
    "|a plan must hold in every transformers that knows the model type"
    "|factors never multiply: this checkpoint was already scaled"
    "|the window must be max_position_embeddings|max_position_embeddings must be a whole number"
    "|stock transformers must be able to read the config"
    "|its default config is refused by its own class"
)
LAYERS = ["sliding_attention", "full_attention"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    work = tmp_path_factory.mktemp("sweep")
    pythons = [python for python in (sys.executable, os.environ.get("ROPEXT_OTHER_READER")) if python]
    found = read_back(sweep(work, model_types()), pythons, work)
    print(table(found))
    return found


def test_no_model_type_fails_with_any_method(outcomes):
    assert len(outcomes) == len(model_types()) * len(METHODS)
    failed = [
        f"{outcome.model_type} {outcome.method}: {outcome.reason}" for outcome in outcomes if outcome.status == "failed"
    ]
    assert not failed, "\n".join(failed)


def test_most_types_with_a_rotary_embedding_are_patched(outcomes):
    patched = Counter(outcome.method for outcome in outcomes if outcome.status == "patched")
    assert all(patched[method] > 100 for method in METHODS), patched


def test_every_refusal_has_a_reason_of_a_kind_that_was_checked(outcomes):
    refused = [outcome for outcome in outcomes if outcome.status == "refused"]
    unknown = {
        f"{outcome.model_type} {outcome.method}: {outcome.reason}"
        for outcome in refused
        if not TRUE_REASONS.match(outcome.reason)
    }
    assert not unknown


def test_the_table_of_what_has_no_rotary_embedding_agrees_with_the_modules_that_stock_code_builds():
    from tests.tables import loaded, model_of

    for model_type in sorted(NOT_EXTENDABLE.keys() - {"blt", "recurrent_gemma"}):
        try:
            model = model_of(loaded({"model_type": model_type}))
        except Exception:  # some defaults are no causal model
            continue
        buffers = [name for name, _ in model.named_buffers() if name.endswith("inv_freq")]
        assert not buffers, f"{model_type} builds {buffers}"


def test_the_tables_of_exceptions_name_model_types_that_exist():
    from transformers import CONFIG_MAPPING

    named = {*NOT_EXTENDABLE, *LIMITS, *NEEDS_HEAD_DIM, *FLAT_BESIDE_NESTED}
    assert named <= set(CONFIG_MAPPING.keys())


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn"])
def test_of_gemma3_only_the_full_attention_layers_change_in_both_layouts(tmp_path, method):
    config = {"model_type": "gemma3_text", "layer_types": LAYERS, "head_dim": 16, "sliding_window": 64}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None}
    source = bare_checkpoint(tmp_path / "m", **config | old)
    result = ropext.patch(str(source), method=method, factor=4.0, out=tmp_path / "p")
    written = json.loads((tmp_path / "p" / "config.json").read_text())
    nested = written["rope_parameters"]
    assert nested["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert written["rope_local_base_freq"] == 1e4 and written["sliding_window"] == 64
    assert nested["full_attention"]["rope_theta"] == written["rope_theta"] == result.rope_theta
    kind = "default" if method == "ntk" else method
    assert (
        nested["full_attention"]["rope_type"]
        == (written["rope_scaling"] or {"rope_type": "default"})["rope_type"]
        == kind
    )


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn"])
@pytest.mark.parametrize("scaling", [{"type": "mrope", "mrope_section": [2, 3, 3]}, None])
def test_of_a_multimodal_config_the_text_config_is_patched_and_keeps_its_sections(tmp_path, method, scaling):
    shared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    text = {key: CONFIG[key] for key in (*shared, "vocab_size", "max_position_embeddings", "rope_theta")}
    vision = {"model_type": "qwen2_vl", "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    whole = {
        "model_type": "qwen2_vl",
        "vision_config": vision,
        "text_config": text | {"model_type": "qwen2_vl_text"} | ({"rope_scaling": scaling} if scaling else {}),
    }
    source = bare_checkpoint(tmp_path / "m", **dict.fromkeys(CONFIG, ABSENT) | whole)
    assert ropext.patch(str(source), method=method, factor=4.0, out=tmp_path / "p").verified
    written = json.loads((tmp_path / "p" / "config.json").read_text())
    assert list(written) == list(whole) and written["vision_config"] == vision
    assert written["text_config"]["max_position_embeddings"] == 1024
    block = written["text_config"]["rope_parameters"]
    assert block["rope_type"] == ("default" if method == "ntk" else method)
    assert block.get("mrope_section") == (scaling or {}).get("mrope_section")


def test_mixtral_gets_its_head_dim_stated_where_stock_code_fails_without(tmp_path):
    source = bare_checkpoint(tmp_path / "m", model_type="mixtral", num_local_experts=2)
    for method, head_dim in (("yarn", 16), ("dynamic", 16), ("linear", None)):
        ropext.patch(str(source), method=method, factor=4.0, out=tmp_path / method)
        assert json.loads((tmp_path / method / "config.json").read_text()).get("head_dim") == head_dim


def test_four_spellings_of_plain_rope_give_the_same_bytes_of_a_type_read_from_stock_code(tmp_path):
    written = set()
    for number, scaling in enumerate((None, {}, ABSENT, {"rope_type": "default"})):
        source = bare_checkpoint(tmp_path / f"m{number}", model_type="olmo2", rope_scaling=scaling)
        ropext.patch(str(source), method="linear", factor=4.0, out=tmp_path / f"p{number}")
        written.add((tmp_path / f"p{number}" / "config.json").read_bytes())
    assert len(written) == 1


@pytest.mark.parametrize("model_type", ["gpt2", "mpt", "bloom"])
def test_rope_keys_are_never_written_into_a_family_that_cannot_read_them(tmp_path, model_type):
    source = bare_checkpoint(tmp_path / "m", model_type=model_type, n_embd=64, n_head=4)
    for verify in (True, False):
        with pytest.raises(Refused, match=f"{model_type} has (learned positions|ALiBi)"):
            ropext.patch(str(source), method="linear", factor=4.0, out=tmp_path / "p", verify=verify)
    assert not (tmp_path / "p").exists()
