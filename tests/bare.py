"""Checkpoint directories made of bytes alone, without torch: a config, zero weights, a tokenizer's limit.

For the rooms that read files and never compute with weights. The shape is that of tests/tiny.py: native length 256
tokens, theta 10000, 16 rotary dimensions.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.tiny import ABSENT

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
NAMES = ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight")


def bare_checkpoint(
    folder: Path, *, shards: int = 1, limit: object = 256, metadata: Mapping[str, str] | None = None, **config: Any
) -> Path:
    """Writes a checkpoint into `folder` and returns it. `limit` is the tokenizer's model_max_length, ABSENT for none;
    `config` are keys of config.json, taken as they are, ABSENT removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {key: value for key, value in (CONFIG | config).items() if value is not ABSENT})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": limit, "eos_token": "</s>"}
    write_json(folder / "tokenizer_config.json", {key: value for key, value in settings.items() if value is not ABSENT})
    if shards == 1:
        write_safetensors(folder / "model.safetensors", NAMES, metadata)
        return folder
    files = {name: f"model-{number % shards + 1:05}-of-{shards:05}.safetensors" for number, name in enumerate(NAMES)}
    for file in set(files.values()):
        write_safetensors(folder / file, [name for name in NAMES if files[name] == file], metadata)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": 96}, "weight_map": files})
    return folder


def write_safetensors(path: Path, names: Sequence[str], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file of eight float32 zeros a tensor: 8 bytes of header length, the header, the data."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    for number, name in enumerate(names):
        entries[name] = {"dtype": "F32", "shape": [2, 4], "data_offsets": [32 * number, 32 * number + 32]}
    path.write_bytes(with_header(json.dumps(entries).encode(), bytes(32 * len(names))))


def with_header(header: bytes, data: bytes) -> bytes:
    """The bytes of a safetensors file with this header, whatever it says."""
    return struct.pack("<Q", len(header)) + header + data


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file by hand, as a user would; ABSENT removes one."""
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    write_json(path, {key: value for key, value in content.items() if value is not ABSENT})


def snapshot(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file below a folder, hidden ones included."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
