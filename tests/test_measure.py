"""A model on a cut: what is kept and what runs again, the same tokens under every context, and what memory allows."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropext import score
from ropext.cut import Limits, cut_windows, slide_windows
from ropext.kept import Shelf, weights_identity
from ropext.measure import Measured, measure
from tests.test_score import DYNAMIC, LONGROPE, build, document, tokenizer
from tests.tiny import make_checkpoint

TEXTS = [document(300, 1), document(140, 2), document(80, 3)]
ROPES = {"default": {"rope_type": "default"}, "dynamic": DYNAMIC, "longrope": LONGROPE}


def model_with(rope: str) -> torch.nn.Module:
    return build("llama", rope_parameters={"rope_theta": 10000.0, **ROPES[rope]})


def run(model: Callable[[], torch.nn.Module], lengths: list[int], shelf: Shelf | None, rope: str, **more) -> Measured:
    cut = cut_windows(tokenizer(), TEXTS, more.pop("cut", lengths))
    return measure(model, cut, lengths, static=rope == "default", shelf=shelf, **more)


def never() -> torch.nn.Module:
    raise AssertionError("the model was asked for, though its scores are kept")


# Kept scores


@pytest.mark.parametrize("rope", ROPES)
def test_the_same_question_costs_no_run_and_gives_the_same_figures(rope, tmp_path):
    model, shelf = model_with(rope), Shelf.of(tmp_path, {"a": 1})
    first = run(lambda: model, [16, 64, 128], shelf, rope, last_tokens=8)
    again = run(never, [16, 64, 128], shelf, rope, last_tokens=8)
    assert (again.results, again.by_position, again.by_context) == (first.results, first.by_position, first.by_context)
    assert first.passes > 0 and again.passes == 0


@pytest.mark.parametrize("rope", ROPES)
def test_other_lengths_of_the_same_windows_cost_only_what_a_changing_table_makes_them_cost(rope, tmp_path):
    model, shelf = model_with(rope), Shelf.of(tmp_path, {"a": 1})
    run(lambda: model, [16, 128], shelf, rope)
    asked = {"lengths": [128, 48], "shelf": shelf, "rope": rope}
    found = run(never if rope == "default" else (lambda: model), **asked)
    assert found.passes == pytest.approx(0 if rope == "default" else 48 / 128)
    assert found.results == run(lambda: model, **asked | {"shelf": None}).results
    assert run(never, **asked).passes == 0


def test_windows_cut_longer_than_the_longest_length_serve_shorter_ones_later(tmp_path):
    model, shelf = model_with("default"), Shelf.of(tmp_path, {"a": 1})
    run(lambda: model, [128], shelf, "default")
    short = run(never, [32], shelf, "default", cut=[128])
    assert short.results == run(lambda: model, [32], None, "default", cut=[128]).results


def test_rescore_runs_the_model_though_its_scores_are_kept(tmp_path):
    shelf = Shelf.of(tmp_path, {"a": 1})
    run(lambda: model_with("default"), [64], shelf, "default")
    assert run(lambda: model_with("default"), [64], shelf, "default", rescore=True).passes == 1


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 no zip", None])
def test_a_damaged_file_of_scores_counts_as_absent(damage, tmp_path):
    model, shelf = model_with("default"), Shelf.of(tmp_path, {"a": 1})
    first = run(lambda: model, [64], shelf, "default")
    whole = shelf.path.read_bytes()
    shelf.path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert run(lambda: model, [64], shelf, "default").passes == 1
    assert run(never, [64], shelf, "default").results == first.results


def test_no_changed_byte_of_a_file_of_scores_changes_a_figure(tmp_path):
    shelf = Shelf.of(tmp_path, {"a": 1})
    losses = {"first 8": np.linspace(0, 9, 7), "first 4": np.linspace(0, 9, 3)}
    shelf.write(losses)
    whole = shelf.path.read_bytes()
    for place in range(len(whole)):
        shelf.path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        for name, found in shelf.read().items():
            assert name not in losses or found.tolist() == losses[name].tolist()


def test_scores_of_another_identity_are_not_taken_even_from_a_file_of_that_name(tmp_path):
    model, shelf, other = model_with("default"), Shelf.of(tmp_path, {"a": 1}), Shelf.of(tmp_path, {"a": 2})
    run(lambda: model, [64], shelf, "default")
    assert other.path != shelf.path
    shelf.path.rename(other.path)
    assert run(lambda: model, [64], other, "default").passes == 1


def test_scores_that_cannot_be_kept_are_scores_all_the_same(tmp_path):
    (tmp_path / "file").write_text("")
    shelf = Shelf.of(tmp_path / "file" / "scores", {"a": 1})
    assert run(lambda: model_with("default"), [64], shelf, "default").results[0].status == "ok"


def test_the_hash_of_weights_is_made_once_until_a_file_changes(tmp_path, monkeypatch):
    from ropext import kept
    from ropext.checkpoint import open_checkpoint

    source = open_checkpoint(make_checkpoint(tmp_path / "source"))
    first = weights_identity(source, tmp_path / "scores")
    made = kept.weights_sha256
    monkeypatch.setattr(kept, "weights_sha256", lambda source: pytest.fail("hashed again"))
    assert weights_identity(source, tmp_path / "scores") == first == made(source)
    monkeypatch.undo()
    weights = tmp_path / "source" / "model.safetensors"
    content, was = bytearray(weights.read_bytes()), weights.stat()
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(was.st_atime_ns, was.st_mtime_ns + 1))
    assert weights_identity(source, tmp_path / "scores") != first


class Stopped(BaseException):
    """What Ctrl-C would raise."""


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("killed_after", [0, 1, 4])
def test_a_stopped_run_goes_on_where_it_was_with_the_bits_of_an_undisturbed_one(
    rope, batch_size, killed_after, monkeypatch, tmp_path
):
    model, shelf, lengths = model_with(rope), Shelf.of(tmp_path, {"a": 1}), [32, 16]
    whole, rows = run(lambda: model, lengths, None, rope, batch_size=batch_size), []
    once = score.token_losses

    def stopping(model, ids):
        rows.append(len(ids))
        if len(rows) > killed_after:
            raise Stopped
        return once(model, ids)

    with monkeypatch.context() as stopped, pytest.raises(Stopped):
        stopped.setattr(score, "token_losses", stopping)
        run(lambda: model, lengths, shelf, rope, batch_size=batch_size)
    monkeypatch.setattr(score, "token_losses", lambda model, ids: rows.append(len(ids)) or once(model, ids))
    rows.clear()
    again = run(lambda: model, lengths, shelf, rope, batch_size=batch_size)
    assert (again.results, again.by_position) == (whole.results, whole.by_position)
    everything = sum(figure.windows for figure in whole.results) if rope != "default" else whole.results[0].windows
    done = min(killed_after * batch_size, everything)
    assert sum(rows) <= everything - done + batch_size - 1
    assert killed_after == 0 or sum(rows) < everything


# The same tokens under every context


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("bos", [True, False])
def test_the_last_tokens_under_each_context_equal_a_float64_loop(rope, bos):
    model, last = model_with(rope), 8
    cut = cut_windows(tokenizer(bos=bos, adds=bos), TEXTS, [128])
    found = measure(lambda: model, cut, [8, 9, 64, 128, 256], static=rope == "default", last_tokens=last).by_context
    assert found[0].status == "not measured: 8 tokens hold no context for 8"
    assert found[4].status.startswith("not measured: the longest document has")
    for context in found[1:4]:
        total = 0.0
        for row in cut.ids:
            ids = np.concatenate([row[:1], row[len(row) - context.length + 1 :]]) if bos else row[-context.length :]
            tensor = torch.from_numpy(ids.astype(np.int64))[None]
            with torch.no_grad():
                log = torch.log_softmax(copy.deepcopy(model)(tensor, use_cache=False).logits[0].double(), -1)
            total -= sum(log[at - 1, ids[at]].item() for at in range(context.length - last, context.length))
        assert context.tokens == last * len(cut.ids)
        assert context.nll == pytest.approx(total / context.tokens, rel=1e-6)


def test_a_sliding_window_has_no_last_tokens():
    slides = slide_windows(tokenizer(), TEXTS, [64], 16)
    model = model_with("default")
    assert [figure.nll for figure in measure(lambda: model, slides, [64], static=True, last_tokens=8).by_context] == [
        None
    ]


# Memory


def out_of_memory_beyond(length: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A scorer for which batches of more than `rows` rows or `length` tokens are too much; gives the shapes it saw."""
    whole, seen = score.token_losses, []

    def limited(model, ids, **more):
        seen.append(tuple(ids.shape))
        if ids.shape[0] > rows or ids.shape[1] > length:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return whole(model, ids, **more)

    monkeypatch.setattr(score, "token_losses", limited)
    return seen


@pytest.mark.parametrize("rope", ROPES)
def test_a_length_that_does_not_fit_is_reported_as_failed_and_the_others_are_kept(rope, monkeypatch, tmp_path):
    model, shelf, lengths = model_with(rope), Shelf.of(tmp_path, {"a": 1}), [128, 16, 64]
    whole = run(lambda: model, lengths, None, rope)
    with monkeypatch.context() as limited:
        out_of_memory_beyond(64, 1, limited)
        found = run(lambda: model, lengths, shelf, rope)
    assert found.results[0].status == "failed: memory does not suffice for 128 tokens"
    assert found.results[0].nll is None and found.results[0].windows == whole.results[0].windows
    assert found.results[1:] == whole.results[1:]
    assert found.by_position[-1].end == 64
    again = run(lambda: model, lengths, shelf, rope)  # what was kept is no reason not to try once more
    assert again.results == whole.results


def test_a_batch_that_does_not_fit_is_scored_a_row_at_a_time(monkeypatch):
    model = model_with("default")
    whole = run(lambda: model, [64], None, "default")
    seen = out_of_memory_beyond(64, 1, monkeypatch)
    found = run(lambda: model, [64], None, "default", batch_size=4)
    assert found.results == whole.results
    assert seen[0] == (4, 64) and set(seen[1:]) == {(1, 64)}


def test_an_error_that_is_not_for_want_of_memory_is_not_swallowed(monkeypatch):
    monkeypatch.setattr(score, "token_losses", lambda model, ids: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        run(lambda: model_with("default"), [64], None, "default")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_whole_logits_are_never_held():
    program = """
import numpy as np, torch
from transformers import LlamaConfig, LlamaForCausalLM
from ropext.cut import Windows
from ropext.measure import measure
torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(vocab_size=50000, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=1, max_position_embeddings=8192)).eval()
ids = np.random.default_rng(0).integers(0, 50000, (1, 8192)).astype(np.int32)
cut = Windows(ids=ids, sizes=None, owners=np.zeros(1, np.int32), documents=("a",), longest=8192, bos=False)
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
before = peak()
(result,) = measure(lambda: model, cut, [8192], static=True).results
print(result.status, peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    status, increment = done.stdout.split()
    assert status == "ok"
    assert int(increment) < 8192 * 50000 * 4 / 4  # a quarter of the logits' float32 bytes


# Bytes and limits


@pytest.mark.parametrize("bos", [True, False])
def test_bits_per_byte_are_those_of_the_scored_text(bos):
    words = tokenizer(bos=bos, adds=bos)
    model, cut = model_with("default"), cut_windows(words, TEXTS, [64])
    result = measure(lambda: model, cut, [64, 16], static=True).results[1]
    texts, places = {text.sha256: text.text for text in TEXTS}, {owner: 0 for owner in cut.owners.tolist()}
    room, size = 64 - bos, 0
    for owner in cut.owners.tolist():  # spaces between words count for the word after them
        words_before = texts[cut.documents[owner]].split(" ")[: places[owner] + (0 if bos else 1)]
        words_upto = texts[cut.documents[owner]].split(" ")[: places[owner] + 16 - bos]
        size += len(" ".join(words_upto).encode()) - len(" ".join(words_before).encode())
        places[owner] += room
    assert result.bits_per_byte == pytest.approx(result.nll * result.tokens / math.log(2) / size, rel=1e-12)


@given(st.lists(st.integers(2, 90), min_size=1, max_size=6), st.integers(16, 200), st.booleans())
def test_a_limit_of_tokens_takes_the_first_windows_and_no_more(sizes, most, bos):
    texts = [document(size, seed) for seed, size in enumerate(sizes)]
    words = tokenizer(bos=bos, adds=bos)
    everything = cut_windows(words, texts, [16])
    limited = cut_windows(words, texts, [16], Limits(tokens=most))
    count = min(len(everything.ids), most // 16)
    assert limited.ids.tolist() == everything.ids[:count].tolist()
    assert limited.owners.tolist() == everything.owners[:count].tolist()
    assert set(limited.owners.tolist()) == set(range(len(limited.documents)))
