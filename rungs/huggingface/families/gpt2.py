"""GPT-2, from 124M to 1.5B parameters, with the defaults of `models/gpt2` in transformers 5.24."""

from rungs.huggingface.config_keys import Choice, Flag, SameValue
from rungs.huggingface.families.family import Family, Rule, as_is, linear, norm

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu2": "relu_squared",
}
GPT2_LAYER = "transformer.h.{layer}"


def conv1d(hf_name: str, *modules: str) -> tuple[Rule, Rule]:
    """Return the rules of a GPT-2 `Conv1D`: its weight is (inputs, outputs), as in Rungs."""
    weight = as_is(f"{hf_name}.weight", *(f"{module}.kernel" for module in modules))
    return weight, as_is(f"{hf_name}.bias", *(f"{module}.bias" for module in modules))


QUERY_KEY_VALUE = ("blocks.attention.query", "blocks.attention.key", "blocks.attention.value")
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    (
        SameValue("vocab_size", "vocab_size", 50_257),
        SameValue("n_positions", "context_length", 1024),
        SameValue("n_embd", "emb_dim", 768),
        SameValue("n_layer", "n_layers", 12),
        SameValue("n_head", "n_heads", 12),
        SameValue("n_inner", "ffn_dim"),
        Choice("activation_function", "feed_forward", ACTIVATIONS, "gelu_new"),
        SameValue("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Flag("tie_word_embeddings", ("tied_embeddings",), True),
    ),
    {
        "positions": "learned",
        "norm": "layer_norm",
        "qkv_bias": True,
        "attention_output_bias": True,
        "ffn_bias": True,
    },
    (
        as_is("transformer.wte.weight", "token_embedding.embedding"),
        *norm("transformer.ln_f", "final_norm"),
        *linear("lm_head", "head"),
        as_is("transformer.wpe.weight", "position_embedding.embedding"),
        *norm(f"{GPT2_LAYER}.ln_1", "blocks.attention_norm"),
        *norm(f"{GPT2_LAYER}.ln_2", "blocks.feed_forward_norm"),
        *conv1d(f"{GPT2_LAYER}.attn.c_attn", *QUERY_KEY_VALUE),
        *conv1d(f"{GPT2_LAYER}.attn.c_proj", "blocks.attention.output"),
        *conv1d(f"{GPT2_LAYER}.mlp.c_fc", "blocks.feed_forward.up"),
        *conv1d(f"{GPT2_LAYER}.mlp.c_proj", "blocks.feed_forward.down"),
    ),
    prefix="transformer.",
    buffers=((r"\.attn\.(masked_)?bias", "causal masks, which Rungs computes"),),
    supported_values={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
    },
    unused_keys=("n_ctx", "n_special", "output_past", "predict_special_tokens"),
)
