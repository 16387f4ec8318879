"""OLMo 2 and 3, with the defaults of `models/<model_type>` in transformers 5.23."""

from rungs.huggingface.attention_keys import LayerTypes, Rope, SameRopes
from rungs.huggingface.families import llama
from rungs.huggingface.families.family import Family, norm

OLMO_CONSTANTS = llama.LLAMA_CONSTANTS | {
    "norm_placement": "output",
    "qk_norm": True,
    "qk_norm_scope": "all_heads",
}
OLMO_TENSORS = (
    *llama.ATTENTION,
    *norm(f"{llama.LAYER}.post_attention_layernorm", "blocks.attention_output_norm"),
    *norm(f"{llama.LAYER}.post_feedforward_layernorm", "blocks.feed_forward_output_norm"),
    *llama.FEED_FORWARD,
)
OLMO_SIZES = llama.sizes(50_304, 4096, 11_008, 32, 32, None, 2048, epsilon=1e-5)

OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    (*OLMO_SIZES, llama.ACTIVATION, llama.ATTENTION_BIAS, Rope()),
    OLMO_CONSTANTS,
    OLMO_TENSORS,
)
OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    (
        *OLMO_SIZES,
        llama.ACTIVATION,
        llama.ATTENTION_BIAS,
        LayerTypes(period=4),
        SameRopes(500_000.0, 500_000.0),
    ),
    OLMO_CONSTANTS,
    OLMO_TENSORS,
)
