"""DeepSeek-V2 and V3, with the defaults of `models/deepseek_v2` and `models/deepseek_v3` in
transformers 5.24. Norms of latents have an epsilon of 1e-6 there, whatever rms_norm_eps says."""

from typing import Any

from rungs.huggingface.config_keys import Choice, Flag, Key, SameValue
from rungs.huggingface.deepseek_keys import EXPERT_SIZE, Groups, MscaleRope, SharedExperts
from rungs.huggingface.families import llama
from rungs.huggingface.families.family import ROTARY_BUFFERS, Family, as_is, linear, norm

SELF, MLP = f"{llama.LAYER}.self_attn", f"{llama.LAYER}.mlp"
ATTENTION, EXPERTS = "blocks.attention", "blocks.feed_forward"
TENSORS = (
    *llama.ENDS,
    *llama.INPUT_NORM,
    *llama.FEED_FORWARD_NORM,
    *linear(f"{SELF}.q_proj", f"{ATTENTION}.query"),
    *linear(f"{SELF}.q_a_proj", f"{ATTENTION}.query_latent.down"),
    *norm(f"{SELF}.q_a_layernorm", f"{ATTENTION}.query_latent.norm"),
    *linear(f"{SELF}.q_b_proj", f"{ATTENTION}.query_latent.up"),
    *linear(f"{SELF}.kv_a_proj_with_mqa", f"{ATTENTION}.latent.down", f"{ATTENTION}.shared_key"),
    *norm(f"{SELF}.kv_a_layernorm", f"{ATTENTION}.latent.norm"),
    *linear(f"{SELF}.kv_b_proj", f"{ATTENTION}.latent.up"),
    *linear(f"{SELF}.o_proj", f"{ATTENTION}.output"),
    *linear(f"{MLP}.gate", f"{EXPERTS}.router"),
    as_is(f"{MLP}.gate.e_score_correction_bias", f"{EXPERTS}.router.balance_bias"),
    *llama.feed_forward("mlp.experts.{expert}", *llama.PROJECTIONS),
    *llama.feed_forward("mlp.shared_experts", *llama.PROJECTIONS, module=f"{EXPERTS}.shared"),
    *llama.feed_forward("mlp", *llama.PROJECTIONS, module="blocks.dense_feed_forward"),
)
SIZES = (  # in config.json, in model.json, default of V2, default of V3
    ("vocab_size", "vocab_size", 102_400, 129_280),
    ("hidden_size", "emb_dim", 4096, 7168),
    ("num_hidden_layers", "n_layers", 32, 61),
    ("num_attention_heads", "n_heads", 32, 128),
    ("num_key_value_heads", "n_kv_heads", None, None),
    ("qk_nope_head_dim", "head_dim", 128, 128),
    ("kv_lora_rank", "latent_attention.kv_rank", 512, 512),
    ("q_lora_rank", "latent_attention.query_rank", 1536, 1536),
    ("qk_rope_head_dim", "latent_attention.rope_dim", 64, 64),
    ("v_head_dim", "latent_attention.value_dim", 128, 128),
    ("max_position_embeddings", "context_length", 2048, 4096),
    ("intermediate_size", "dense_ffn_dim", 11_008, 18_432),
    ("first_k_dense_replace", "n_dense_layers", 0, 3),
    (EXPERT_SIZE, "ffn_dim", 1407, 2048),
    ("n_routed_experts", "n_experts", 64, 256),
    ("num_experts_per_tok", "experts_per_token", None, 8),
    ("routed_scaling_factor", "expert_routing.weight_factor", 1.0, 2.5),
)


def _family(version: int, scores: str, *keys: Key, **constants: Any) -> Family:
    sizes = (SameValue(name, own, of[version - 2]) for name, own, *of in SIZES)
    tied = Flag("tie_word_embeddings", ("tied_embeddings",), False)
    return Family(
        f"deepseek_v{version}",
        f"DeepseekV{version}ForCausalLM",
        (*sizes, tied, llama.ACTIVATION, MscaleRope(), *keys),
        llama.LLAMA_CONSTANTS | {"norm_epsilon": 1e-6, "expert_routing.scores": scores} | constants,
        TENSORS,
        buffers=(*ROTARY_BUFFERS, (r"\.layers\.61\..*", "V3's module for multi-token prediction")),
        supported_values={
            **{"rms_norm_eps": (1e-6,), "moe_layer_freq": (1,), "scoring_func": (scores,)},
            "norm_topk_prob": (False,),
        },
        unused_keys=(
            *("head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size"),
            *("num_mtp_layers", "num_nextn_predict_layers", "auto_map"),
        ),
    )


PAIRS = {True: "neighbors", False: "halves"}
DEEPSEEK_V2 = _family(
    2,
    "softmax",
    SharedExperts(2),
    Groups(("greedy", "group_limited_greedy")),
    normalize_expert_weights=False,
    **{"latent_attention.rope_pairs": "neighbors"},
)
DEEPSEEK_V3 = _family(
    3,
    "sigmoid",
    SharedExperts(1),
    Groups(("noaux_tc",), 8, 4),
    Flag("norm_topk_prob", ("normalize_expert_weights",), True),
    Choice("rope_interleave", "latent_attention.rope_pairs", PAIRS, True),
    **{"expert_routing.balance_bias": True},
)
