"""Qwen3-Next, Qwen3.5 (the language model) and Olmo Hybrid: most layers have Gated DeltaNet. With
the defaults of `models/<model_type>` in transformers 5.24."""

from rungs.huggingface.config_keys import Choice, Flag, SameValue
from rungs.huggingface.families import llama
from rungs.huggingface.families.family import (
    ROTARY_BUFFERS,
    Family,
    Rule,
    as_is,
    linear,
    linear_by_head,
    norm,
)
from rungs.huggingface.hybrid_keys import DeltaLayers, OlmoDeltaLayers, PartialRope, RopeOrNone

LINEAR, OURS, MIXTURE = f"{llama.LAYER}.linear_attn", "blocks.delta_net", "blocks.feed_forward"
QUERY_KEY_VALUE = tuple(f"{OURS}.{name}" for name in ("query", "key", "value"))
FILTERS = tuple(f"{name}_filter" for name in QUERY_KEY_VALUE)
SILU = {"silu": "swiglu", "swish": "swiglu"}
ACTIVATION = Choice("hidden_act", "feed_forward", SILU, "silu")
"""In transformers it is also that of the convolution."""
DECAY = (
    as_is(f"{LINEAR}.A_log", f"{OURS}.log_rate"),
    as_is(f"{LINEAR}.dt_bias", f"{OURS}.step_bias"),
)
QWEN_TENSORS = (
    *llama.ENDS,
    *llama.INPUT_NORM,
    *llama.FEED_FORWARD_NORM,
    *linear_by_head(
        f"{llama.LAYER}.self_attn.q_proj", "blocks.attention.query", "blocks.attention.gate"
    ),
    *llama.ATTENTION[2:],  # but the query
    *DECAY,
    Rule(f"{LINEAR}.conv1d.weight", FILTERS, is_convolution=True),
    *norm(f"{LINEAR}.norm", f"{OURS}.norm"),
    *linear(f"{LINEAR}.out_proj", f"{OURS}.output"),
)
QWEN_CONSTANTS = llama.LLAMA_CONSTANTS | {
    **{"norm": "rms_norm_plus_one", "qk_norm": True, "attention_output_gate": "element"},
}
PREDICTION = (r"^mtp\..*", "a module for multi-token prediction")
QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    (
        *llama.sizes(
            *(151_936, 2048, 512, 48, 16, 2, 32_768), head_dim=256, ffn_key="moe_intermediate_size"
        ),
        ACTIVATION,
        llama.ATTENTION_BIAS,
        DeltaLayers(),
        SameValue("num_experts", "n_experts", 512, newer_key="num_local_experts"),
        SameValue("num_experts_per_tok", "experts_per_token", 10),
        SameValue("shared_expert_intermediate_size", "shared_ffn_dim", 512),
        Flag("norm_topk_prob", ("normalize_expert_weights",), True),
        PartialRope(),
    ),
    QWEN_CONSTANTS | {"shared_expert_gate": True},
    (
        *QWEN_TENSORS,
        *linear_by_head(f"{LINEAR}.in_proj_qkvz", *QUERY_KEY_VALUE, f"{OURS}.gate"),
        *linear_by_head(f"{LINEAR}.in_proj_ba", f"{OURS}.beta", f"{OURS}.step"),
        *llama.QWEN_EXPERTS,
        *llama.feed_forward("mlp.shared_expert", *llama.PROJECTIONS, module=f"{MIXTURE}.shared"),
        *linear(f"{llama.LAYER}.mlp.shared_expert_gate", f"{MIXTURE}.shared_gate"),
    ),
    buffers=(*ROTARY_BUFFERS, PREDICTION),
    supported_values={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},  # all have experts
    unused_keys=("intermediate_size",),  # of layers without
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    (
        *llama.sizes(248_320, 4096, 12_288, 32, 16, 4, 32_768, head_dim=256),
        ACTIVATION,
        llama.ATTENTION_BIAS,
        DeltaLayers(),
        PartialRope(),
    ),
    QWEN_CONSTANTS,
    (
        *QWEN_TENSORS,
        *linear(f"{LINEAR}.in_proj_qkv", *QUERY_KEY_VALUE),
        *linear(f"{LINEAR}.in_proj_z", f"{OURS}.gate"),
        *linear(f"{LINEAR}.in_proj_b", f"{OURS}.beta"),
        *linear(f"{LINEAR}.in_proj_a", f"{OURS}.step"),
        *llama.FEED_FORWARD,
    ),
    buffers=(*ROTARY_BUFFERS, PREDICTION),
    supported_values={"attn_output_gate": (True,), "mlp_only_layers": ([],)},
    unused_keys=("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"),
)
OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    (
        *llama.sizes(100_352, 3840, 11_008, 32, 30, None, 65_536),
        ACTIVATION,
        llama.ATTENTION_BIAS,
        OlmoDeltaLayers(),
        RopeOrNone(),
    ),
    llama.OLMO_CONSTANTS,
    (
        *llama.OLMO_TENSORS,
        *norm(f"{llama.LAYER}.attention_layer_norm", "blocks.attention_norm"),
        *norm(f"{llama.LAYER}.feedforward_layer_norm", "blocks.feed_forward_norm"),
        *(
            rule
            for letter, module in zip("qkv", QUERY_KEY_VALUE, strict=True)
            for rule in (
                *linear(f"{LINEAR}.{letter}_proj", module),
                Rule(
                    f"{LINEAR}.{letter}_conv1d.weight", (f"{module}_filter",), is_convolution=True
                ),
            )
        ),
        *linear(f"{LINEAR}.g_proj", f"{OURS}.gate"),
        *linear(f"{LINEAR}.b_proj", f"{OURS}.beta"),
        *linear(f"{LINEAR}.a_proj", f"{OURS}.step"),
        *DECAY,
        *norm(f"{LINEAR}.o_norm", f"{OURS}.norm"),
        *linear(f"{LINEAR}.o_proj", f"{OURS}.output"),
    ),
    unused_keys=(
        *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
        "linear_dt_init_floor",
    ),  # initial values
)
