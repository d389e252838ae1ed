"""Scores against a plain float64 loop over the same windows, and windows against the definition, by hand."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ropext.cut import Cut, Limits, Windows, cut_windows, slide_windows
from ropext.errors import RopextError, UsageError
from ropext.figures import LengthScore, PositionScore
from ropext.measure import measure
from ropext.pack import bos_of
from ropext.score import has_changing_table
from ropext.texts import Document

VOCABULARY = 101
BOS = 0


def tokenizer(*, bos: bool = True, adds: bool = True, longest: int = 64) -> PreTrainedTokenizerFast:
    """One token a word: w1 ... w100, and <s> as token 0."""
    words = {"<s>": BOS} | {f"w{number}": number for number in range(1, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words | {"a": VOCABULARY}, unk_token="w100"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    named = {"bos_token": "<s>"} if bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=longest, **named)


def document(words: int, seed: int = 0) -> Document:
    numbers = np.random.default_rng(seed).integers(1, VOCABULARY, words)
    return Document(name=f"d{seed}", text=" ".join(f"w{number}" for number in numbers))


def build(family: str, **more: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **more,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def score(
    model: torch.nn.Module, cut: Cut, lengths: list[int], batch_size: int = 1, progress: object = None
) -> tuple[tuple[LengthScore, ...], tuple[PositionScore, ...]]:
    static = not has_changing_table(model.config)
    found = measure(lambda: model, cut, lengths, static=static, batch_size=batch_size, told=progress)
    return found.results, found.by_position


def float64_nll(model: torch.nn.Module, windows: Windows, length: int, fresh: bool = False) -> float:
    """The definition as it is written: each window cut to `length`, one forward each, sums in float64; with `fresh`
    by a model that has seen nothing else."""
    total, count = 0.0, 0
    for row in windows.ids:
        ids = torch.tensor(row[:length].astype(np.int64))[None]
        with torch.no_grad():
            logits = (copy.deepcopy(model) if fresh else model)(ids, use_cache=False).logits[0].double()
        for position in range(1, length):
            total -= torch.log_softmax(logits[position - 1], 0)[ids[0, position]].item()
            count += 1
    return total / count


# Windows


def test_windows_are_whole_consecutive_and_start_with_one_bos() -> None:
    text = document(33)
    windows = cut_windows(tokenizer(), [text], [4, 16])
    words = [int(word[1:]) for word in text.text.split()]
    assert windows.ids.tolist() == [[BOS, *words[:15]], [BOS, *words[15:30]]]
    assert windows.ids.dtype == np.int32


def test_a_document_of_exactly_one_window_counts_the_bos() -> None:
    assert len(cut_windows(tokenizer(), [document(15)], [16]).ids) == 1
    assert len(cut_windows(tokenizer(), [document(14)], [16]).ids) == 0
    assert len(cut_windows(tokenizer(adds=False), [document(16)], [16]).ids) == 1
    assert len(cut_windows(tokenizer(adds=False), [document(15)], [16]).ids) == 0


@pytest.mark.parametrize(("bos", "adds", "expected"), [(True, True, [BOS, BOS]), (True, False, []), (False, False, [])])
def test_a_window_has_the_bos_that_the_tokenizer_itself_would_add(bos: bool, adds: bool, expected: list[int]) -> None:
    windows = cut_windows(tokenizer(bos=bos, adds=adds), [document(40)], [16])
    assert windows.ids[windows.ids == BOS].tolist() == expected
    assert windows.ids[:, 0].tolist().count(BOS) == len(expected)
    assert windows.bos is bool(expected)


def test_another_special_token_in_front_is_no_bos() -> None:
    marked = tokenizer(bos=False, adds=True)
    marked.add_special_tokens({"cls_token": "<s>"})
    assert bos_of(marked) is None


def test_a_text_that_brings_its_own_bos_gets_no_second() -> None:
    text = Document(name="own", text="<s> " + document(40).text)
    assert np.array_equal(
        cut_windows(tokenizer(), [text], [16]).ids, cut_windows(tokenizer(), [document(40)], [16]).ids
    )


def test_the_longest_length_that_a_document_reaches_decides_the_window() -> None:
    documents = [document(20, 1), document(70, 2), document(30, 3), document(33, 4)]
    windows = cut_windows(tokenizer(), documents, [8, 32, 128])
    assert windows.length == 32
    assert windows.longest == 71
    assert windows.owners.tolist() == [0, 0, 1]
    assert windows.documents == (documents[1].sha256, documents[3].sha256)


def test_a_limit_counts_the_documents_that_give_windows_and_stops_reading_there() -> None:
    read = []

    def stream() -> Iterator[Document]:
        for seed, words in enumerate([20, 70, 10, 40, 50, 60]):
            read.append(seed)
            yield document(words, seed)

    windows = cut_windows(tokenizer(), stream(), [8, 32], Limits(documents=2))
    assert windows.documents == (document(70, 1).sha256, document(40, 3).sha256)
    assert read == [0, 1, 2, 3]


def test_a_limit_does_not_keep_a_later_document_from_deciding_the_window() -> None:
    windows = cut_windows(
        tokenizer(), [document(20, 1), document(20, 2), document(40, 3)], [8, 32], Limits(documents=1)
    )
    assert windows.length == 32
    assert windows.documents == (document(40, 3).sha256,)


def test_the_data_hash_names_the_scored_text_in_order() -> None:
    first, second = document(40, 1), document(40, 2)
    expected = hashlib.sha256(f"{first.sha256}\n{second.sha256}".encode()).hexdigest()
    assert cut_windows(tokenizer(), [first, document(3), second], [8, 32]).data_hash == expected
    assert cut_windows(tokenizer(), [second, first], [32]).data_hash != expected


def test_long_text_is_neither_truncated_nor_warned_about(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    short = tokenizer(longest=8)
    short.backend_tokenizer.enable_truncation(8)
    windows = cut_windows(short, [document(400)], [128])
    assert len(windows.ids) == 3
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("lengths", "limit"), [([], None), ([1], None), ([8], 0)])
def test_nothing_to_score_is_wrong_usage(lengths: list[int], limit: int | None) -> None:
    with pytest.raises(UsageError, match="at least"):
        cut_windows(tokenizer(), [document(20)], lengths, Limits(documents=limit))


# Scores


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2"])
def test_perplexity_equals_a_float64_loop_over_the_same_windows(family: str) -> None:
    model = build(family)
    windows = cut_windows(tokenizer(), [document(130, 1), document(70, 2)], [2, 16, 64])
    results, _ = score(model, windows, [64, 2, 16], batch_size=2)
    assert [result.length for result in results] == [64, 2, 16]
    for result in results:
        expected = float64_nll(model, windows, result.length)
        assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-6)
        assert result.nll == pytest.approx(expected, rel=1e-6)
        assert (result.status, result.windows, result.documents) == ("ok", 3, 2)
        assert result.tokens == 3 * (result.length - 1)


def test_constant_logits_give_exactly_the_vocabulary_size() -> None:
    model = build("llama", tie_word_embeddings=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    unequal = [document(130, 1), document(70, 2)]  # an interval must weigh documents by their tokens
    results, _ = score(model, cut_windows(tokenizer(), unequal, [8, 64]), [8, 64])
    for result in results:
        assert result.perplexity == pytest.approx(VOCABULARY, rel=1e-12)
        assert result.ci95 == pytest.approx((VOCABULARY, VOCABULARY), rel=1e-12)


def test_the_batch_size_changes_nothing_and_progress_counts_windows() -> None:
    model, windows = build("llama"), cut_windows(tokenizer(), [document(160)], [32])
    told: list[tuple[int, int]] = []
    alone, _ = score(model, windows, [32])
    together, _ = score(model, windows, [32], batch_size=4, progress=lambda done, of: told.append((done, of)))
    assert together[0].nll == pytest.approx(alone[0].nll, rel=1e-6)
    assert told == [(4, 5), (5, 5)]


def test_blocks_of_positions_add_up_to_the_whole() -> None:
    model, windows = build("llama"), cut_windows(tokenizer(), [document(1200)], [600])
    (result, short), blocks = score(model, windows, [600, 256])
    assert [(block.start, block.end) for block in blocks] == [(0, 256), (256, 512), (512, 600)]
    assert [block.tokens for block in blocks] == [2 * 255, 2 * 256, 2 * 88]
    assert sum(block.nll * block.tokens for block in blocks) == pytest.approx(result.nll * result.tokens, rel=1e-12)
    assert blocks[0].nll == pytest.approx(short.nll, rel=1e-12)


def test_a_length_that_no_document_reaches_has_no_figure() -> None:
    windows = cut_windows(tokenizer(), [document(40)], [16, 64])
    measured, missing = score(build("llama"), windows, [16, 64])[0]
    assert measured.status == "ok"
    assert missing.status == "not measured: the longest document has 41 tokens"
    assert (missing.perplexity, missing.nll, missing.ci95, missing.windows) == (None, None, None, 0)


def test_without_any_window_nothing_is_measured() -> None:
    windows = cut_windows(tokenizer(), [document(3)], [16, 64])
    results, blocks = score(build("llama"), windows, [16, 64])
    assert [result.status for result in results] == ["not measured: the longest document has 4 tokens"] * 2
    assert blocks == ()


def test_the_interval_resamples_documents_not_windows() -> None:
    model = build("llama")
    one, _ = score(model, cut_windows(tokenizer(), [document(640)], [32]), [32])
    many, _ = score(model, cut_windows(tokenizer(), [document(31, seed) for seed in range(20)], [32]), [32])
    assert one[0].ci95 is None
    assert many[0].ci95 is not None
    low, high = many[0].ci95
    assert low < many[0].perplexity < high
    again, _ = score(model, cut_windows(tokenizer(), [document(31, seed) for seed in range(20)], [32]), [32])
    assert again == many


def test_the_interval_is_that_of_the_normal_approximation_over_documents() -> None:
    model, documents = build("llama"), [document(31, seed) for seed in range(60)]
    windows = cut_windows(tokenizer(), documents, [32])
    (whole,), _ = score(model, windows, [32])
    each = [score(model, cut_windows(tokenizer(), [text], [32]), [32])[0][0].nll for text in documents]
    spread = 1.96 * float(np.std(each)) / math.sqrt(len(each))
    assert math.log(whole.ci95[1] / whole.ci95[0]) == pytest.approx(2 * spread, rel=0.15)


class Spoiled(torch.nn.Module):
    """A final norm that spoils what it gives from one position on."""

    def __init__(self, norm: torch.nn.Module, position: int, value: float) -> None:
        super().__init__()
        self.norm, self.position, self.value = norm, position, value

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(hidden)
        hidden[:, self.position :] = self.value
        return hidden


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_loss_is_named_from_its_first_length_on_and_never_a_number(value: float) -> None:
    model = build("llama")
    model.model.norm = Spoiled(model.model.norm, 299, value)
    windows = cut_windows(tokenizer(), [document(700, 1), document(700, 2)], [600])
    results, blocks = score(model, windows, [64, 300, 301, 600])
    assert [result.status for result in results[:2]] == ["ok", "ok"]
    for result in results[2:]:
        assert result.status == "failed: the loss at position 300 is not a finite number"
        assert (result.perplexity, result.nll, result.ci95) == (None, None, None)
    assert [block.nll is None for block in blocks] == [False, True, True]


def test_an_infinite_weight_fails_every_length_by_name() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = float("inf")
    results, _ = score(model, cut_windows(tokenizer(), [document(70)], [8, 64]), [8, 64])
    assert all(result.status.startswith("failed: the loss at position 1 ") for result in results)


def test_a_loss_too_large_for_a_perplexity_is_still_given() -> None:
    model = build("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    (result,), _ = score(model, cut_windows(tokenizer(), [document(70), document(80)], [64]), [64])
    assert result.nll > 710
    assert result.perplexity is None
    assert result.ci95 is None
    assert result.status == f"perplexity overflows: exp({result.nll:.1f})"


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 2.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("rope", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
@pytest.mark.parametrize(("lengths", "batch_size"), [((16, 48, 128), 1), ((128, 16, 48), 3)])
def test_a_table_that_changes_with_the_length_gets_a_fresh_state_for_every_pass(rope, lengths, batch_size) -> None:
    model = build("llama", rope_parameters={"rope_theta": 10000.0, **rope})
    unused = copy.deepcopy(model)
    windows = cut_windows(tokenizer(), [document(300, 1), document(140, 2)], lengths)
    results, by_position = score(model, windows, lengths, batch_size=batch_size)
    assert [result.length for result in results] == list(lengths)
    for result in results:
        expected = float64_nll(unused, windows, result.length, fresh=True)
        assert result.nll == pytest.approx(expected, rel=1e-6)
    assert by_position[-1].end == 128


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2"])
@pytest.mark.parametrize("stride", [1, 7, 32])
@pytest.mark.parametrize("bos", [True, False])
def test_a_sliding_window_equals_a_float64_loop_over_the_documents(family, stride, bos) -> None:
    model, texts = build(family), [document(75, 1), document(33, 2), document(20, 3)]
    slides = slide_windows(tokenizer(bos=bos, adds=bos), texts, [64, 32], stride)
    results, _ = score(model, slides, [64, 32], batch_size=4)
    for result in results:
        total, tokens = 0.0, 0
        for text in slides.texts:
            if len(text) >= result.length:
                loss, count = sliding_loss(model, text, result.length, stride)
                total, tokens = total + loss, tokens + count
        assert result.nll == pytest.approx(total / tokens, rel=1e-6)
        assert result.tokens == tokens
        assert result.documents == {64: 1, 32: 2}[result.length]


def sliding_loss(model, text, length, stride) -> tuple[float, int]:
    """Each token once, from the first window that holds it and gives it context."""
    counted: dict[int, float] = {}
    for start in range(0, len(text), stride):
        ids = torch.tensor(text[start : start + length].astype(np.int64))[None]
        with torch.no_grad():
            log = torch.log_softmax(model(ids, use_cache=False).logits[0].double(), -1)
        for position in range(1, ids.shape[1]):
            counted.setdefault(start + position, -log[position - 1, ids[0, position]].item())
        if start + length >= len(text):
            break
    return sum(counted.values()), len(counted)


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_constant_logits_give_the_vocabulary_size_at_any_stride(stride) -> None:
    model = build("llama", tie_word_embeddings=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    slides = slide_windows(tokenizer(), [document(50, 1), document(41, 2)], [16, 32], stride)
    for result in score(model, slides, [16, 32])[0]:
        assert result.perplexity == pytest.approx(VOCABULARY, rel=1e-12)


def test_a_sliding_window_of_its_own_length_is_consecutive_windows_and_the_rest() -> None:
    model, text = build("llama"), document(63)  # with the BOS two windows of 32, and nothing left over
    slides, windows = slide_windows(tokenizer(), [text], [32], 32), cut_windows(tokenizer(), [text], [32])
    (sliding,), blocks = score(model, slides, [32])
    assert sliding.tokens == 62 and sliding.windows == 2
    assert len(windows.ids) == 2 and blocks[0].tokens == 62


def test_rows_of_unequal_length_in_half_precision_are_scored_as_each_alone() -> None:
    model = build("llama").half()
    slides = slide_windows(tokenizer(), [document(75, 1), document(33, 2), document(70, 3)], [32], 16)
    (alone,), _ = score(model, slides, [32])
    (together,), _ = score(model, slides, [32], batch_size=8)
    assert {len(row) for row in slides.passes([32], together=True)[0].rows} == {32, 28, 23, 18}
    assert together.nll == pytest.approx(alone.nll, rel=1e-3) and together.tokens == alone.tokens


@pytest.mark.parametrize("stride", [0, -1, 33])
def test_a_stride_that_would_leave_tokens_out_is_wrong_usage(stride) -> None:
    with pytest.raises(UsageError, match="between 1 and the shortest length, 32"):
        slide_windows(tokenizer(), [document(100)], [64, 32], stride)


def test_a_limit_bounds_the_documents_of_each_length_of_a_sliding_window() -> None:
    texts = [document(40, 1), document(80, 2), document(90, 3), document(99, 4)]
    slides = slide_windows(tokenizer(), iter(texts), [32, 64], 16, Limits(documents=2))
    near, far = slides.passes([32, 64], together=True)
    assert [slides.documents[owner] for owner in sorted(set(near.owners))] == [texts[0].sha256, texts[1].sha256]
    assert [slides.documents[owner] for owner in sorted(set(far.owners))] == [texts[1].sha256, texts[2].sha256]


def test_a_linearly_scaled_model_is_scored() -> None:
    model = build("llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    windows = cut_windows(tokenizer(), [document(70)], [64])
    (result,), _ = score(model, windows, [64])
    assert result.nll == pytest.approx(float64_nll(model, windows, 64), rel=1e-6)


def test_a_model_with_scaled_logits_is_refused_before_any_figure() -> None:
    with pytest.raises(RopextError, match="does more to its logits"):
        score(build("granite", logits_scaling=8.0), cut_windows(tokenizer(), [document(70)], [64]), [64])


def test_a_tokenizer_of_another_model_is_refused() -> None:
    text = Document(name="a", text="a " * 70)  # "a" is token 101, one more than the model has
    with pytest.raises(RopextError, match="the text has token 101, the model knows 101 tokens"):
        score(build("llama"), cut_windows(tokenizer(), [text], [64]), [64])
