"""Loading: what stock transformers saved loads whole, and anything else is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from ropext.errors import RopextError
from ropext.load import check_rotary_tables, load_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def test_a_model_loads_in_eval_mode_with_tied_weights(checkpoint: Path) -> None:
    model = load_model(checkpoint)
    assert not model.training
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_bfloat16_model_keeps_its_rotary_table_in_float32(checkpoint: Path) -> None:
    model = load_model(checkpoint, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_loading_shows_no_progress_bar_and_leaves_the_setting_alone(
    checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load_model(checkpoint)
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()


def test_a_missing_weight_is_refused_by_name(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(RopextError, match=r"lacks 1, such as model\.norm\.weight"):
        load_model(checkpoint)


def test_a_truncated_weight_file_is_refused_in_one_line(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RopextError, match="cannot load") as caught:
        load_model(checkpoint)
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_not_read(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    torch.save(load_file(file), checkpoint / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(RopextError, match="cannot load"):
        load_model(checkpoint)


def test_code_in_a_checkpoint_does_not_run(checkpoint: Path) -> None:
    ran = checkpoint / "ran"
    (checkpoint / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    file = checkpoint / "config.json"
    config = json.loads(file.read_text())
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    file.write_text(json.dumps(config | {"model_type": "own", "auto_map": auto_map}))
    with pytest.raises(RopextError, match="cannot load"):
        load_model(checkpoint)
    assert not ran.exists()


@pytest.mark.parametrize("spoil", [lambda table: table * 4, lambda table: table * float("nan"), torch.zeros_like])
def test_a_wrong_rotary_table_is_caught(checkpoint: Path, spoil) -> None:
    model = load_model(checkpoint)
    table = model.model.rotary_emb.inv_freq
    table.copy_(spoil(table.clone()))
    with pytest.raises(RopextError, match="rotary table does not match config"):
        check_rotary_tables(model)


def test_a_rotary_table_cast_to_half_precision_is_caught(checkpoint: Path) -> None:
    model = load_model(checkpoint).to(torch.bfloat16)
    with pytest.raises(RopextError, match="rotary table does not match config"):
        check_rotary_tables(model)


def test_a_scaled_table_and_tables_by_layer_type_pass_and_are_checked() -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    config = AutoConfig.for_model("gemma3_text", layer_types=["sliding_attention", "full_attention"], **shape)
    model = AutoModelForCausalLM.from_config(config)
    check_rotary_tables(model)
    model.model.rotary_emb.full_attention_inv_freq[1] *= 1.001
    with pytest.raises(RopextError, match="full_attention_inv_freq turns pair 1"):
        check_rotary_tables(model)
