"""Llama and families with the same design: Mistral, Mixtral, Qwen 2, Qwen 3 with experts or
without, SmolLM3, OLMo 2 and 3. Defaults are those of `models/<model_type>` in transformers 5.24."""

from rungs.huggingface.attention_keys import (
    LayerTypes,
    Rope,
    SameRopes,
    SwitchedWindow,
    UnrotatedLayers,
    UpperWindows,
)
from rungs.huggingface.config_keys import Choice, Flag, Key, SameValue
from rungs.huggingface.families.family import Family, Rule, as_is, linear, norm

GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "gelu": "geglu",
}

LLAMA_CONSTANTS = {
    "positions": "rope",
    "norm": "rms_norm",
    "qkv_bias": False,
    "attention_output_bias": False,
    "ffn_bias": False,
}


def sizes(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    context_length: int,
    epsilon: float = 1e-6,
    tied: bool = False,
    head_dim: int | None = None,
    ffn_key: str = "intermediate_size",
) -> tuple[Key, ...]:
    """Return the keys shared by all families except GPT-2, with the given defaults. `ffn_key` is
    that of the feed-forward sub-layer's width."""
    return (
        SameValue("vocab_size", "vocab_size", vocab_size),
        SameValue("hidden_size", "emb_dim", hidden_size),
        SameValue(ffn_key, "ffn_dim", intermediate_size),
        SameValue("num_hidden_layers", "n_layers", layers),
        SameValue("num_attention_heads", "n_heads", heads),
        SameValue("num_key_value_heads", "n_kv_heads", kv_heads),
        SameValue("head_dim", "head_dim", head_dim),
        SameValue("max_position_embeddings", "context_length", context_length),
        SameValue("rms_norm_eps", "norm_epsilon", epsilon),
        Flag("tie_word_embeddings", ("tied_embeddings",), tied),
    )


ATTENTION_BIAS = Flag("attention_bias", ("qkv_bias", "attention_output_bias"), False)
ACTIVATION = Choice("hidden_act", "feed_forward", GATED, "silu")

LAYER = "model.layers.{layer}"
ENDS = (
    as_is("model.embed_tokens.weight", "token_embedding.embedding"),
    *norm("model.norm", "final_norm"),
    *linear("lm_head", "head"),
)
INPUT_NORM = norm(f"{LAYER}.input_layernorm", "blocks.attention_norm")
ATTENTION = (
    *linear(f"{LAYER}.self_attn.q_proj", "blocks.attention.query"),
    *linear(f"{LAYER}.self_attn.k_proj", "blocks.attention.key"),
    *linear(f"{LAYER}.self_attn.v_proj", "blocks.attention.value"),
    *linear(f"{LAYER}.self_attn.o_proj", "blocks.attention.output"),
    *norm(f"{LAYER}.self_attn.q_norm", "blocks.attention.query_norm"),
    *norm(f"{LAYER}.self_attn.k_norm", "blocks.attention.key_norm"),
)


def feed_forward(
    block: str, gate: str, up: str, down: str, module: str = "blocks.feed_forward"
) -> tuple[Rule, ...]:
    """Return the rules of a gated feed-forward sub-layer, or of one for each expert, whose three
    matrices have these names in `block`. `module` is ours."""
    return (
        *linear(f"{LAYER}.{block}.{gate}", f"{module}.gate"),
        *linear(f"{LAYER}.{block}.{up}", f"{module}.up"),
        *linear(f"{LAYER}.{block}.{down}", f"{module}.down"),
    )


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
FEED_FORWARD = feed_forward("mlp", *PROJECTIONS)
EXPERTS = (
    *linear(f"{LAYER}.block_sparse_moe.gate", "blocks.feed_forward.router"),
    *feed_forward("block_sparse_moe.experts.{expert}", "w1", "w3", "w2"),
)
QWEN_EXPERTS = (
    *linear(f"{LAYER}.mlp.gate", "blocks.feed_forward.router"),
    *feed_forward("mlp.experts.{expert}", *PROJECTIONS),
)
FEED_FORWARD_NORM = norm(f"{LAYER}.post_attention_layernorm", "blocks.feed_forward_norm")
OUTPUT_NORMS = (
    *norm(f"{LAYER}.post_attention_layernorm", "blocks.attention_output_norm"),
    *norm(f"{LAYER}.post_feedforward_layernorm", "blocks.feed_forward_output_norm"),
)
"""After a sub-layer, in Gemma and OLMo."""
WITHOUT_FEED_FORWARD = (*ENDS, *INPUT_NORM, *FEED_FORWARD_NORM, *ATTENTION)
LLAMA_TENSORS = (*WITHOUT_FEED_FORWARD, *FEED_FORWARD)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (
        *sizes(32_000, 4096, 11_008, 32, 32, None, 2048),
        ACTIVATION,
        ATTENTION_BIAS,
        Flag("mlp_bias", ("ffn_bias",), False),
        Rope(),
    ),
    LLAMA_CONSTANTS,
    LLAMA_TENSORS,
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    (
        *sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072),
        ACTIVATION,
        SameValue("sliding_window", "sliding_window", 4096),
        Rope(),
    ),
    LLAMA_CONSTANTS,
    LLAMA_TENSORS,
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (
        *sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072, epsilon=1e-5),
        ACTIVATION,
        SameValue("sliding_window", "sliding_window"),
        SameValue("num_local_experts", "n_experts", 8),
        SameValue("num_experts_per_tok", "experts_per_token", 2),
        Rope(1_000_000.0),
    ),
    LLAMA_CONSTANTS,
    (*WITHOUT_FEED_FORWARD, *EXPERTS),
)
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (*sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768), ACTIVATION, UpperWindows(), Rope()),
    LLAMA_CONSTANTS | {"qkv_bias": True},
    LLAMA_TENSORS,
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (
        *sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768, head_dim=128),
        ACTIVATION,
        ATTENTION_BIAS,
        UpperWindows(),
        Rope(),
    ),
    LLAMA_CONSTANTS | {"qk_norm": True},
    LLAMA_TENSORS,
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        *sizes(151_936, 2048, 768, 24, 32, 4, 32_768, ffn_key="moe_intermediate_size"),
        ACTIVATION,
        ATTENTION_BIAS,
        SwitchedWindow(),
        SameValue("num_experts", "n_experts", 128, newer_key="num_local_experts"),
        SameValue("num_experts_per_tok", "experts_per_token", 8),
        Flag("norm_topk_prob", ("normalize_expert_weights",), False),
        Rope(),
    ),
    LLAMA_CONSTANTS | {"qk_norm": True},
    (*WITHOUT_FEED_FORWARD, *QWEN_EXPERTS),
    supported_values={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},  # all have experts
    unused_keys=("intermediate_size", "max_window_layers"),  # of layers without; of Qwen 3
)
SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    (
        *sizes(128_256, 2048, 11_008, 36, 16, 4, 32_768, tied=True),
        ACTIVATION,
        ATTENTION_BIAS,
        Flag("mlp_bias", ("ffn_bias",), False),
        UnrotatedLayers(),
        Rope(2_000_000.0),
    ),
    LLAMA_CONSTANTS,
    LLAMA_TENSORS,
    unused_keys=("max_window_layers",),  # of Qwen
)
OLMO_CONSTANTS = LLAMA_CONSTANTS | {
    "norm_placement": "output",
    "qk_norm": True,
    "qk_norm_scope": "all_heads",
}
OLMO_TENSORS = (*ENDS, *ATTENTION, *FEED_FORWARD, *OUTPUT_NORMS)
OLMO_SIZES = sizes(50_304, 4096, 11_008, 32, 32, None, 2048, epsilon=1e-5)

OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    (*OLMO_SIZES, ACTIVATION, ATTENTION_BIAS, Rope()),
    OLMO_CONSTANTS,
    OLMO_TENSORS,
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    (
        *OLMO_SIZES,
        ACTIVATION,
        ATTENTION_BIAS,
        LayerTypes(period=4),
        SameRopes(500_000.0, 500_000.0),
    ),
    OLMO_CONSTANTS,
    OLMO_TENSORS,
)
