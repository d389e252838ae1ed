"""The shipped configurations are ones that Accelerate reads; one that it would drop in silence stops a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint

RECIPES = Path(__file__).parents[1] / "recipes"
CONFIGURATIONS = sorted((RECIPES / "accelerate").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGURATIONS, ids=lambda file: file.stem)
def test_accelerate_reads_the_configuration(file):
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(file))  # refuses unknown keys
    assert found.num_processes == 8 and found.mixed_precision == "no"
    assert (found.fsdp_config.get("fsdp_version") == 2) == (file.stem == "fsdp2")


@pytest.mark.slow
def test_fsdp_that_accelerate_would_drop_on_a_cpu_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("source"))
    Path("text.txt").write_text("some words of a text " * 400)
    command = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "ropext", "finetune", "source"]
    options = ["--schedule", "256", "--data", "text.txt", "--steps-per-stage", "1", "--device", "cpu", "--out", "tuned"]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    done = subprocess.run([sys.executable, "-m", *command, *options], capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.count("FSDP was asked for, and Accelerate would run") == 1
    assert not Path("tuned").exists()
