"""Small real checkpoints on disk: two layers of random weights, stock config, stock byte tokenizer, many families.

Hidden 64 (H), 4 heads of 16, 2 key-value heads, native length 256 tokens, theta 10000. The vocabulary is 320 (V): a
byte tokenizer needs 256 ids besides its special tokens, so that every text becomes tokens that the model has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ABSENT = object()  # as the value of a config override: the key is not in the file at all
EOS = "</s>"
BOS = "<s>"

# At the usual 0.02 a model this narrow attends to all tokens alike, and a wrong rotary table would change no loss.
_SHARED = {"vocab_size": 320, "initializer_range": 0.1, "use_cache": True, "tie_word_embeddings": False}
_SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
_LLAMA_LIKE = _SHARED | _SHAPE | {"intermediate_size": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_ROPE = {"rope_theta": 10000.0, "rope_scaling": None}
_GPT_LIKE = _SHARED | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}

# The keys that hub files of each family carry, in the layout of transformers 4.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE | _ROPE | {"attention_bias": False, "mlp_bias": False},
    "mistral": _LLAMA_LIKE | {"rope_theta": 10000.0, "sliding_window": None, "head_dim": 16},
    "qwen2": _LLAMA_LIKE
    | {"rope_theta": 10000.0, "sliding_window": 256, "use_sliding_window": False, "max_window_layers": 2},
    "qwen3": _LLAMA_LIKE | _ROPE | {"head_dim": 16, "sliding_window": None, "use_sliding_window": False},
    "gemma": _LLAMA_LIKE | _ROPE | {"head_dim": 16, "tie_word_embeddings": True, "pad_token_id": None},
    "phi3": _LLAMA_LIKE
    | _ROPE
    | {"original_max_position_embeddings": 256, "sliding_window": None, "pad_token_id": None},
    "gpt_neox": _SHARED | _SHAPE | {"intermediate_size": 128, "rotary_emb_base": 10000, "rotary_pct": 0.25},
    "falcon": _SHARED
    | _SHAPE
    | _ROPE
    | {"alibi": False, "multi_query": True, "new_decoder_architecture": False, "tie_word_embeddings": True},
    "gptj": _GPT_LIKE | {"rotary_dim": 8},
    "gpt2": _GPT_LIKE | {"tie_word_embeddings": True},
    "bloom": _SHARED | {"hidden_size": 64, "n_layer": 2, "n_head": 4, "seq_length": 256, "tie_word_embeddings": True},
}


def make_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    bos: Literal["adds", "has", "none"] = "adds",
    layout: Literal["old", "new"] = "old",
    shards: int = 1,
    **config_overrides: Any,
) -> Path:
    """Writes a checkpoint of one of FAMILIES into `folder`, the same bytes every time, and returns the folder.

    `bos`: the tokenizer puts one before each text, only knows one, or has none. `layout`: config.json as
    transformers 4 (top-level rope_theta) or 5 (rope_parameters) writes it. `config_overrides` are keys of config.json,
    taken as they are, nonsense included; ABSENT removes one. The weights do not depend on the rotary keys.
    """
    specials = [EOS] if bos == "none" else [BOS, EOS]
    ids = {"bos_token_id": None if bos == "none" else 0, "eos_token_id": specials.index(EOS)}
    config = {"model_type": family} | FAMILIES[family] | ids
    model = _model(_without_absent(config | config_overrides))
    model.save_pretrained(folder)  # weights, generation_config.json, config.json in the layout of transformers 5
    if layout == "old":
        dtype = str(model.dtype).removeprefix("torch.")
        written = {"architectures": [type(model).__name__]} | config | {"torch_dtype": dtype}
    else:
        written = json.loads((folder / "config.json").read_text())
    written = _without_absent(written | config_overrides)
    _write_json(folder / "config.json", written)
    if shards > 1:
        _split_weights(folder, shards)
    window = next(key for key in ("max_position_embeddings", "n_positions", "seq_length") if key in written)
    _write_tokenizer(folder, specials, adds_bos=bos == "adds", model_max_length=written[window])
    return folder


def _model(config: dict[str, Any]) -> PreTrainedModel:
    """The stock model of a config, rotary scaling left aside: an override there may be one that no model accepts."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
    dtype = getattr(torch, plain.get("torch_dtype") or plain.get("dtype") or "float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(plain)).to(dtype)


def _split_weights(folder: Path, shards: int) -> None:
    """Deals the tensors of model.safetensors out to several files of about as many tensors, and writes their index."""
    from safetensors.torch import load_file, save_file

    whole = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = load_file(whole)
    whole.unlink()
    weight_map = {name: number * shards // len(tensors) for number, name in enumerate(tensors)}
    files = [f"model-{shard + 1:05}-of-{shards:05}.safetensors" for shard in range(shards)]
    for shard, file in enumerate(files):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": {n: files[s] for n, s in weight_map.items()}}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_tokenizer(folder: Path, specials: list[str], *, adds_bos: bool, model_max_length: int) -> None:
    """A byte tokenizer: the special tokens, then one token for each of the 256 bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, specials.index(BOS))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings | ({"bos_token": BOS} if BOS in specials else {}))


def _without_absent(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not ABSENT}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
