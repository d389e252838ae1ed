"""Reports: what a reader sees and a program parses, from figures made by hand."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from rich.console import Console

from ropext.figures import (
    ContextScore,
    EffectiveLength,
    LengthScore,
    Measurement,
    ModelScores,
    Paired,
    PositionScore,
    Protocol,
    Rope,
    TaskScore,
)
from ropext.report import table, to_json, write_report
from ropext.report.headline import statements
from ropext.report.plots import loss_by_position_file

PROTOCOL = Protocol(
    definition="truncated",
    stride=None,
    window=8192,
    bos=True,
    data="the corpus",
    data_hash="ab" * 32,
    dtype="float32",
    device="cpu",
    versions={"ropext": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
    tasks={"samples": 100, "seed": 0, "threshold": 0.9},
)


def figure(length: int, nll: float | None = None, status: str = "ok", windows: int = 3, ci95=None) -> LengthScore:
    perplexity = math.exp(nll) if nll is not None and nll < 700 else None
    return LengthScore(
        length=length,
        perplexity=perplexity,
        nll=nll,
        bits_per_byte=None if nll is None else nll / math.log(2) / 3.2,
        tokens=windows * (length - 1),
        documents=min(windows, 2),
        windows=windows,
        ci95=ci95 or ((perplexity - 1, perplexity + 1) if perplexity else None),
        status=status,
    )


def scores(
    label: str, results: Sequence[LengthScore], losses: Sequence[float | None] = (4.0, 3.5, 3.0), **more
) -> ModelScores:
    blocks = [
        PositionScore(start=256 * i, end=256 * (i + 1), nll=nll, tokens=3 * 256 - 3 * (i == 0))
        for i, nll in enumerate(losses)
    ]
    known = dict(
        model=f"some/{label}",
        window=8192,
        native_length=512,
        weights_sha256=None,
        rope=None,
        notes=(),
        by_context=(),
        tasks=(),
        effective_lengths=(),
        passes=None,
    )
    return ModelScores(label=label, results=tuple(results), by_position=tuple(blocks), **known | more)


def pair(label: str, length: int, ratio: float, spread: float | None = 0.01, **more) -> Paired:
    nll = math.log(ratio)
    ci = None if spread is None else (nll - spread, nll + spread)
    known = dict(
        nll_difference=nll,
        nll_ci95=ci,
        perplexity_ratio=ratio,
        perplexity_ratio_ci95=ci and (math.exp(ci[0]), math.exp(ci[1])),
        bits_per_byte_difference=nll / math.log(2) / 3.2,
        bits_per_byte_ci95=ci and (ci[0] / 2.218, ci[1] / 2.218),
    )
    return Paired(label=label, against="source", length=length, documents=27, **known | more)


def measurement(models: Sequence[ModelScores], comparisons: Sequence[Paired] = ()) -> Measurement:
    return Measurement(models=tuple(models), comparisons=tuple(comparisons), protocol=PROTOCOL)


def lineage() -> Measurement:
    """What README's table shows, with every other kind of figure."""
    lengths = (512, 2048, 8192)
    perplexities = {
        "source": {512: (12.04, 8.28, 16.83), 2048: (9.13, 6.51, 12.47), 8192: (29.53, 21.13, 38.53)},
        "patched": {512: (12.72, 8.71, 17.83), 2048: (9.61, 6.78, 13.23), 8192: (11.41, 8.16, 15.44)},
        "tuned": {512: (12.26, 8.37, 17.15), 2048: (9.37, 6.70, 12.77), 8192: (8.89, 6.52, 11.71)},
    }
    reach = {"source": 2048, "patched": 5300, "tuned": 8192}
    thetas = {"source": 10000.0, "patched": 41829.36592889948, "tuned": 41829.36592889948}

    def loss(label: str, position: int) -> float:
        fall = 3.4 * (position + 60) ** -0.07 + 0.02 * math.sin(position / 150)
        return fall + 1.3 * max(0.0, math.log2(position / reach[label])) + {"patched": 0.05}.get(label, 0.015)

    def hit(label: str, depth: float, length: int) -> TaskScore:
        score = min(1.0, max(0.08, 1.05 - 0.25 * abs(depth - 0.6) - max(0, math.log2(length / reach[label])) * 0.6))
        return TaskScore(
            task="passkey_likelihood",
            metric="acc",
            length=length,
            depth=depth,
            score=score,
            n=20,
            ci95=(max(0, score - 0.15), min(1, score + 0.1)),
            chance=0.1,
        )

    def model(label: str) -> ModelScores:
        grid = [hit(label, depth, length) for length in lengths for depth in (0.0, 0.25, 0.5, 0.75, 1.0)]
        means = {n: sum(one.score for one in grid if one.length == n) / 5 for n in lengths}
        over = [replace(grid[0], length=n, depth=None, n=100, score=means[n]) for n in lengths]
        easy = replace(over[0], task="arc_easy", length=None, score=0.31, n=2376, chance=0.25, ci95=(0.292, 0.329))
        passed = [n for n in lengths if all(means[m] >= 0.9 for m in lengths if m <= n)]
        return scores(
            label,
            [
                figure(n, math.log(perplexities[label][n][0]), windows=37, ci95=perplexities[label][n][1:])
                for n in lengths
            ],
            [loss(label, 256 * i + 128) for i in range(32)],
            model=f"ropext-runs/demo-{label}",
            window=2048 if label == "source" else 8192,
            native_length=8192 if label == "tuned" else 2048,
            weights_sha256=hashlib.sha256(label.encode()).hexdigest(),
            rope=Rope(
                method="default" if label == "source" else "ntk",
                factor=None if label == "source" else 4.0,
                theta=thetas[label],
                attention_scaling=1.0,
                wavelengths=tuple(2 * math.pi * thetas[label] ** (2 * i / 64) for i in range(32)),
            ),
            notes=("8192 tokens are beyond its window of 2048",) if label == "source" else (),
            by_context=tuple(
                ContextScore(
                    length=n,
                    last_tokens=512,
                    nll=loss(label, n),
                    tokens=37 * 512,
                    ci95=(loss(label, n) - 0.2, loss(label, n) + 0.2),
                    status="ok",
                )
                for n in (1024, 2048, 4096, 8192)
            ),
            tasks=(*over, *grid, easy),
            effective_lengths=(
                EffectiveLength(task="passkey_likelihood", length=max(passed, default=0), threshold=0.9),
            ),
            passes=1.0,
        )

    return measurement(
        [model(label) for label in perplexities],
        [
            pair(label, n, perplexities[label][n][0] / perplexities["source"][n][0], 0.004 if n < 8192 else 0.08)
            for label in ("patched", "tuned")
            for n in lengths
        ],
    )


GAPS = measurement(
    (
        scores(
            "source",
            [
                figure(512, 3.0),
                figure(768, 1000.0, status="perplexity overflows: exp(1000.0)"),
                figure(4096, status="not measured: the longest document has 900 tokens", windows=0),
            ],
        ),
        scores(
            "tuned",
            [
                figure(512, 2.0),
                figure(768, status="failed: the loss at position 600 is not a finite number"),
                figure(4096, status="not measured: the longest document has 900 tokens", windows=0),
            ],
            losses=(4.0, None, 2.5),
        ),
    )
)


def printed(one: Measurement, width: int = 200) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False).print(table(one))
    return stream.getvalue()


def lines_of(one: Measurement, width: int = 200) -> list[str]:
    return [line.strip() for line in printed(one, width).splitlines() if line.strip()]


def test_the_table_has_lengths_as_rows_and_models_as_columns():
    rows = [line.split() for line in lines_of(GAPS)]
    assert rows[0] == ["length", "source", "tuned"]
    assert rows[2] == ["512", "20.09", "7.39"]
    assert rows[3] == ["19.09", "to", "21.09", "6.39", "to", "8.39"]
    assert rows[4] == ["768", "exp(1000.0)", "failed"]
    assert rows[5] == ["4096", "not", "measured", "not", "measured"]


def test_the_definition_stands_under_the_table_with_its_reasons_for_gaps():
    lines = lines_of(GAPS)
    assert (
        "Perplexity (95% interval, resampling documents), truncated: 3 windows of 768 tokens from 2 documents, "
        "consecutive, one BOS at the start of each; float32; the corpus (abababababab)."
    ) in lines
    assert lines[-3].startswith("768 (source): perplexity overflows")
    assert lines[-2].startswith("4096 (source, tuned): not measured: the longest document has 900 tokens.")
    assert lines[-1].startswith("768 (tuned): failed: the loss at position 600")


def test_each_later_model_is_compared_with_the_first_in_one_line_a_length():
    lines = lines_of(lineage(), width=80)
    start = lines.index("patched at 512: perplexity +5.6% (+5.2% to +6.1%) against source, worse")
    assert lines[start + 2] == "patched at 8192: perplexity -61.4% (-64.3% to -58.1%) against source, better"
    assert lines[start + 5] == "tuned at 8192: perplexity -69.9% (-72.2% to -67.4%) against source, better"


@pytest.mark.parametrize(
    ("compared", "line"),
    [
        (pair("tuned", 512, 1.005), "perplexity +0.50% (-0.50% to +1.5%) against source, undecided"),
        (pair("tuned", 512, 1.0, 0.0), "perplexity +0.00% (+0.00% to +0.00%) against source, undecided"),
        (pair("tuned", 512, 1.5, None), "perplexity +50.0% against source, no interval"),
        (pair("tuned", 512, 200.0), "perplexity 200 times (198 times to 202 times) against source, worse"),
        (
            pair("tuned", 512, 2.0, nll_difference=800.0, nll_ci95=(790.0, 810.0), perplexity_ratio=None),
            "loss +800.000 nats (+790.000 to +810.000) against source, worse",
        ),
        (
            pair("tuned", 512, 0.9, nll_difference=None, nll_ci95=None, perplexity_ratio=None),
            "bits per byte -0.048 (-0.052 to -0.043) against source, better",
        ),
    ],
)
def test_a_change_is_told_with_its_interval_and_what_that_says(compared, line):
    models = [scores("source", [figure(512, 3.0)]), scores("tuned", [figure(512, 2.0)])]
    assert f"tuned at 512: {line}" in lines_of(measurement(models, [compared]))


def test_contexts_tasks_and_effective_lengths_follow_where_they_were_measured():
    lines = lines_of(lineage(), width=80)
    rows = [line.split() for line in lines]
    assert "Loss of the last 512 tokens with a context of" in lines
    assert ["4096", "3.229", "1.964", "1.929"] in rows
    assert "passkey_likelihood (acc; n = 100, chance 0.10)" in lines
    assert ["8192", "0.08", "0.59", "0.96"] in rows
    assert ["passkey_likelihood", "(at", "least", "0.9)", "2048", "2048", "8192"] in rows
    assert not [line for line in lines if "beyond its window" in line]  # notes are said while models are scored
    assert not any("last" in line or "Effective" in line for line in lines_of(GAPS))


def test_three_models_fit_eighty_columns():
    text = printed(lineage(), width=80)
    assert "8.28 to 16.83   8.71 to 17.83   8.37 to 17.15" in text
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text


def test_of_many_models_each_is_a_row_and_eighty_columns_do():
    methods = ("source", "linear", "ntk", "yarn", "ntk-by-parts", "llama3", "progressive")
    lengths = (512, 1024, 2048, 4096, 8192)
    models = [scores(label, [figure(n, 5.5, ci95=(243.69, 245.69)) for n in lengths]) for label in methods]
    pairs = [pair(label, n, 1.1) for label in methods[1:] for n in lengths]
    text = printed(measurement(models, pairs), width=80)
    rows = [line.split() for line in text.splitlines()]
    assert rows.count(["ntk-by-parts", *["244.69"] * 3]) == 1 and rows.count(["ntk-by-parts", *["244.69"] * 2]) == 1
    assert text.count("243.69 to 245.69") == 7 * 5
    assert text.count("perplexity +10.0%") == 6 * 5 and text.count("worse") == 6 * 5
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text


def test_markup_in_a_label_is_shown_as_it_is():
    assert "[red]x[/red]" in printed(measurement([scores("[red]x[/red]", [figure(512, 3.0)])]))


def test_only_tasks_measured_still_prints():
    task = TaskScore(task="arc", metric="acc", length=None, depth=None, score=0.5, n=9, ci95=None, chance=None)
    lines = lines_of(measurement([scores("source", [], losses=(), tasks=(task,))]))
    assert [line.split() for line in lines][-1] == ["arc", "(acc;", "n", "=", "9)", "0.50"]


def test_the_json_has_exactly_the_keys_of_the_contract():
    document = json.loads(json.dumps(to_json(lineage()), allow_nan=False))
    assert list(document) == ["models", "comparisons", "protocol", "judged"]
    contract = {"definition", "stride", "bos", "data", "data_hash", "dtype"}
    assert contract < set(document["protocol"]) and document["protocol"]["versions"]["torch"] == "2.13.0"
    for model in document["models"]:
        assert list(model)[:2] == ["model", "label"]
        for result in model["results"]:
            assert {"length", "perplexity", "nll", "tokens", "documents", "windows", "ci95", "status"} < set(result)
        for block in model["by_position"]:
            assert list(block) == ["start", "end", "nll", "tokens"]
        for task in model["tasks"]:
            assert {"task", "length", "depth", "score", "n", "ci95"} < set(task)
    assert document["models"][0]["results"][2]["ci95"] == [21.13, 38.53]
    assert document["comparisons"][0]["against"] == "source"
    assert to_json(GAPS)["models"][0]["results"][2]["perplexity"] is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_figure_that_is_not_finite_is_a_bug_that_is_named(bad):
    broken = scores("source", [figure(512, 1.0, ci95=(1.0, bad))])
    with pytest.raises(ValueError, match=r"found -?(nan|inf) at models\[0\]\.results\[0\]\.ci95\[1\]"):
        to_json(measurement([broken]))


def test_the_plot_has_a_line_for_each_model_and_the_marked_lengths():
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # plotted with defaults all the same: text becomes paths
        source = loss_by_position_file(GAPS)
    ElementTree.fromstring(source)
    for text in ("source", "tuned", "native 512", "position in the window (tokens)", "mean loss (nats per token)"):
        assert f"<!-- {text} -->" in source
    marks = re.findall("<!-- ((?:native|window).*) -->", loss_by_position_file(lineage()))
    assert sorted(marks) == ["native 2k, window 2k (source)", "window 8k (patched, tuned)"]


def test_a_mark_outside_the_plot_is_left_out():
    assert "native" not in loss_by_position_file(measurement([scores("x", [figure(512, 3.0)], native_length=2048)]))


def test_equal_scores_give_equal_bytes_whatever_the_users_style(tmp_path):
    write_report(tmp_path / "a", lineage())
    with matplotlib.rc_context({"axes.facecolor": "black", "svg.hashsalt": "x", "lines.linewidth": 9}):
        write_report(tmp_path / "b", lineage())
        assert matplotlib.rcParams["lines.linewidth"] == 9
    for name in ("report.json", "loss_by_position.svg", "report.html"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_nothing_measured_still_plots():
    ElementTree.fromstring(loss_by_position_file(measurement([scores("source", [figure(512, windows=0)], losses=())])))


def test_a_label_in_a_plot_is_text_and_nothing_else():
    hostile = ["_hidden", r"$\frac$", "--><script>", "x" * 300]
    source = loss_by_position_file(measurement([scores(label, [figure(512, 3.0)]) for label in hostile]))
    ElementTree.fromstring(source)
    assert "_hidden -->" in source and r"$\frac$ -->" in source and "<script" not in source and "x" * 25 not in source


def test_a_report_is_three_whole_files_and_nothing_else(tmp_path):
    folder = tmp_path / "deep" / "report"
    paths = write_report(folder, GAPS)
    assert [path.name for path in paths] == ["report.json", "loss_by_position.svg", "report.html"]
    assert sorted(folder.iterdir()) == sorted(paths)
    assert json.loads(paths[0].read_text()) == json.loads(json.dumps(to_json(GAPS)))
    assert paths[1].read_text().startswith("<?xml") and paths[2].read_text().startswith("<!doctype html>")


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path):
    write_report(tmp_path, GAPS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="finite"):
        write_report(tmp_path, measurement([scores("source", [figure(512, float("nan"))])]))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_write_that_fails_leaves_no_half_file(tmp_path, monkeypatch):
    def full(self, *args, **more):
        self.touch()
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        write_report(tmp_path, GAPS)
    assert list(tmp_path.iterdir()) == []


def said(one: Measurement) -> dict[str, tuple[str, str, str]]:
    """Title, without its length, of each statement -> figure, word and lines."""
    return {s.title.split(":")[0]: (s.figure, s.word, "; ".join(s.lines)) for s in statements(one)}


def test_the_headline_judges_the_last_model_against_the_first():
    found = said(lineage())
    assert found["Window"][0] == "2048 → 8192 tokens"
    assert found["Long context"][:2] == ("perplexity -69.9%", "better")
    assert "95% interval: -72.2% to -67.4%; perplexity 29.53 → 8.89, on 27 documents" in found["Long context"][2]
    assert found["Short context"][:2] == ("perplexity +2.6%", "worse")
    assert found["Short context"][2].startswith("regression: worse than source; 95% interval: +2.2% to +3.0%")
    assert found["Short context"][2].endswith("the worst of 512 and 2048 tokens")
    assert found["Effective length"][::2] == ("8192 tokens", "passkey_likelihood (at least 0.9): 2048 → 8192")


def test_the_headline_says_what_was_not_measured_and_why():
    alone = said(measurement([scores("source", [figure(512, 3.0)])]))
    assert alone["Long context"] == ("not measured", "", "there is no other model to compare with")
    assert "Effective length" not in alone
    two = [scores(label, [figure(512, 3.0)], window=2048, native_length=1024) for label in ("source", "tuned")]
    short = said(measurement(two, [pair("tuned", 512, 1.0, 0.02)]))
    assert short["Long context"] == ("not measured", "", "no length beyond the trained one was compared")
    assert short["Short context"][1:] == (
        "undecided",
        "undecided: no change lies within the interval; 95% interval: -2.0% to +2.0%; "
        "perplexity 20.09 → 20.09, on 27 documents",
    )
    unknown = said(measurement([replace(one, native_length=None) for one in two], [pair("tuned", 512, 1.0)]))
    assert unknown["Long context"][2] == unknown["Short context"][2] == "what source was trained at is not known"


def test_the_gain_is_that_of_the_longest_length_within_the_new_window():
    lengths = (512, 2048, 4096)
    models = [scores(label, [figure(n, 3.0) for n in lengths], window=2048) for label in ("source", "tuned")]
    pairs = [pair("tuned", 2048, 0.5), pair("tuned", 4096, 3.0)]
    assert said(measurement(models, pairs))["Long context"][0] == "perplexity -50.0%"
    (figure_, word, lines) = said(measurement(models, pairs[1:]))["Long context"]
    assert (figure_, word) == ("perplexity +200.0%", "worse")
    assert lines.endswith("4096 tokens are beyond the window of tuned")


@pytest.mark.parametrize(
    ("longest", "ratio", "advised"),
    [(2048, 1.056, True), (8192, 1.056, False), (2048, 0.95, False), (512, 1.056, False)],
)
def test_a_model_that_serves_more_than_was_asked_for_and_pays_at_short_is_advised_the_smallest_factor(
    longest, ratio, advised
):
    lengths = sorted({512, longest})
    models = [scores(label, [figure(length, 3.0) for length in lengths]) for label in ("source", "patched")]
    found = measurement(models, [pair("patched", 512, ratio)])
    line = "if 2048 are enough, `ropext patch --to 2048` takes the smallest factor that serves them, 4."
    assert (line in " ".join(printed(found).split())) is advised
    short = next(one for one in statements(found) if one.title.startswith("Short"))
    assert any(line in text for text in short.lines) is advised
