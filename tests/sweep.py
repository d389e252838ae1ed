"""Patches every causal model type of the installed transformers, by every method, and reads back what was written.

    python -m tests.sweep [MODEL_TYPE ...]

prints model type x method: `patched`, `refused` with its reason, or `failed`. The sources are default configs with no
weights to speak of; what was written is read by the installed transformers and by the one of ROPEXT_OTHER_READER.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ropext
from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused
from ropext.facts import read_facts
from ropext.plan import RopePlan, make_plan
from ropext.rope import METHODS as BUILT
from tests.bare import NAMES, write_safetensors

METHODS = tuple(method for method in ("linear", "ntk", "yarn", "dynamic", "llama3") if method in BUILT)
FACTOR = 4.0
TOLERANCE = 1e-5  # relative


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one model type with one method."""

    model_type: str
    method: str
    status: str  # patched, refused or failed
    reason: str = ""
    folder: Path | None = None  # what was written
    plan: RopePlan | None = None


def model_types() -> list[str]:
    """Every model type that AutoModelForCausalLM of the installed transformers knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


# What a default config leaves open although no model can be built without it.
COMPLETED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "nemotron": {"num_key_value_heads": 8},
}


def default_config(model_type: str) -> dict[str, Any] | None:
    """The default config as save_pretrained writes it, with few layers where the type takes them; None where the class
    refuses its own defaults."""
    from transformers import CONFIG_MAPPING

    try:
        config = json.loads(CONFIG_MAPPING[model_type]().to_json_string())
    except Exception:  # the stock class raises on its own defaults
        return None
    return _with_few_layers({"model_type": model_type, **config, **COMPLETED.get(model_type, {})})


def _with_few_layers(config: dict[str, Any]) -> dict[str, Any]:
    from tests.tables import loaded, model_of, with_few_layers

    cut = with_few_layers(config)
    try:
        model_of(loaded(cut))
    except Exception:  # a pattern of layers that fewer do not fill
        return config
    return cut


def sweep(work: Path, types: Iterable[str], methods: Sequence[str] = METHODS) -> list[Outcome]:
    """One outcome for each type and method, as the installed transformers proves them; outputs lie below `work`."""
    outcomes = []
    for model_type in types:
        config = default_config(model_type)
        if config is None:
            reason = "its default config is refused by its own class"
            outcomes += [Outcome(model_type=model_type, method=m, status="refused", reason=reason) for m in methods]
            continue
        source = work / model_type
        source.mkdir(parents=True)
        (source / "config.json").write_text(json.dumps(config))
        write_safetensors(source / "model.safetensors", NAMES)
        outcomes += [_outcome(source, model_type, method) for method in methods]
    return outcomes


def _outcome(source: Path, model_type: str, method: str) -> Outcome:
    found = Outcome(model_type=model_type, method=method, status="patched")
    out = source.with_name(f"{source.name}-{method}")
    try:
        ropext.patch(str(source), method=method, factor=FACTOR, out=out)
        checkpoint = open_checkpoint(source)
        plan = make_plan(checkpoint.config, read_facts(checkpoint), method=method, factor=FACTOR)
        return replace(found, folder=out, plan=plan)
    except Refused as refusal:
        return replace(found, status="refused", reason=str(refusal))
    except Exception as error:  # anything that is no refusal is a failure of ropext, whatever it is
        return replace(found, status="failed", reason=f"{type(error).__name__}: {error}")


def read_back(outcomes: Sequence[Outcome], pythons: Sequence[str], work: Path) -> list[Outcome]:
    """The same outcomes, failed where the transformers of one of `pythons` computes another table than was planned."""
    patched = [outcome for outcome in outcomes if outcome.plan is not None]
    listing = work / "list.json"
    listing.write_text(json.dumps([(str(outcome.folder), outcome.plan.target_length) for outcome in patched]))
    program = Path(__file__).with_name("tables.py")
    running = [
        subprocess.Popen([python, "-I", str(program), str(listing)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for python in pythons
    ]
    problems = {}
    for found in [json.loads(process.communicate()[0]) for process in running]:
        for outcome, reading in zip(patched, found["readings"], strict=True):
            if problem := _problem(outcome, reading):
                problems[outcome.model_type, outcome.method] = f"transformers {found['version']}: {problem}"
    return [
        replace(outcome, status="failed", reason=problem)
        if (problem := problems.get((outcome.model_type, outcome.method)))
        else outcome
        for outcome in outcomes
    ]


def _problem(outcome: Outcome, reading: Mapping[str, Any]) -> str | None:
    """What is unlike the plan in a reading; None where nothing is, or where this version does not know the type."""
    plan = outcome.plan
    assert plan is not None
    if "unknown" in reading:
        return None
    if "error" in reading:
        return str(reading["error"])
    kept = [table.frequencies for table in plan.kept_tables]
    planned = 0
    for name, table in reading["tables"].items():
        scaling = reading["scaling"][name]
        right = _near(table, plan.frequencies) and _near(reading["long"][name], plan.long_frequencies)
        if right and abs(scaling - plan.attention_scaling) <= TOLERANCE and not _aside(name):
            planned += 1
        elif not any(_near(table, frequencies) for frequencies in kept):
            return f"{name} is {table[:3]}... x {scaling}, planned {plan.frequencies[:3]}... x {plan.attention_scaling}"
    if not planned:
        return "no table is the planned one"
    return f"logs {reading['log'][0]!r}" if reading["log"] else None


def _aside(name: str) -> bool:
    return "sliding" in name or "local" in name.split(".")[-2]


def _near(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) <= TOLERANCE * b for a, b in zip(one, other, strict=True))


def table(outcomes: Sequence[Outcome]) -> str:
    """Counts, then one line for each model type and method that shows something."""
    counts = Counter(outcome.status for outcome in outcomes)
    lines = [f"{outcome.model_type:26} {outcome.method:8} {outcome.status:8} {outcome.reason}" for outcome in outcomes]
    return "\n".join([*lines, f"patched {counts['patched']}, refused {counts['refused']}, failed {counts['failed']}"])


def main(types: Sequence[str]) -> int:
    """Sweep, read back, print; 1 if anything failed."""
    warnings.simplefilter("ignore")
    work = Path(tempfile.mkdtemp())
    try:
        pythons = [python for python in (sys.executable, os.environ.get("ROPEXT_OTHER_READER")) if python]
        outcomes = read_back(sweep(work, types or model_types()), pythons, work)
    finally:
        shutil.rmtree(work)
    print(table(outcomes))
    return int(any(outcome.status == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
