"""What patching 14 GB of weights by hard links costs beside a bare Typer program: whole processes, time and memory.

    python tests/benchmarks/patch_sparse.py [RUNS] [FOLDER]

Makes a checkpoint of the Mistral-7B shape (bf16, 3 shards, real safetensors headers) of sparse files, which take no
room, below FOLDER (the system's temporary one unless told), and prints both ratios with their targets. The bare program
is the cheapest there is: one command that does nothing.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
import tempfile
from pathlib import Path

from measure import ROPEXT, interleaved, verdict

TARGET_TIME, TARGET_MEMORY = 2.0, 80.0  # times a bare Typer program; MB
LAYERS, HIDDEN, KEY_VALUE, INNER, VOCABULARY, SHARDS = 32, 4096, 1024, 14336, 32000, 3
CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
BARE = """import typer
app = typer.Typer()
@app.command()
def nothing(name: str) -> None:
    "Do nothing."
app()
"""


def shapes() -> dict[str, list[int]]:
    """Tensor name -> shape."""
    layer = {f"self_attn.{name}_proj.weight": [HIDDEN, HIDDEN] for name in "qo"}
    layer |= {f"self_attn.{name}_proj.weight": [KEY_VALUE, HIDDEN] for name in "kv"}
    layer |= {f"mlp.{name}_proj.weight": [INNER, HIDDEN] for name in ("gate", "up")}
    layer |= {"mlp.down_proj.weight": [HIDDEN, INNER]}
    layer |= {f"{name}_layernorm.weight": [HIDDEN] for name in ("input", "post_attention")}
    found = {f"model.layers.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    ends = {"model.embed_tokens.weight": [VOCABULARY, HIDDEN], "lm_head.weight": [VOCABULARY, HIDDEN]}
    return found | ends | {"model.norm.weight": [HIDDEN]}


def make_sparse(folder: Path) -> int:
    """Writes the checkpoint and returns the bytes that its weight files seem to have."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 32768}))
    names, weight_map, total = list(shapes()), {}, 0
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        mine = names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]
        weight_map |= dict.fromkeys(mine, file)
        total += sparse_shard(folder / file, {name: shapes()[name] for name in mine})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def sparse_shard(path: Path, tensors: dict[str, list[int]]) -> int:
    """A safetensors file whose data is a hole. Returns its size in bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return 8 + len(header) + end


def main(runs: int, below: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=below) as name:
        folder = Path(name)
        print(f"checkpoint of {make_sparse(folder / 'model') / 1e9:.1f} GB in {SHARDS} sparse files")
        (folder / "bare.py").write_text(BARE)
        out = folder / "out"
        options = ["--method", "ntk", "--factor", "4", "--weights", "link", "--no-verify", "--out", str(out)]
        commands = {
            "bare Typer program": (sys.executable, str(folder / "bare.py"), "x"),
            "ropext patch --no-verify": (*ROPEXT, "patch", str(folder / "model"), *options),
        }
        bare, patch = interleaved(commands, runs, lambda: shutil.rmtree(out, ignore_errors=True))
    print(bare)
    print(patch)
    verdict("time as a multiple", patch.median / bare.median, TARGET_TIME)
    verdict("peak memory in MB", patch.peak / 1e6, TARGET_MEMORY)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 11, sys.argv[2] if len(sys.argv) > 2 else None)
