"""Evaluation as its user runs it: models on disk in, a table, a report and one JSON document out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ropext import api
from ropext.errors import Refused, RopextError, UsageError
from tests.tiny import make_checkpoint

TEXT = " ".join(f"{word} {number}" for number, word in enumerate(["alpha", "beta", "gamma"] * 400))  # 11k bytes
quiet = {"say": lambda line: None}


@pytest.fixture(autouse=True)
def workspace_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in ("one.txt", "two.txt", "three.txt"):
        (tmp_path / "texts" / name).write_text(name + TEXT)


@pytest.fixture
def patched() -> str:
    make_checkpoint(Path("source"))
    api.patch("source", method="linear", factor=4.0)
    return "ropext-runs/source-linear-1k"


def test_one_model_is_scored_with_its_lineage_in_order(patched):
    api.finetune(patched, schedule=(256, 1024), data="texts", steps_per_stage=1, progress=False, **quiet)
    result = api.evaluate(lengths=(128, 1024), data="texts", **quiet)
    assert [scores.label for scores in result.models] == ["source", "patched", "tuned"]
    assert [Path(scores.model).name for scores in result.models] == [
        "source",
        "source-linear-1k",
        "source-linear-1k-tuned",
    ]


def test_alone_scores_the_model_alone_and_several_names_are_scored_as_named(patched):
    alone = api.evaluate([patched], lengths=(128,), data="texts", alone=True, **quiet)
    assert [scores.label for scores in alone.models] == ["patched"]
    both = api.evaluate(["source", patched], lengths=(128,), data="texts", **quiet)
    assert [scores.label for scores in both.models] == ["source", "source-linear-1k"]
    assert both.models[1].results == alone.models[0].results
    make_checkpoint(Path("elsewhere/source"))
    same_name = api.evaluate(["source", "elsewhere/source"], lengths=(128,), data="texts", **quiet)
    assert [scores.label for scores in same_name.models] == ["source", "elsewhere/source"]


def test_a_lineage_whose_source_is_gone_is_scored_without_it(patched, tmp_path):
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    result = api.evaluate([patched], lengths=(128,), data="texts", **quiet)
    assert [scores.label for scores in result.models] == ["patched"]


def test_a_length_that_no_document_reaches_is_not_measured_and_the_rest_is(patched):
    result = api.evaluate([patched], lengths=(16384, 512), data="texts", alone=True, **quiet)
    far, near = result.models[0].results
    assert far.perplexity is None and far.nll is None and "not measured" in far.status and far.tokens == 0
    bodies = [len(path.read_bytes()) // 511 for path in Path("texts").iterdir()]  # a token a byte, and one BOS
    assert (near.status, near.windows, near.tokens) == ("ok", sum(bodies), sum(bodies) * 511)
    assert result.complete
    nothing = api.evaluate([patched], lengths=(16384,), data="texts", alone=True, **quiet)
    assert not nothing.complete


def test_lengths_beyond_the_window_are_measured_whole_and_said_so(patched, monkeypatch):
    seen: list[int] = []
    from ropext import loss

    whole = loss.hidden_states
    monkeypatch.setattr(loss, "hidden_states", lambda model, ids: seen.append(ids.shape[1]) or whole(model, ids))
    notes: list[str] = []
    api.evaluate(["source"], lengths=(1024,), data="texts", alone=True, say=notes.append)
    assert max(seen) == 1024
    assert any("beyond its window of 256" in note for note in notes)


def test_a_longrope_model_says_which_list_each_length_took():
    block = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
    original = {"original_max_position_embeddings": 256}
    make_checkpoint(Path("long"), max_position_embeddings=1024, rope_scaling=block | original, **original)
    notes: list[str] = []
    result = api.evaluate(["long"], lengths=(257, 256), data="texts", say=notes.append)
    assert any("the short list at 256, the long list at 257" in note for note in notes), notes
    assert any("2.00 times one pass" in note for note in notes), notes
    assert result.complete


def test_a_sliding_window_is_scored_and_told_in_the_protocol(patched):
    result = api.evaluate([patched], lengths=(128, 512), stride=64, data="texts", documents=1, alone=True, **quiet)
    assert (result.protocol.definition, result.protocol.stride) == ("sliding", 64)
    tokens = {len(path.read_bytes()) for path in Path("texts").iterdir()}
    assert {figure.tokens for figure in result.models[0].results} <= tokens  # each token of the document once


def test_text_that_a_model_was_trained_on_is_named(patched):
    api.finetune(patched, schedule=(256, 1024), data="texts", steps_per_stage=1, progress=False, **quiet)
    notes: list[str] = []
    api.evaluate(lengths=(128,), data="texts", say=notes.append)
    assert [note for note in notes if "trained on 3 of the 3 documents" in note and note.startswith("warn      tuned")]


def test_the_document_has_the_keys_that_others_script_against(patched):
    result = api.evaluate([patched], lengths=(16384, 512), data="texts", alone=True, **quiet)
    document = json.loads(json.dumps(api.eval_document(result), allow_nan=False))
    (scores,) = document["models"]
    assert set(scores) >= {"model", "label", "results", "by_position", "tasks"}
    figure = {"length", "perplexity", "nll", "tokens", "documents", "windows", "ci95", "status"}
    assert all(set(row) >= figure for row in scores["results"])
    assert [block["start"] for block in scores["by_position"]] == [0, 256]
    assert set(document["protocol"]) >= {"definition", "stride", "bos", "data", "data_hash", "dtype"}
    assert json.loads((Path(result.out) / "report.json").read_text()) == document
    assert (Path(result.out) / "loss_by_position.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("block", "code"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "RPX028"),
        ({"rope_type": "linear", "factor": 0.25}, "RPX023"),
        ({"rope_type": "linear", "factor": "4"}, "RPX023"),
        ({"rope_type": "linear", "factor": float("nan")}, "RPX023"),
        ({"rope_type": "ntk", "factor": 4.0}, "RPX026"),
        ({"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 256}, "RPX027"),
    ],
)
def test_settings_that_give_no_table_are_refused_before_anything_is_scored(block, code):
    make_checkpoint(Path("bad"), max_position_embeddings=1024, rope_scaling=block)
    with pytest.raises(Refused, match=code):
        api.evaluate(["bad"], lengths=(128,), data="texts", **quiet)


def test_a_window_raised_by_hand_is_measured_and_named(patched):
    config = json.loads(Path(patched, "config.json").read_text())
    Path(patched, "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    notes: list[str] = []
    result = api.evaluate([patched], lengths=(128,), data="texts", alone=True, say=notes.append)
    assert result.complete and any("RPX001" in note for note in notes)


def test_each_report_gets_a_folder_of_its_own_and_a_named_one_is_not_overwritten(patched):
    first = api.evaluate([patched], lengths=(128,), data="texts", alone=True, **quiet)
    second = api.evaluate([patched], lengths=(128,), data="texts", alone=True, **quiet)
    assert first.out != second.out
    with pytest.raises(Refused, match="existing output"):
        api.evaluate([patched], lengths=(128,), data="texts", out=Path(first.out), **quiet)


def test_a_weight_that_is_not_finite_is_reported_at_the_first_length_where_it_shows(patched):
    from safetensors.torch import load_file, save_file

    weights = load_file("source/model.safetensors")
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, "source/model.safetensors", metadata={"format": "pt"})
    result = api.evaluate(["source"], lengths=(128, 256), data="texts", alone=True, **quiet)
    assert not result.complete
    assert [figure.perplexity for figure in result.models[0].results] == [None, None]
    assert "not a finite number" in result.models[0].results[0].status
    json.dumps(api.eval_document(result), allow_nan=False)


def test_a_checkpoint_that_lacks_a_weight_is_not_scored(patched):
    from safetensors.torch import load_file, save_file

    weights = load_file("source/model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, "source/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RopextError, match=r"model\.norm\.weight"):
        api.evaluate(["source"], lengths=(128,), data="texts", alone=True, **quiet)


# Kept scores


def no_model(monkeypatch):
    from ropext import compare

    monkeypatch.setattr(compare, "load_model", lambda *arguments, **more: pytest.fail("a model was loaded"))


def test_the_same_figures_for_another_comparison_load_no_model(patched, monkeypatch):
    first = api.evaluate([patched], lengths=(128, 512), data="texts", **quiet)
    no_model(monkeypatch)
    again = api.evaluate(["source", patched], lengths=(512, 256), data="texts", **quiet)
    assert [scores.passes for scores in again.models] == [0, 0]
    assert [scores.results[0] for scores in again.models] == [scores.results[1] for scores in first.models]
    assert again.models[1].weights_sha256 == first.models[0].weights_sha256  # a patch touches no weight


@pytest.mark.parametrize("change", ["weights", "config", "text", "dtype"])
def test_whatever_a_loss_depends_on_makes_it_be_scored_anew(patched, change):
    from safetensors.torch import load_file, save_file

    asked = {"lengths": (128,), "data": "texts", "alone": True, **quiet}
    before = api.evaluate([patched], **asked)
    if change == "weights":
        weights = load_file(f"{patched}/model.safetensors")
        weights["model.norm.weight"] *= 1.5
        save_file(weights, f"{patched}/model.safetensors", metadata={"format": "pt"})
    elif change == "config":
        config = json.loads(Path(patched, "config.json").read_text())
        Path(patched, "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    elif change == "text":
        Path("texts/one.txt").write_text("One" + Path("texts/one.txt").read_text()[3:])
    after = api.evaluate([patched], **asked | ({"dtype": "bfloat16"} if change == "dtype" else {}))
    assert after.models[0].passes == 1
    assert after.models[0].results[0].nll != before.models[0].results[0].nll


# Patches in memory


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
def test_patches_in_memory_score_as_the_written_ones_and_cost_them_their_run(family, monkeypatch):
    make_checkpoint(Path("base"), family)
    methods = ("linear", "ntk", "yarn", "dynamic")
    compared = api.evaluate(["base"], methods=methods, factor=4.0, lengths=(128, 1024), data="texts", **quiet)
    assert compared.models[0].label == "source" and not list(Path("ropext-runs").glob("*/config.json"))
    for scores in compared.models[1:]:
        api.patch("base", method=scores.label, factor=4.0, out=Path(scores.label))
        with monkeypatch.context() as kept:
            no_model(kept)
            written = api.evaluate([scores.label], lengths=(128, 1024), data="texts", alone=True, **quiet).models[0]
        assert (written.results, written.by_position) == (scores.results, scores.by_position)
        assert written.rope.wavelengths == pytest.approx(scores.rope.wavelengths, rel=1e-9)
    written = api.evaluate(["yarn"], lengths=(128, 1024), data="texts", alone=True, rescore=True, **quiet).models[0]
    (in_memory,) = [scores for scores in compared.models if scores.label == "yarn"]
    assert written.results == in_memory.results


def test_methods_are_ranked_by_their_loss_at_the_longest_length(patched):
    asked = {"factor": 4.0, "lengths": (128, 1024, 16384), "data": "texts", **quiet}
    found = [
        api.evaluate(["source"], methods=names, **asked) for names in (("yarn", "pi", "ntk"), ("NTK", "linear", "yarn"))
    ]
    for result in found:
        losses = [scores.results[1].nll for scores in result.models[1:]]
        assert losses == sorted(losses) and len(losses) == 3
        assert result.best == result.models[1].label
        assert [pair.label for pair in result.measurement.comparisons][::2] == [s.label for s in result.models[1:]]
    assert [scores.results for scores in found[0].models] == [scores.results for scores in found[1].models]


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"methods": ["yarn"]}, UsageError, "factor"),
        ({"methods": ["yarn"], "factor": 1.0}, Refused, "1"),
        ({"methods": ["ntkk"], "factor": 4.0}, UsageError, "ntkk"),
        ({"methods": ["yarn", "longrope"], "factor": 4.0}, UsageError, "longrope-factors"),
        ({"factor": 4.0}, UsageError, "add --methods"),
        ({"methods": ["yarn"], "factor": 4.0, "max_regression": 0.02}, UsageError, "leave out"),
        ({"alone": True, "max_regression": 0.02}, UsageError, "leave out"),
        ({"stride": 16, "last_tokens": 8}, UsageError, "--stride"),
        ({"stride": 16, "window": 512}, UsageError, "--stride"),
        ({"window": 64}, UsageError, "--window"),
        ({"last_tokens": 128}, UsageError, "--last-tokens"),
        ({"tokens": 64}, UsageError, "--tokens"),
        ({"documents": 0}, UsageError, "documents"),
        ({"batch_size": 0}, UsageError, "--batch-size"),
        ({"dtype": ""}, UsageError, "--dtype is one of float32"),
        ({"dtype": "float64"}, UsageError, "--dtype is one of float32"),
        ({"device": "nowhere"}, UsageError, "--device is one that PyTorch has here"),
        ({"device": "meta"}, UsageError, "--device is one that PyTorch has here"),
        ({"tasks": ["passkey"], "samples": 0}, UsageError, "--samples"),
        ({"tasks": ["passkey"], "threshold": float("nan")}, UsageError, "--threshold"),
        ({"tasks": ["passkey"], "include_path": Path("nowhere")}, UsageError, "include path"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_before_a_model_is_loaded(asked, error, says, monkeypatch):
    make_checkpoint(Path("base"))
    no_model(monkeypatch)
    with pytest.raises(error, match=says):
        api.evaluate(["base"], lengths=(128,), data="texts", **asked, **quiet)
    assert not list(Path().glob("ropext-runs/reports/*"))


# What an extension costs


def test_a_regression_within_the_native_length_is_flagged_with_its_figure(patched, capsys):
    from ropext import show
    from ropext.report.words import percent

    result = api.evaluate([patched], lengths=(128, 256, 1024), data="texts", **quiet)
    pairs = {pair.length: pair for pair in result.measurement.comparisons}
    for length, pair in pairs.items():
        of = [next(r for r in scores.results if r.length == length) for scores in result.models]
        assert pair.nll_difference == pytest.approx(of[1].nll - of[0].nll, rel=1e-9)
        assert pair.perplexity_ratio == pytest.approx(of[1].perplexity / of[0].perplexity, rel=1e-9)
    show.evaluation(result)
    printed = capsys.readouterr().out
    assert f"patched at 128: perplexity {percent(pairs[128].perplexity_ratio)} (" in printed


def test_the_gate_is_judged_at_and_below_the_native_length_against_the_source(patched):
    asked = {"lengths": (128, 256, 1024), "data": "texts", **quiet}
    result = api.evaluate([patched], max_regression=10.0, **asked)
    assert result.missed_gate is None
    lost = {p.length: p.perplexity_ratio - 1 for p in result.measurement.comparisons}
    worst = max(lost[128], lost[256])
    assert api.evaluate([patched], max_regression=max(worst, 0) + 1e-9, **asked).missed_gate is None
    if worst > 0:
        missed = api.evaluate([patched], max_regression=worst - 1e-9, **asked).missed_gate
        assert f"{100 * worst:+.2f}%" in missed and "against source" in missed
    nothing = api.evaluate([patched], max_regression=0.5, lengths=(512,), data="texts", **quiet).missed_gate
    assert "patched cannot be compared with source: nothing was measured up to the native length 256" in nothing


def test_a_missed_gate_ends_with_exit_code_4_after_the_report_is_written(patched, capsys, monkeypatch):
    from ropext import cli, gate

    monkeypatch.setattr(gate, "regression", lambda *arguments: "patched at 128 tokens: +3.00% against source")
    monkeypatch.setattr(
        "sys.argv",
        ["ropext", "eval", patched, "--lengths", "128", "--data", "texts", "--max-regression", "2%", "--json"],
    )
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr()
    assert stopped.value.code == 4
    assert "ropext: --max-regression 2% is missed: patched at 128 tokens: +3.00% against source" in said.err
    assert len(json.loads(said.out)["models"]) == 2 and list(Path("ropext-runs/reports").glob("*/report.html"))


def test_a_report_has_a_folder_of_its_own_from_the_start_and_none_without_a_report(patched, monkeypatch):
    from ropext import compare

    run, seen = compare.Comparison.run, []

    def meanwhile(self, entrants, **more):
        seen.append(sorted(path.name for path in Path("ropext-runs/reports").iterdir()))
        if len(seen) == 1:
            api.evaluate([patched], lengths=(128,), data="texts", alone=True, **quiet)
        if len(seen) == 3:
            raise RopextError("broken on the way")
        return run(self, entrants, **more)

    monkeypatch.setattr(compare.Comparison, "run", meanwhile)
    api.evaluate([patched], lengths=(256,), data="texts", alone=True, **quiet)
    name = Path(patched).name
    assert seen == [[name], [name, f"{name}-2"]]
    found = [json.loads(Path(f"ropext-runs/reports/{one}/report.json").read_text()) for one in seen[1]]
    assert [one["models"][0]["results"][0]["length"] for one in found] == [256, 128]
    with pytest.raises(RopextError, match="broken on the way"):
        api.evaluate([patched], lengths=(64,), data="texts", alone=True, **quiet)
    assert sorted(path.name for path in Path("ropext-runs/reports").iterdir()) == seen[1]


@pytest.mark.parametrize("out", ["texts/one.txt/report", "/proc/report"])
def test_a_folder_that_cannot_be_made_is_said_before_anything_is_scored(patched, out, monkeypatch):
    no_model(monkeypatch)
    with pytest.raises(RopextError, match="a report needs a folder to write"):
        api.evaluate([patched], lengths=(128,), data="texts", out=Path(out), **quiet)


def test_a_task_that_fails_on_one_model_takes_nothing_from_the_rest(patched):
    from safetensors.torch import load_file, save_file

    weights = load_file("source/model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    Path("broken").mkdir()
    for file in Path("source").iterdir():
        (Path("broken") / file.name).write_bytes(file.read_bytes())
    save_file(weights, "broken/model.safetensors", metadata={"format": "pt"})
    asked = {"lengths": (512,), "data": "texts", "tasks": ["passkey_likelihood"], "samples": 2}
    notes: list[str] = []
    result = api.evaluate(["source", "broken"], **asked, say=notes.append)
    assert not result.complete and any("the task passkey_likelihood failed" in note for note in notes)
    sound, broken = result.models
    assert [score.score is None for score in broken.tasks] == [True] and broken.results[0].status.startswith("failed")
    assert {score.length for score in sound.tasks} == {512} and sound.results[0].status == "ok"
    json.dumps(api.eval_document(result), allow_nan=False)


def test_dynamic_serves_the_same_window_in_memory_and_written(patched):
    asked = {"lengths": (128, 1024), "data": "texts", **quiet}
    in_memory = api.evaluate(["source"], methods=["dynamic"], factor=4.0, **asked).models[1]
    api.patch("source", method="dynamic", factor=4.0, out=Path("written"))
    written = api.evaluate(["written"], alone=True, **asked).models[0]
    assert written.window == in_memory.window == 1024 and written.results == in_memory.results


def test_a_model_is_named_once():
    make_checkpoint(Path("base"))
    with pytest.raises(UsageError, match="each model is scored once: found base 2 times"):
        api.evaluate(["base", "base"], lengths=(128,), data="texts", **quiet)
