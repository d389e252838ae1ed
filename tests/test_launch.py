"""Evaluation in several processes: the figures of one, each window scored once, one report, one voice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ropext import api
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.slow
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 256}


def launched(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`ropext` under torchrun on the CPU; what torchrun itself says is on stderr too."""
    command = ["torch.distributed.run", "--nproc_per_node", str(processes), "--standalone", "-m", "ropext"]
    return subprocess.run(
        [sys.executable, "-m", *command, *arguments, "--device", "cpu"], capture_output=True, text=True
    )


def test_three_processes_score_22_windows_once_and_give_the_figures_of_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number, windows in enumerate((9, 7, 6)):
        Path(f"texts/{number}.txt").write_text(
            "".join(chr(97 + (7 * i + number * i * i) % 26) for i in range(511 * windows))
        )
    make_checkpoint(Path("default"))
    make_checkpoint(Path("dynamic"), rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    make_checkpoint(Path("longrope"), max_position_embeddings=1024, rope_scaling=LONGROPE | ORIGINAL, **ORIGINAL)
    names = ["default", "dynamic", "longrope"]
    one = api.evaluate(names, lengths=(128, 512), data="texts", last_tokens=64, batch_size=4, say=lambda line: None)
    wanted = api.eval_document(one)
    done = launched(
        3,
        "eval",
        *names,
        *("--lengths", "512,128", "--data", "texts", "--last-tokens", "64", "--batch-size", "4"),
        *("--rescore", "--json", "--out", "report"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # one document: only the first process prints
    assert json.loads(Path("report/report.json").read_text()) == found
    for mine, theirs in zip(found["models"], wanted["models"], strict=True):
        assert theirs["results"][1]["windows"] == 22
        for figure, expected in zip(mine["results"][::-1], theirs["results"], strict=True):
            assert (figure["windows"], figure["tokens"]) == (expected["windows"], expected["tokens"])
            assert figure["nll"] == pytest.approx(expected["nll"], rel=1e-6)
        for figure, expected in zip(mine["by_context"][::-1], theirs["by_context"], strict=True):
            assert figure["nll"] == pytest.approx(expected["nll"], rel=1e-6)
    refused = launched(2, "eval", "default", "--lengths", "512", "--data", "texts", "--out", "report")
    assert refused.returncode != 0 and refused.stderr.count("an existing output is not overwritten") == 1
