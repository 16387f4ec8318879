"""Gemma 1, 2 and 3, with the defaults of `models/<model_type>` in transformers 5.24."""

from rungs.huggingface.attention_keys import LayerTypes, Rope, TwoRopes
from rungs.huggingface.config_keys import Choice, Key, SameValue
from rungs.huggingface.families import family, llama
from rungs.huggingface.families.family import norm

GEMMA_CONSTANTS = llama.LLAMA_CONSTANTS | {
    "norm": "rms_norm_plus_one",
    "embedding_scale": "sqrt_emb_dim",
}
GEMMA_ACTIVATION = Choice("hidden_activation", "feed_forward", llama.GATED, "gelu_pytorch_tanh")
HIDDEN_ACT = {"hidden_act": ("gelu_pytorch_tanh", "gelu")}
GEMMA2_TENSORS = (
    *llama.ENDS,
    *llama.INPUT_NORM,
    *norm(f"{llama.LAYER}.pre_feedforward_layernorm", "blocks.feed_forward_norm"),
    *llama.ATTENTION,
    *llama.FEED_FORWARD,
    *llama.OUTPUT_NORMS,
)


def score_keys(attention_cap: float | None, final_cap: float | None) -> tuple[Key, ...]:
    """Return the keys of attention scores and logits, with these soft caps as defaults."""
    return (
        SameValue("query_pre_attn_scalar", "query_pre_attn_scalar", 256, is_integer=True),
        SameValue("attn_logit_softcapping", "attention_soft_cap", attention_cap),
        SameValue("final_logit_softcapping", "final_soft_cap", final_cap),
    )


GEMMA = family.Family(
    "gemma",
    "GemmaForCausalLM",
    (
        *llama.sizes(256_000, 3072, 24_576, 28, 16, 16, 8192, tied=True, head_dim=256),
        Choice(
            "hidden_act",
            "feed_forward",
            {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh"},
            "gelu_pytorch_tanh",
        ),
        llama.ATTENTION_BIAS,
        Rope(),
    ),
    GEMMA_CONSTANTS,
    llama.LLAMA_TENSORS,
    supported_values={"hidden_activation": ("gelu_pytorch_tanh",)},
)
GEMMA2 = family.Family(
    "gemma2",
    "Gemma2ForCausalLM",
    (
        *llama.sizes(256_000, 2304, 9216, 26, 8, 4, 8192, tied=True, head_dim=256),
        GEMMA_ACTIVATION,
        llama.ATTENTION_BIAS,
        *score_keys(50.0, 30.0),
        LayerTypes(),
        Rope(),
    ),
    GEMMA_CONSTANTS | {"norm_placement": "around"},
    GEMMA2_TENSORS,
    supported_values=HIDDEN_ACT,
    unused_keys=("sliding_window_size",),  # a duplicate of sliding_window in the 9B and 27B
)
GEMMA3 = family.Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *llama.sizes(262_208, 2304, 9216, 26, 8, 4, 131_072, tied=True, head_dim=256),
        GEMMA_ACTIVATION,
        llama.ATTENTION_BIAS,
        *score_keys(None, None),
        LayerTypes(period=6, period_key="sliding_window_pattern"),
        TwoRopes(1_000_000.0, 10_000.0),
    ),
    GEMMA_CONSTANTS | {"norm_placement": "around", "qk_norm": True},
    GEMMA2_TENSORS,
    supported_values=HIDDEN_ACT,
    unused_keys=("_sliding_window_pattern",),
)
