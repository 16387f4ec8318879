"""DeepSeek-V2 and V3, with the defaults of `models/deepseek_v2` and `models/deepseek_v3` in
transformers 5.23. Norms of latents have an epsilon of 1e-6 there, whatever rms_norm_eps says."""

from rungs.huggingface.config_keys import Flag, SameValue
from rungs.huggingface.deepseek_keys import Experts, Latent, MscaleRope
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
PREDICTION = (r"\.layers\.61\..*", "V3's module for multi-token prediction")
CONSTANTS = llama.LLAMA_CONSTANTS | {"norm_epsilon": 1e-6}


def _family(version: int, vocabulary: int, width: int, layers: int, heads: int) -> Family:
    is_v3 = version == 3
    return Family(
        f"deepseek_v{version}",
        f"DeepseekV{version}ForCausalLM",
        (
            SameValue("vocab_size", "vocab_size", vocabulary),
            SameValue("hidden_size", "emb_dim", width),
            SameValue("num_hidden_layers", "n_layers", layers),
            SameValue("num_attention_heads", "n_heads", heads),
            SameValue("max_position_embeddings", "context_length", 4096 if is_v3 else 2048),
            Flag("tie_word_embeddings", ("tied_embeddings",), False),
            llama.ACTIVATION,
            Latent(1536, has_interleave=is_v3),
            Experts(is_v3),
            MscaleRope(),
        ),
        CONSTANTS,
        TENSORS,
        buffers=(*ROTARY_BUFFERS, PREDICTION),
        supported_values={
            "rms_norm_eps": (1e-6,),
            "moe_layer_freq": (1,),
            "scoring_func": ("sigmoid" if is_v3 else "softmax",),
        },
        unused_keys=(
            *("aux_loss_alpha", "seq_aux", "ep_size"),
            *("num_nextn_predict_layers", "num_mtp_layers"),
        ),
    )


DEEPSEEK_V2 = _family(2, 102_400, 4096, 32, 32)
DEEPSEEK_V3 = _family(3, 129_280, 7168, 61, 128)
