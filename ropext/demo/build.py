"""Trains the built-in checkpoint: `python -m ropext.demo.build --out DIR`.

A llama-type model of 1.3 M parameters learns Python source: two thirds of its tokens in windows of 512, the last third
in windows of 2048, its native length. One sequence in eight is made so that it can only be predicted by copying
from far back. A run that was stopped goes on from its last saved state when started again with the same arguments.

Shapes: B sequences, T tokens in one, V vocabulary. Rates per optimizer step.
"""

from __future__ import annotations

import argparse
import json
import platform
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from ropext.cut import cut_windows
from ropext.lengths import parse_length
from ropext.load import load_model, load_tokenizer
from ropext.measure import measure
from ropext.texts import LEFT_OUT, Document, built_in, without_copies

VOCABULARY = 4096
NATIVE_LENGTH = 2048
THETA = 10000.0
BATCH_TOKENS = 8192
PEAK_RATE = 3e-3
WARM_UP_STEPS = 100
COPY_SHARE = 0.125  # sequences that need copying from far back
LIBRARY_SHARE = 0.4  # of the other sequences: the standard library; the rest is installed packages
PACKAGE_CHARACTERS = 6_000_000  # from one package at most, so that no package is the whole corpus
SAVE_EVERY_SECONDS = 300
BOS = "<|bos|>"
# fmt: off
WORDS = (
    "amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "haven", "inlet", "jewel", "kayak", "lemon",
    "maple", "north", "ocean", "pearl", "quartz", "river", "stone", "tulip", "umbra", "valley", "willow", "xenon",
    "yacht", "zephyr", "anchor", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor",
)
# fmt: on


def config() -> LlamaConfig:
    """The shape of the built-in checkpoint: 1.3 M parameters, two heads of 64."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=NATIVE_LENGTH,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        bos_token_id=0,
        eos_token_id=0,
    )


def package_documents() -> Iterator[Document]:
    """Python files of the packages installed beside the standard library, a bounded amount of each."""
    root = Path(sysconfig.get_paths()["purelib"])
    taken: dict[str, int] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if LEFT_OUT.intersection(parts) or parts[0] == "ropext":
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) > 400 and taken.get(parts[0], 0) + len(text) <= PACKAGE_CHARACTERS:
            taken[parts[0]] = taken.get(parts[0], 0) + len(text)
            yield Document(name=".".join(parts), text=text)


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE that adds one BOS itself, and keeps digits apart so that numbers can be copied digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n+ *| ?[^\s\w]+| ?[^\W\d]+| ?\d| +"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)]
    )
    return tokenizer


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token streams to cut windows from, BOS between documents, and what makes copying sequences."""

    streams: Sequence[np.ndarray]  # standard library, packages: token ids `[N]`
    tokenizer: Tokenizer

    def window(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """`[length]` tokens: BOS, then real text from a random place."""
        stream = self.streams[0 if rng.random() < LIBRARY_SHARE else 1]
        start = int(rng.integers(len(stream) - length))
        return np.concatenate([[0], stream[start : start + length - 1]])

    def copying(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """`[length]` tokens that hold something to be found again far back: a repeat, or keys asked for at the end."""
        if rng.random() < 0.4:
            return self._repeat(rng, length)
        return self._lookup(rng, length)

    def _repeat(self, rng: np.random.Generator, length: int) -> np.ndarray:
        size = int(rng.integers(length // 8, length // 2))
        chunk = self.window(rng, size + 1)[1:] if rng.random() < 0.6 else rng.integers(1, VOCABULARY, size)
        gap = self.window(rng, length)[1:]
        first = int(rng.integers(0, length - 2 * size))
        second = int(rng.integers(first + size, length - size + 1))
        tokens = np.concatenate([[0], gap])
        tokens[max(first, 1) : first + size] = chunk[max(1 - first, 0) :]
        tokens[second : second + size] = chunk
        return tokens

    def _lookup(self, rng: np.random.Generator, length: int) -> np.ndarray:
        style = int(rng.integers(3))
        count = 1 if style == 0 else int(rng.integers(2, max(3, length // 64)))
        names = rng.choice(len(WORDS), size=min(count, len(WORDS)), replace=False)
        pairs = [(WORDS[name], f"{rng.integers(10000, 100000)}") for name in names]
        told = [self._ids(_tell(style, word, number)) for word, number in pairs]
        asked = [self._ids(_ask(style, *pairs[i])) for i in rng.permutation(len(pairs))]
        room = length - 1 - sum(map(len, told)) - sum(map(len, asked))
        if room < len(told):
            return self._repeat(rng, length)
        filler = self.window(rng, room + 1)[1:]
        cuts = np.sort(rng.integers(0, room, size=len(told)))
        parts: list[np.ndarray] = [np.zeros(1, np.int64)]
        for fact, begin, end in zip(told, [0, *cuts[:-1]], cuts, strict=True):
            parts += [filler[begin:end], fact]
        return np.concatenate([*parts, filler[cuts[-1] :], *asked])[:length]

    def _ids(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def batch(self, seed: int, step: int, length: int) -> torch.Tensor:
        """The batch of one step, the same whenever it is asked for: `[B, T]`."""
        rng = np.random.default_rng((seed, step))
        rows = [
            self.copying(rng, length) if rng.random() < COPY_SHARE else self.window(rng, length)
            for _ in range(BATCH_TOKENS // length)
        ]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def _tell(style: int, word: str, number: str) -> str:
    return (
        f"\n# The pass key is {number}. Remember it. {number} is the pass key.\n",
        f"\n{word}_key = {number}\n",
        f"\n# One of the special magic numbers for {word} is: {number}.\n",
    )[style]


def _ask(style: int, word: str, number: str) -> str:
    return (
        f"\n# What is the pass key? The pass key is {number}",
        f"\nassert {word}_key == {number}",
        f"\n# What is the special magic number for {word}? The special magic number for {word} is: {number}",
    )[style]


def read_corpus(cache: Path) -> Corpus:
    """Tokenizer and token streams, made once and kept in `cache`."""
    tokenizer_file, streams_file = cache / "tokenizer.json", cache / "streams.npz"
    if not streams_file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        library = list(built_in("training"))
        packages = list(without_copies(package_documents(), list(built_in("held-out"))))
        sample = (d.text for documents in (library, packages[::8]) for d in documents)
        tokenizer = train_tokenizer(sample)
        tokenizer.save(str(tokenizer_file))
        streams: dict[str, np.ndarray] = {}
        for name, documents in (("library", library), ("packages", packages)):
            encoded = tokenizer.encode_batch([d.text for d in documents])  # each begins with its own BOS
            streams[name] = np.concatenate([np.asarray(e.ids, dtype=np.uint16) for e in encoded])
            characters = sum(len(d.text) for d in documents)
            print(f"{name}: {len(documents)} files, {characters} characters, {len(streams[name])} tokens", flush=True)
        np.savez(streams_file, library=streams["library"], packages=streams["packages"])
    with np.load(streams_file) as kept:
        return Corpus([kept["library"], kept["packages"]], Tokenizer.from_file(str(tokenizer_file)))


def rate_at(done: float) -> float:
    """Learning rate after the share `done` of the tokens: linear to zero, warm-up is the caller's."""
    return PEAK_RATE * (1.0 - done)


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss of `ids` `[B, T]`, in nats."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    logits = F.linear(hidden, model.lm_head.weight)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train(out: Path, tokens: int, seed: int, compiled: bool) -> None:
    """Train for `tokens` tokens and leave weights and tokenizer in `out`."""
    corpus = read_corpus(out / "work")
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config())
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    state_file, first = out / "work" / "state.pt", 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = int(state["step"])
    step_loss = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    steps = tokens // BATCH_TOKENS
    saved = time.monotonic()
    for step in range(first, steps):
        length = 512 if step < steps * 2 // 3 else NATIVE_LENGTH
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step / steps) * min(1.0, (step + 1) / WARM_UP_STEPS)
        started = time.monotonic()
        loss = step_loss(model, corpus.batch(seed, step, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            speed = BATCH_TOKENS / (time.monotonic() - started)
            print(f"step {step}/{steps} length {length} loss {loss.item():.4f} {speed:.0f} tokens/s", flush=True)
        if time.monotonic() - saved > SAVE_EVERY_SECONDS:
            saved = time.monotonic()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, state_file.with_suffix(".new"))
            state_file.with_suffix(".new").replace(state_file)
    model.save_pretrained(out)
    (out / "work" / "run.json").write_text(json.dumps({"steps": steps, "python": platform.python_version()}))
    write_small_files(out)


def write_small_files(out: Path) -> None:
    """Tokenizer files, and the config in the layout that transformers 4 and 5 both read right."""
    (out / "tokenizer.json").write_bytes((out / "work" / "tokenizer.json").read_bytes())
    tokenizer_config = {
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": BOS,
        "model_max_length": NATIVE_LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    written = json.loads((out / "config.json").read_text())
    written |= {"rope_theta": THETA, "rope_scaling": None}
    (out / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def write_card(out: Path) -> None:
    """README.md of the checkpoint: what it is, bits per byte on the held-out split, loss by position up to 8192."""
    model, tokenizer = load_model(out), load_tokenizer(out)
    near = cut_windows(tokenizer, built_in("held-out"), [NATIVE_LENGTH])
    (at_native,) = measure(lambda: model, near, [NATIVE_LENGTH], static=True).results
    far = cut_windows(tokenizer, built_in("held-out"), [4 * NATIVE_LENGTH])
    by_position = measure(lambda: model, far, [4 * NATIVE_LENGTH], static=True).by_position
    run = json.loads((out / "work" / "run.json").read_text())
    card = CARD.format(
        parameters=model.num_parameters() / 1e6,
        native=NATIVE_LENGTH,
        theta=THETA,
        tokens=run["steps"] * BATCH_TOKENS / 1e6,
        python=run["python"],
        copies=COPY_SHARE,
        held_out=platform.python_version(),
        bits=at_native.bits_per_byte,
        nll=at_native.nll,
        windows=at_native.windows,
        documents=at_native.documents,
        far_windows=len(far.ids),
        far=4 * NATIVE_LENGTH,
        rows="\n".join(f"| {block.start} to {block.end - 1} | {block.nll:.3f} |" for block in by_position),
    )
    (out / "README.md").write_text(card)


CARD = """---
license: apache-2.0
pipeline_tag: text-generation
---
# The built-in checkpoint of ropext

A llama-type model of {parameters:.2f} M parameters, native length {native}, theta {theta:g}, that continues Python.
It exists so that ropext has a real model to extend offline; it is of no other use.

Trained by `python -m ropext.demo.build` on {tokens:.1f} M tokens: the training split of the Python {python} standard
library, and packages installed beside it. Two thirds are in windows of 512, the last third in windows of {native}. Of
the sequences, {copies:.1%} are made so that they need copying from far back.

Measured on the held-out split of the Python {held_out} standard library (float32, one BOS at the start of each window):

- {bits:.3f} bits per byte, {nll:.4f} nats per token: {windows} windows of {native} tokens from {documents} modules;
- mean loss by position, {far_windows} windows of {far} tokens, nothing patched, so it blows up past {native}:

| positions | nats per token |
|---|---|
{rows}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=parse_length, default="30m", help="30m means 30 * 2**20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="about a third faster; needs a C++ compiler")
    arguments = parser.parse_args()
    train(arguments.out, arguments.tokens, arguments.seed, arguments.compile)
    write_card(arguments.out)
