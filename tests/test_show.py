"""`ropext show` prints the table that readers really compute, every length, and where the checkpoint comes from."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ropext
from ropext import cli
from tests.bare import bare_checkpoint

ROOT = Path(__file__).parents[1]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def shown(folder):
    return ropext.show_checkpoint(str(folder))


def frequencies(table):
    return [pair.frequency for pair in table.pairs]


LISTS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + pair / 4 for pair in range(8)]}


@pytest.mark.parametrize(
    "block",
    [
        YARN,
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "beta_fast": 16},
        YARN | {"attention_factor": 1.0, "truncate": False},
        YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        YARN | {"rope_type": "longrope"} | LISTS,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},  # readers take the window for the original length
    ],
)
def test_the_shown_tables_are_those_of_stock_transformers(tmp_path, block):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    window = 256 if block["rope_type"] == "dynamic" else 1024
    found = shown(bare_checkpoint(tmp_path, rope_scaling=block, max_position_embeddings=window, limit=window))
    config = LlamaConfig.from_pretrained(tmp_path)
    assert found.not_computed is None
    assert [table.length for table in found.tables] == ([256, 1024] if len(found.tables) == 2 else [1024])
    for table in found.tables:
        stock, scaling = ROPE_INIT_FUNCTIONS[block["rope_type"]](config, "cpu", seq_len=table.length)
        assert frequencies(table) == pytest.approx(stock.tolist(), rel=1e-6)
        assert found.attention_scaling == pytest.approx(scaling)


def test_wavelength_and_turns_follow_from_the_frequency(tmp_path):
    found = shown(bare_checkpoint(tmp_path))
    first, *_, last = found.tables[0].pairs
    assert (first.wavelength, first.turns) == (pytest.approx(2 * math.pi), pytest.approx(256 / (2 * math.pi)))
    assert last.wavelength == pytest.approx(2 * math.pi * 10000 ** (14 / 16))
    assert (found.method, found.factor, found.rope_theta, found.rotary_dims) == ("default", None, 10000.0, 16)


def test_a_patched_checkpoint_shows_its_method_lengths_and_lineage(tmp_path):
    source = bare_checkpoint(tmp_path / "m", limit=256)
    ropext.patch(str(source), method="ntk", factor=4.0, out=tmp_path / "p", verify=False)
    found = shown(tmp_path / "p")
    assert (found.method, found.rope_type, found.factor, found.original_length) == ("ntk", "default", 4.0, 256)
    assert (found.window, found.native_length, found.tokenizer_length) == (1024, 256, 1024)
    assert found.rope_theta == pytest.approx(10000 * 4 ** (16 / 14))
    steps = [(step.label, step.window, step.native_length, step.method) for step in found.lineage]
    assert steps == [("source", 256, 256, None), ("patched", 1024, 256, "ntk")]


def test_dynamic_shows_the_window_that_stays_and_the_length_that_it_serves(tmp_path):
    ropext.patch(str(bare_checkpoint(tmp_path / "m")), method="dynamic", factor=4.0, out=tmp_path / "p", verify=False)
    found = shown(tmp_path / "p")
    assert (found.window, found.target_length) == (256, 1024)
    short, long = found.tables
    assert long.pairs[-1].frequency == pytest.approx(short.pairs[-1].frequency / 13)  # 4 * 4 - 3


def test_a_source_that_is_gone_is_named_all_the_same(tmp_path):
    source = bare_checkpoint(tmp_path / "m")
    ropext.patch(str(source), method="linear", factor=2.0, out=tmp_path / "p", verify=False)
    shutil.rmtree(source)
    first, second = shown(tmp_path / "p").lineage
    assert (first.label, first.path, first.window, second.label) == ("source", str(source), None, "patched")


@pytest.mark.parametrize("factor", ["4", None, float("nan"), float("inf"), -1, 0.5, True])
def test_a_factor_that_makes_no_table_is_said_to_make_none(tmp_path, factor, monkeypatch, capsys):
    bare_checkpoint(tmp_path, rope_scaling={"rope_type": "linear", "factor": factor})
    found = shown(tmp_path)
    assert found.tables == () and "factor" in found.not_computed
    monkeypatch.setattr(sys, "argv", ["ropext", "show", str(tmp_path), "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code and json.loads(capsys.readouterr().out)["tables"] == []


def test_show_needs_no_torch(tmp_path):
    bare_checkpoint(tmp_path, rope_scaling=YARN, max_position_embeddings=1024, limit=1024)
    program = (
        "import sys, ropext\n"
        f"found = ropext.show_checkpoint({str(tmp_path)!r})\n"
        "heavy = [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]\n"
        "print(len(found.tables[0].pairs), heavy)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "8 []\n", done.stderr


def test_an_extended_scaling_is_shown_with_the_factor_in_force(tmp_path):
    source = bare_checkpoint(tmp_path / "m", max_position_embeddings=1024, rope_scaling=YARN)
    ropext.patch(str(source), method="yarn", factor=2.0, extend_scaling=True, verify=False, out=tmp_path / "longer")
    found = shown(tmp_path / "longer")
    assert (found.factor, found.window) == (8.0, 2048)
