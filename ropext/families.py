"""What sets model types apart, as data: which have no rotary embedding, their names, defaults, and limits.

Everything that depends on a model type stands here; the rest of ropext asks these tables. They were read off the model
classes of transformers 5.24.0 and 4.57.6, and tests/test_architectures.py proves them against both.
"""

from __future__ import annotations

from collections.abc import Mapping

# Model types whose stock code reads the keys that ropext writes; any other needs verification to prove it.
PROVEN = frozenset({"llama", "mistral", "qwen2", "qwen3", "gpt_neox"})
# Older names of theta and of the rotated share of a head, by model type.
THETA_NAMES = {"gpt_neox": "rotary_emb_base", "gpt_neox_japanese": "rotary_emb_base"}
PARTIAL_NAMES = {"gpt_neox": "rotary_pct", "gpt_neox_japanese": "rotary_pct"}
# What transformers takes where the config is silent.
DEFAULT_THETA = dict.fromkeys(PROVEN, 10000.0)
DEFAULT_PARTIAL = {"gpt_neox": 0.25}
DEFAULT_SLIDING_WINDOW = {"mistral": 4096}
SLIDING_ONLY_IF_ASKED = frozenset({"qwen2", "qwen3"})  # sliding_window counts where use_sliding_window is true
# Types whose layers that see everything have no rotary embedding: only the sliding (or chunked) ones rotate.
ROPE_IN_SLIDING_LAYERS = frozenset(
    {"afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1", "llama4_text"}
)
WITHOUT_ATTENTION = frozenset({"linear_attention", "conv", "mlp", "mamba", "recurrent"})  # layer types

# What stands in place of a rotary embedding that rope keys could extend, by model type.
NOT_EXTENDABLE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot"),
            *("blenderbot-small", "camembert", "data2vec-text", "electra", "ernie", "git", "gpt-sw3", "gpt2"),
            *("gpt_bigcode", "gpt_neo", "mbart", "megatron-bert", "mvp", "openai-gpt", "opt", "plbart", "prophetnet"),
            *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "trocr", "whisper", "xlm", "xlm-roberta"),
            *("xlm-roberta-xl", "xmod"),
        ),
        "learned positions",
    ),
    **dict.fromkeys(("ctrl", "marian", "musicgen", "musicgen_melody", "pegasus", "xglm"), "sinusoidal positions"),
    **dict.fromkeys(("bloom", "mpt"), "ALiBi"),
    **dict.fromkeys(
        ("cpmant", "inkling_text", "inkling2_text", "inkling2_loop_text", "xlnet"), "relative position biases"
    ),
    "reformer": "axial position embeddings",
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), "no attention and no position embedding"),
    **dict.fromkeys(("jamba", "kimi_linear", "nemotron_h", "zamba"), "no position embedding"),
    **dict.fromkeys(("codegen", "gptj", "roformer"), "rotary code of its own that reads no rope key"),
    "blt": "four rotary embeddings, each with a config of its own, which count bytes and patches",
    "recurrent_gemma": "a rotary embedding inside local attention only, and no window that could be extended",
}

# Stock code leaves head_dim open in these and fails with the rope types named, in one major or both: it is written.
NEEDS_HEAD_DIM: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("mixtral", "minimax"), frozenset({"yarn", "dynamic", "longrope"})),
    **dict.fromkeys(
        ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"}),
    ),
}

# Rope types that the stock code of a model type can be told of, where that is less than all, in the transformers that
# knows the fewest; and why.
_EVERY = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})
LIMITS: Mapping[str, tuple[frozenset[str], str]] = {
    **dict.fromkeys(
        ("phi3", "phi4_multimodal", "phimoe"),
        (frozenset({"default", "longrope"}), "stock code accepts longrope as its only scaling"),
    ),
    **dict.fromkeys(
        ("olmo", "olmo2"),
        (frozenset({"default", "linear", "dynamic"}), "transformers 4 accepts linear and dynamic alone"),
    ),
    "olmo3": (
        _EVERY - {"default"},
        "transformers 4 has one theta for its full and its sliding layers, which must stay",
    ),
    **dict.fromkeys(
        ("granite_swa", "granitemoe_swa"),
        (_EVERY - {"default"}, "the theta of each layer stands in layer_rope_theta, which a patch leaves alone"),
    ),
    **dict.fromkeys(
        ("hunyuan_v1_dense", "hunyuan_v1_moe"),
        (_EVERY - {"dynamic"}, "transformers 4 asks for an alpha in its dynamic scaling, another formula"),
    ),
    "nemotron": (frozenset({"default"}), "transformers 4 ignores every scaling of it"),
    "modernbert-decoder": (frozenset(), "transformers 4 has one table for its full and its sliding layers"),
    "llama4_text": (frozenset({"default", "llama3"}), "transformers 4 takes every scaling of it for llama3"),
}

# Types that transformers 4 gives a scaling in exactly two fields, type and factor; transformers 5 reads them too.
TWO_FIELD_SCALING = frozenset({"olmo", "olmo2"})

# Types whose code in transformers 4 fails on a rope_scaling of null: plain rope is spelt out.
SCALING_NEVER_NULL = frozenset({"mllama_text_model"})

# Types that transformers 4.57 gives longrope in exactly three fields (type, short_factor, long_factor), the original
# length beside them, and no other scaling. transformers 5.24 reads the same, and asks in its log for a factor.
THREE_FIELD_LONGROPE = frozenset({"phi3"})

# Types with theta per layer type that transformers 4 reads from flat keys: theta of the full layers is rope_theta,
# and their scaling rope_scaling. The value names the key of the sliding layers' theta, None where they have no own.
FLAT_BESIDE_NESTED: Mapping[str, str | None] = {
    "gemma3_text": "rope_local_base_freq",
    "gemma3n_text": "rope_local_base_freq",
    "olmo3": None,
}
