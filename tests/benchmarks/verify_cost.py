"""What a verified patch costs beside the cold import of the model type's own modeling module: whole processes, time.

    python tests/benchmarks/verify_cost.py [RUNS]

The import is what any program pays before it can ask stock transformers for a rotary table. The checkpoints have the
shapes of Llama-2-7B and Qwen3-8B and hardly any weights: a patch reads none. Prints the ratio of each and the target.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from measure import ROPEXT, interleaved, verdict
from patch_sparse import sparse_shard

TARGET = 1.5  # a verified patch / the import
SHAPE = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
CONFIGS = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "rope_theta": 10000.0,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
    },
}


def main(runs: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out, commands = folder / "out", {}
        for model_type, config in CONFIGS.items():
            source = folder / model_type
            source.mkdir()
            (source / "config.json").write_text(json.dumps({"model_type": model_type} | SHAPE | config, indent=2))
            sparse_shard(source / "model.safetensors", {"model.norm.weight": [4096]})
            module = f"transformers.models.{model_type}.modeling_{model_type}"
            commands[f"import of {model_type}"] = (sys.executable, "-c", f"import {module}")
            options = ("--method", "yarn", "--factor", "4", "--out", str(out))
            commands[f"ropext patch of {model_type}"] = (*ROPEXT, "patch", str(source), *options)
        found = interleaved(commands, runs, lambda: shutil.rmtree(out, ignore_errors=True))
    for one in found:
        print(one)
    for number, model_type in enumerate(CONFIGS):
        imported, patched = found[2 * number : 2 * number + 2]
        verdict(f"{model_type}, time as a multiple", patched.median / imported.median, TARGET)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
