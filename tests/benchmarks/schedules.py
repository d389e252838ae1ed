"""Ways to train the built-in checkpoint from 2k to 8k with equal tokens: perplexity at 512, 2048 and 8192 after each.

    python tests/benchmarks/schedules.py FOLDER [TOKENS]

Growing stages whose factor grows (progressive) or is that of the target from the start (fixed), and one stage at 8k
(direct), by ntk and linear, three seeds each; and one seed of yarn, of LoRA with and without norms and embeddings, and
of skipped positions (PoSE). About a minute and a half a run on two cores; what is done is kept in FOLDER/results.json,
so the program goes on where it was stopped. Prints a table with the mean over seeds and a 95% interval (Student's t).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ropext import api

LENGTHS = (512, 2048, 8192)
GROWING, DIRECT = (2048, 4096, 8192), (8192,)
T_95 = 4.303  # Student's t with two degrees of freedom
quiet = {"say": lambda line: None}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train."""

    name: str
    patch: dict = field(default_factory=dict)
    tune: dict = field(default_factory=dict)
    schedule: tuple[int, ...] = GROWING
    seeds: tuple[int, ...] = (0,)


def ways() -> list[Way]:
    found = []
    for method in ("ntk", "linear"):
        seeds = (0, 1, 2)
        growing = {"method": "progressive", "inner": method}
        found.append(Way(name=f"{method}, progressive 2k,4k,8k", patch=growing, seeds=seeds))
        found.append(Way(name=f"{method}, fixed 2k,4k,8k", patch={"method": method}, seeds=seeds))
        found.append(Way(name=f"{method}, direct 8k", patch={"method": method}, schedule=DIRECT, seeds=seeds))
    ntk = {"method": "ntk"}
    found.append(Way(name="yarn, fixed 2k,4k,8k", patch={"method": "yarn"}))
    found.append(
        Way(name="ntk, LoRA 16 with norms and embeddings", patch=ntk, tune={"lora": 16, "learning_rate": 2e-3})
    )
    lora_only = {"lora": 16, "lora_only": True, "learning_rate": 2e-3}
    found.append(Way(name="ntk, LoRA 16 alone", patch=ntk, tune=lora_only))
    found.append(Way(name="ntk, PoSE to 4k,8k in rows of 2k", patch=ntk, tune={"pose": True}, schedule=(4096, 8192)))
    return found


def main(folder: Path, tokens: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    kept = Path("results.json")
    results = json.loads(kept.read_text()) if kept.exists() else {}
    untuned = {
        name: api.evaluate(["built-in"], methods=[name], factor=4.0, lengths=LENGTHS, documents=12, **quiet)
        for name in ("ntk", "linear", "yarn")
    }
    for seed in (0, 1, 2):
        for way in ways():
            key = key_of(way, seed, tokens)
            if seed in way.seeds and key not in results:
                results[key] = run(way, seed, tokens)
                kept.write_text(json.dumps(results, indent=2))
                print(key, results[key], flush=True)
    print(f"\n{tokens} tokens in all\n\n| way | seeds | {' | '.join(map(str, LENGTHS))} |\n|---|---|---|---|---|")
    source = next(iter(untuned.values())).models[0]
    row("source", "", [f"{figure.perplexity:.2f}" for figure in source.results])
    for name, found in untuned.items():
        row(f"{name}, not trained", "", [f"{figure.perplexity:.2f}" for figure in found.models[1].results])
    for way in ways():
        found = [results[key_of(way, seed, tokens)] for seed in way.seeds]
        row(way.name, str(len(found)), [shown(list(column)) for column in zip(*found, strict=True)])


def key_of(way: Way, seed: int, tokens: int) -> str:
    return f"{way.name}, seed {seed}, {tokens} tokens"


def row(name: str, seeds: str, cells: list[str]) -> None:
    print(f"| {name} | {seeds} | {' | '.join(cells)} |")


def run(way: Way, seed: int, tokens: int) -> list[float]:
    """Perplexity at each length after training."""
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{way.name}-{seed}-{tokens}")
    patched = Path(f"patched-{name}")
    if not patched.exists():
        api.patch("built-in", **way.patch, factor=4.0, out=patched)
    out = Path(f"tuned-{name}")
    if not out.exists():
        share = tokens // len(way.schedule)
        options = {"schedule": way.schedule, "tokens_per_stage": share, "seed": seed, "out": out, "progress": False}
        api.finetune(str(patched), **options, **way.tune, resume=out.with_name(f"{out}.run").exists(), **quiet)
    found = api.evaluate([str(out)], lengths=LENGTHS, documents=12, alone=True, **quiet)
    return [figure.perplexity or float("nan") for figure in found.models[0].results]


def shown(values: list[float]) -> str:
    mean = statistics.mean(values)
    if len(values) < 3:
        return f"{mean:.2f}"
    half = T_95 * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.2f} ± {half:.2f}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 300_000)
