"""Reports: what a reader sees and a program parses, from scores made by hand."""

from __future__ import annotations

import io
import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pytest
from rich.console import Console

from ropext.report import plot_by_position, table, to_json, write_report
from ropext.score import LengthScore, ModelScores, PositionScore, Protocol

PROTOCOL = Protocol(
    definition="truncated", stride=None, bos=True, data="the corpus", data_hash="ab" * 32, dtype="float32"
)


def figure(length: int, nll: float | None = None, status: str = "ok", windows: int = 3) -> LengthScore:
    perplexity = math.exp(nll) if nll is not None and nll < 700 else None
    return LengthScore(
        length=length,
        perplexity=perplexity,
        nll=nll,
        tokens=windows * (length - 1),
        documents=min(windows, 2),
        windows=windows,
        ci95=(perplexity - 1, perplexity + 1) if perplexity else None,
        status=status,
    )


def scores(label: str, results: Sequence[LengthScore], losses: Sequence[float | None] = (4.0, 3.5, 3.0)) -> ModelScores:
    blocks = [
        PositionScore(start=256 * i, end=256 * (i + 1), nll=nll, tokens=3 * 256 - 3 * (i == 0))
        for i, nll in enumerate(losses)
    ]
    return ModelScores(model=f"some/{label}", label=label, results=tuple(results), by_position=tuple(blocks))


MODELS = (
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


def printed(models: Sequence[ModelScores], width: int = 200) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(table(models, PROTOCOL))
    return stream.getvalue()


def test_the_table_has_lengths_as_rows_and_models_as_columns() -> None:
    rows = [line.split() for line in printed(MODELS).splitlines() if line.strip()]
    assert rows[0] == ["length", "source", "tuned"]
    assert rows[2] == ["512", "20.09", "7.39"]
    assert rows[3] == ["19.09", "to", "21.09", "6.39", "to", "8.39"]
    assert rows[4] == ["768", "exp(1000.0)", "failed"]
    assert rows[5] == ["4096", "not", "measured", "not", "measured"]


def test_the_definition_stands_under_the_table_with_its_reasons_for_gaps() -> None:
    lines = printed(MODELS).splitlines()
    assert (
        "Perplexity (95% interval, resampling documents), truncated: 3 windows of 768 tokens from 2 documents, "
        "consecutive, one BOS at the start of each; float32; the corpus (abababababab)."
    ) in [line.strip() for line in lines]
    assert lines[-3].startswith("768 (source): perplexity overflows")
    assert lines[-2].startswith("4096 (source, tuned): not measured: the longest document has 900 tokens.")
    assert lines[-1].startswith("768 (tuned): failed: the loss at position 600")


def test_three_models_fit_eighty_columns() -> None:
    text = printed([scores(label, [figure(8192, 5.5)]) for label in ("source", "patched", "tuned")], width=80)
    assert text.count("243.69 to 245.69") == 3


def test_markup_in_a_label_is_shown_as_it_is() -> None:
    assert "[red]x[/red]" in printed([scores("[red]x[/red]", [figure(512, 3.0)])])


def test_the_json_has_exactly_the_keys_of_the_contract() -> None:
    document = json.loads(json.dumps(to_json(MODELS, PROTOCOL), allow_nan=False))
    assert set(document) == {"models", "protocol"}
    assert set(document["protocol"]) == {"definition", "stride", "bos", "data", "data_hash", "dtype"}
    for model in document["models"]:
        assert set(model) == {"model", "label", "results", "by_position", "tasks"}
        assert model["tasks"] == []
        for result in model["results"]:
            assert list(result) == ["length", "perplexity", "nll", "tokens", "documents", "windows", "ci95", "status"]
        for block in model["by_position"]:
            assert list(block) == ["start", "end", "nll", "tokens"]
    first = document["models"][0]["results"][0]
    assert first["ci95"] == [first["perplexity"] - 1, first["perplexity"] + 1]
    assert document["models"][0]["results"][2]["perplexity"] is None


def test_the_plot_has_a_line_for_each_model_and_the_marked_length(tmp_path: Path) -> None:
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # plotted with defaults all the same: text becomes paths
        plot_by_position(MODELS, tmp_path / "plot.svg", {"native": 512})
    source = (tmp_path / "plot.svg").read_text()
    ElementTree.fromstring(source)
    for text in ("source", "tuned", "native 512", "position in the window (tokens)", "mean loss (nats per token)"):
        assert f"<!-- {text} -->" in source


def test_a_mark_outside_the_plot_is_left_out(tmp_path: Path) -> None:
    plot_by_position(MODELS, tmp_path / "plot.svg", {"native": 2048})
    assert "native" not in (tmp_path / "plot.svg").read_text()


def test_equal_scores_give_equal_bytes_whatever_the_users_style(tmp_path: Path) -> None:
    plot_by_position(MODELS, tmp_path / "a.svg", {"native": 512})
    with matplotlib.rc_context({"axes.facecolor": "black", "svg.hashsalt": "x", "lines.linewidth": 9}):
        plot_by_position(MODELS, tmp_path / "b.svg", {"native": 512})
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_plotting_leaves_the_callers_style_alone(tmp_path: Path) -> None:
    with matplotlib.rc_context({"lines.linewidth": 9}):
        plot_by_position(MODELS, tmp_path / "plot.svg", {})
        assert matplotlib.rcParams["lines.linewidth"] == 9


def test_nothing_measured_still_plots(tmp_path: Path) -> None:
    plot_by_position([scores("source", [figure(512, windows=0)], losses=())], tmp_path / "plot.svg", {"native": 512})
    ElementTree.parse(tmp_path / "plot.svg")


def test_a_report_is_two_whole_files_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "report"
    paths = write_report(folder, MODELS, PROTOCOL, {"native": 512})
    assert sorted(folder.iterdir()) == sorted(paths)
    assert json.loads(paths[0].read_text()) == json.loads(json.dumps(to_json(MODELS, PROTOCOL)))
    assert paths[1].read_text().startswith("<?xml")


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write_report(tmp_path, MODELS, PROTOCOL, {})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    broken = scores("source", [figure(512, float("nan"))])
    with pytest.raises(ValueError, match="JSON compliant"):
        write_report(tmp_path, [broken], PROTOCOL, {})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
