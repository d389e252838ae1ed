"""Tasks run on a loaded model: lm-eval's stock class, whole passes and stock generation are the oracles."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

import ropext.retrieval
from ropext.errors import RopextError, UsageError
from ropext.figures import TaskScore
from ropext.load import load_model, load_tokenizer, refresh_rotary
from ropext.retrieval import effective_lengths, run_tasks, task_names
from ropext.retrieval.harness import as_lm
from tests.tiny import make_checkpoint

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
TEXTS = [
    ("def f(x):\n    return", [" x", " x + 1", " None", " f(x) * 2"]),
    ("one two three", [" four"]),
    ("trailing space ", ["a", "bc"]),
    ("", ["nothing before it"]),
    ("long " * 60, [" or", " short", " x"]),  # 300 tokens, beyond the native 256
]
SLIDING = {"sliding_window": 32}


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=n) for n, a in enumerate(arguments)]


def pairs():
    return instances("loglikelihood", [(context, end) for context, ends in TEXTS for end in ends])


def load(folder, family="llama", **settings):
    made = make_checkpoint(folder, family, **settings)
    return load_model(made), load_tokenizer(made)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("gpt_neox", {}), ("falcon", {}), ("qwen3", {}), ("mistral", SLIDING), ("llama", {"bos": "has"})],
)
def test_likelihoods_equal_those_of_lm_evals_own_class(tmp_path, family, settings, batch_size):
    model, tokenizer = load(tmp_path, family, **settings)
    stock = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path), max_length=4096)
    expected = stock.loglikelihood(pairs(), disable_tqdm=True)
    found = as_lm(model, tokenizer, batch_size=batch_size).loglikelihood(pairs())
    assert [likelihood for likelihood, _ in found] == pytest.approx([one for one, _ in expected], rel=2e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_rolling_likelihoods_equal_those_of_lm_evals_own_class(tmp_path):
    model, tokenizer = load(tmp_path)
    stock = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path))
    asked = instances("loglikelihood_rolling", [("short",), ("a text of more than one window. " * 20,)])
    expected = stock.loglikelihood_rolling(asked, disable_tqdm=True)
    assert as_lm(model, tokenizer).loglikelihood_rolling(asked) == pytest.approx(expected, rel=2e-5)


def whole_pass(model, row):
    """Logits `[T, V]` of one row by the stock forward, from a rotary table that has seen nothing else."""
    refresh_rotary(model)
    with torch.no_grad():
        return model(input_ids=torch.tensor([row]), use_cache=False).logits[0]


def test_a_table_that_changes_with_length_is_fresh_for_each_likelihood(tmp_path):
    model, tokenizer = load(tmp_path, rope_scaling=DYNAMIC)
    longest_first = sorted(pairs(), key=lambda one: -len(one.args[0]))
    lm = as_lm(model, tokenizer, batch_size=3)
    for request, (found, _) in zip(longest_first, lm.loglikelihood(longest_first), strict=True):
        before, after = request.args
        context, end = (
            lm._encode_pair(before, after) if before else ([tokenizer.bos_token_id], lm.tok_encode(after)[1:])
        )
        logs = whole_pass(model, context + end[:-1]).log_softmax(-1)[len(context) - 1 :]
        assert found == pytest.approx(sum(float(logs[n, token]) for n, token in enumerate(end)), rel=2e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mistral"])
def test_generation_equals_stock_greedy_generation(tmp_path, family):
    model, tokenizer = load(tmp_path, family, **(SLIDING if family == "mistral" else {}))
    for context, _ in TEXTS:
        asked = {"until": [], "do_sample": False, "max_gen_toks": 12}
        (found,) = as_lm(model, tokenizer).generate_until(instances("generate_until", [(context or "x", asked)]))
        row = tokenizer(context or "x", return_tensors="pt")
        made = model.generate(**row, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, row["input_ids"].shape[1] :]
        assert found == tokenizer.decode(made, skip_special_tokens=True)


def test_generation_with_a_changing_table_takes_a_whole_pass_for_each_token(tmp_path):
    model, tokenizer = load(tmp_path, rope_scaling=DYNAMIC)
    lm, context = as_lm(model, tokenizer), "long " * 60
    row = lm.tok_encode(context)
    for _ in range(6):
        row.append(int(whole_pass(model, row)[-1].argmax()))
    (found,) = lm.generate_until(instances("generate_until", [(context, {"until": [], "max_gen_toks": 6})]))
    assert found == tokenizer.decode(row[-6:], skip_special_tokens=True)


def test_generation_stops_at_a_stop_string_and_leaves_it_out(tmp_path):
    model, tokenizer = load(tmp_path)
    lm = as_lm(model, tokenizer)

    def written(**asked):
        return lm.generate_until(instances("generate_until", [("x", {"max_gen_toks": 12} | asked)]))[0]

    free = written(until=[])
    assert written(until=[free[4]]) == free[: free.index(free[4])]
    with pytest.raises(RopextError, match="only greedy generation"):
        written(until=[], do_sample=True, temperature=0.5)


@pytest.fixture
def rows(monkeypatch):
    """The ids of every row that goes into a llama, in order, caches or not."""
    seen = []
    from transformers import LlamaModel

    forward = LlamaModel.forward

    def counted(self, input_ids=None, **kwargs):
        seen.extend(input_ids.tolist())
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    return seen


@pytest.mark.parametrize(("bos", "count"), [("adds", 1), ("has", 0), ("none", 0)])
def test_each_context_begins_with_one_bos_where_that_is_the_tokenizers_convention(tmp_path, rows, bos, count):
    model, tokenizer = load(tmp_path, bos=bos)
    lm = as_lm(model, tokenizer)
    texts = ["plain", "<s>its own"] if bos == "adds" else ["plain"]
    asked = [(text, {"until": [], "max_gen_toks": 1}) for text in texts]
    rows.clear()  # of check_head
    lm.loglikelihood(instances("loglikelihood", [(text, " end") for text in texts]))
    lm.generate_until(instances("generate_until", asked))
    assert len(rows) == 2 * len(texts)
    first = tokenizer.bos_token_id
    assert [row.count(first) for row in rows] == [count] * len(rows)
    assert all(row[:count] == [first] * count for row in rows)


def test_nothing_is_cut_and_a_context_runs_once_for_all_its_choices(tmp_path, rows):
    model, tokenizer = load(tmp_path)  # native 256
    run_tasks(model, tokenizer, ["passkey"], lengths=[1024], samples=2, seed=0, batch_size=10)
    contexts = [row for row in rows if len(row) > 100]
    assert len(contexts) == 4, "two documents, each once by likelihood and once by generation"
    assert all(1024 - 8 - 90 < len(row) <= 1024 - 8 for row in contexts)
    text = tokenizer.decode(contexts[0])
    assert text.startswith("<s>There is an important info") and text.endswith("The pass key is")


def test_the_models_tokenizer_stays_as_it_was(tmp_path):
    model, tokenizer = load(tmp_path)
    as_lm(model, tokenizer)
    assert tokenizer.pad_token is None


def test_a_figure_that_is_no_number_is_an_error(tmp_path):
    model, tokenizer = load(tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:] = math.inf
    for task in ("passkey_likelihood", "passkey_generation"):
        with pytest.raises(RopextError, match="not a finite number"):
            run_tasks(model, tokenizer, [task], lengths=[512], samples=1, seed=0)


def test_scores_come_by_length_and_depth_and_nothing_is_printed(tmp_path, capfd):
    model, tokenizer = load(tmp_path)
    heard = []
    capfd.readouterr()  # of making and loading it
    scores = run_tasks(
        model,
        tokenizer,
        ["passkey", "ropext_kv_likelihood", "passkey_generation"],
        lengths=[600, 400],
        samples=7,
        seed=0,
        progress=lambda *told: heard.append(told),
    )
    assert capfd.readouterr() == ("", "")
    assert [row.task for row in scores] == [
        name for name in ("passkey_likelihood", "passkey_generation", "kv_likelihood") for _ in range(12)
    ]
    assert [(row.length, row.depth, row.n) for row in scores[:12]] == [
        (length, depth, n)
        for length in (400, 600)
        for depth, n in [(None, 7), (0, 2), (0.25, 2), (0.5, 1), (0.75, 1), (1, 1)]
    ]
    assert {(row.metric, row.chance) for row in scores} == {("acc", 0.1), ("exact_match", None)}
    for row in scores:
        assert row.ci95[0] <= row.score <= row.ci95[1]
    assert heard[-1] == (42, 42) and heard == sorted(heard)


def test_the_built_in_checkpoint_finds_passkeys():
    from ropext.demo import CHECKPOINT

    scores = run_tasks(
        load_model(CHECKPOINT),
        load_tokenizer(CHECKPOINT),
        ["passkey"],
        lengths=[512],
        samples=10,
        seed=0,
        batch_size=10,
    )
    by_likelihood, by_generation = (row for row in scores if row.depth is None)
    assert by_likelihood.score >= 0.9 and by_likelihood.ci95[0] > by_likelihood.chance
    assert by_generation.score >= 0.8


def test_intervals_of_proportions_are_wilsons():
    from scipy.stats import binomtest

    from ropext.retrieval.running import _wilson

    for right, n in [(0, 10), (8, 10), (200, 200), (37, 200)]:
        expected = binomtest(right, n).proportion_ci(method="wilson")
        assert _wilson(right, n) == pytest.approx((expected.low, expected.high), abs=1e-6)


def row(task, length, score, depth=None):
    return TaskScore(task=task, metric="acc", length=length, depth=depth, score=score, n=1, ci95=None, chance=None)


def test_the_effective_length_ends_before_the_first_length_that_fails():
    scores = [row("a", 4096, 0.9), row("a", 1024, 0.9), row("a", 2048, 0.8), row("a", 1024, 0.1, depth=0.5)]
    scores += [row("b", 1024, 0.5), row("other", None, 0.2)]
    found = {one.task: (one.length, one.threshold) for one in effective_lengths(scores, 0.85)}
    assert found == {"a": (1024, 0.85), "b": (0, 0.85)}
    assert {one.task: one.length for one in effective_lengths(scores, 0.5)} == {"a": 4096, "b": 1024}


@pytest.fixture
def own_task(tmp_path):
    """A folder with an lm-eval task of three documents of its own, and one whose data set lies on the hub."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    texts = [
        {"q": f"{word} is", "a": n % 2, "c": [" yes", " no, it is not"]} for n, word in enumerate(["sky", "sea", "ice"])
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    common = "output_type: multiple_choice\ntest_split: test\ndoc_to_text: q\ndoc_to_target: a\ndoc_to_choice: c\n"
    metrics = "".join(
        f"  - {{metric: {name}, aggregation: mean, higher_is_better: true}}\n" for name in ("acc", "acc_norm")
    )
    local = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\n"
    (folder / "own.yaml").write_text(f"task: my_own\n{common}{local}target_delimiter: ''\nmetric_list:\n{metrics}")
    (folder / "far.yaml").write_text(f"task: far_away\ndataset_path: nobody/nothing\n{common}")
    return folder


def test_any_task_of_lm_eval_runs_on_the_same_model(tmp_path, own_task):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    model, tokenizer = load(tmp_path)
    found = run_tasks(model, tokenizer, ["my_own"], lengths=[512], samples=1, seed=0, include_path=own_task)
    stock = simple_evaluate(
        HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path)),
        tasks=["my_own"],
        task_manager=TaskManager(include_path=own_task, include_defaults=False),
    )["results"]["my_own"]
    assert {(one.task, one.metric, one.n, one.length) for one in found} == {
        ("my_own", metric, 3, None) for metric in ("acc", "acc_norm")
    }
    for one in found:
        error = stock[f"{one.metric}_stderr,none"]
        assert one.score == stock[f"{one.metric},none"]
        assert one.ci95 == pytest.approx((one.score - 1.96 * error, one.score + 1.96 * error), abs=1e-4)


def test_a_task_without_its_data_is_one_clear_error(tmp_path, own_task, monkeypatch, capfd):
    import datasets

    def no_network(*_, **__):
        raise ConnectionError("Couldn't reach the hub\nand much more")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    loaded = load(tmp_path)
    capfd.readouterr()
    with pytest.raises(
        RopextError, match="cannot load the task far_away, .* a network .*: Couldn't reach the hub"
    ) as error:
        run_tasks(*loaded, ["far_away"], lengths=[512], samples=1, seed=0, include_path=own_task)
    assert "\n" not in str(error.value) and type(error.value) is RopextError
    assert capfd.readouterr() == ("", "")


def test_a_length_too_short_for_a_task_takes_nothing_from_the_others(tmp_path):
    found = run_tasks(*load(tmp_path), ["passkey_likelihood"], lengths=[64, 1024], samples=1, seed=0)
    assert {one.length for one in found} == {1024}


def test_what_cannot_be_run_is_refused(tmp_path, monkeypatch):
    def run(names, **settings):
        run_tasks(*loaded, names, **({"lengths": [512], "samples": 1, "seed": 0} | settings))

    loaded = load(tmp_path)
    with pytest.raises(UsageError, match=r"passkey takes at least \d+ tokens"):
        run(["passkey"], lengths=[64])
    with pytest.raises(UsageError, match="found none"):
        run([])
    with pytest.raises(UsageError, match="include path is a directory"):
        run(["passkey"], include_path=tmp_path / "nowhere")
    import lm_eval.tasks

    own = lm_eval.tasks.TaskManager  # without lm-eval's own tasks, which take seconds to list
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **given: own(**given | {"include_defaults": False}))
    with pytest.raises(UsageError, match="'pasky' is none; near it are passkey"):
        run(["pasky"])


def test_task_names_are_the_tasks_their_variants_and_all():
    assert {"passkey", "kv_likelihood", "tracking_generation", "retrieval"} <= set(task_names())
    assert len(task_names()) == 5 + 10 + 1


@pytest.mark.slow
def test_lm_evals_own_command_runs_the_tasks_and_scores_alike(tmp_path):
    from ropext.demo import CHECKPOINT

    include = Path(ropext.retrieval.__file__).parent
    metadata = {"max_seq_lengths": [512], "samples": 8, "seed": 3}
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--include_path", str(include), "--tasks", "ropext_tracking"),
        *("--model", "hf", "--model_args", f"pretrained={CHECKPOINT},dtype=float32", "--device", "cpu"),
        *("--metadata", json.dumps(metadata), "--output_path", str(tmp_path / "out")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(file.read_text())["results"]
    model, tokenizer = load_model(CHECKPOINT), load_tokenizer(CHECKPOINT)
    scores = run_tasks(model, tokenizer, ["tracking"], lengths=[512], samples=8, seed=3)
    by_task = {one.task: one.score for one in scores if one.depth is None}
    assert by_task == {
        "tracking_likelihood": results["ropext_tracking_likelihood"]["acc,none"],
        "tracking_generation": results["ropext_tracking_generation"]["exact_match,first_number"],
    }


TEAMED = """
import dataclasses, json, sys
from ropext.demo import CHECKPOINT
from ropext.load import load_model, load_tokenizer
from ropext.process import join_team
from ropext.retrieval import run_tasks
team = join_team("cpu")
asked = dict(lengths=[512], samples=5, seed=0, team=team)
scores = run_tasks(load_model(CHECKPOINT), load_tokenizer(CHECKPOINT), ["needle"], **asked)
with open(f"{sys.argv[1]}/{team.rank}.json", "w") as file:
    json.dump([dataclasses.asdict(one) for one in scores], file)
"""


@pytest.mark.slow
def test_several_processes_share_the_documents_and_agree(tmp_path):
    (tmp_path / "teamed.py").write_text(TEAMED)
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if size == 2 else []
        command = [sys.executable, *launch, str(tmp_path / "teamed.py"), str(tmp_path / str(size))]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
        assert done.returncode == 0, done.stderr[-2000:]
    alone, first, second = (json.loads((tmp_path / name).read_text()) for name in ("1/0.json", "2/0.json", "2/1.json"))
    assert first == second == alone
    assert {one["n"] for one in alone if one["depth"] is None} == {5}
