"""GPT-OSS, with the defaults of `models/gpt_oss` in transformers 5.24. Weights in MXFP4 are read as
bfloat16."""

from rungs.huggingface.attention_keys import LayerTypes, Rope
from rungs.huggingface.config_keys import Flag, HFConfig, SameValue, Values
from rungs.huggingface.families import llama
from rungs.huggingface.families.family import Family, Rule, as_is, linear

EXPERTS = f"{llama.LAYER}.mlp.experts"
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class Quantization:
    """`quantization_config`, which only says how weights are stored."""

    def read(self, hf_config: HFConfig) -> Values:
        found = hf_config.take("quantization_config")
        if found is not None and (
            not isinstance(found, dict) or found.get("quant_method") != "mxfp4"
        ):
            hf_config.reject("quantization_config", 'its quant_method must be "mxfp4"')
        return {}

    def write(self, _: object) -> Values:
        return {}


def _of_gate_and_up(part: str) -> tuple[str, str]:
    return f"blocks.feed_forward.gate.{part}", f"blocks.feed_forward.up.{part}"


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *llama.sizes(201_088, 2880, 2880, 36, 64, 8, 131_072, epsilon=1e-5, head_dim=64),
        Flag("attention_bias", ("qkv_bias", "attention_output_bias"), True),
        SameValue("num_local_experts", "n_experts", 128, newer_key="num_experts"),
        SameValue("num_experts_per_tok", "experts_per_token", 4),
        LayerTypes(default_window=128),
        Rope(150_000.0, YARN),
        Quantization(),
    ),
    llama.LLAMA_CONSTANTS
    | {"ffn_bias": True, "feed_forward": "swiglu_clamped", "attention_sinks": True}
    | {"expert_routing.router_bias": True},
    (
        *llama.WITHOUT_FEED_FORWARD,
        as_is(f"{llama.LAYER}.self_attn.sinks", "blocks.attention.sink"),
        *linear(f"{llama.LAYER}.mlp.router", "blocks.feed_forward.router"),
        Rule(f"{EXPERTS}.gate_up_proj", _of_gate_and_up("kernel"), interleaved=True),
        Rule(f"{EXPERTS}.gate_up_proj_bias", _of_gate_and_up("bias"), interleaved=True),
        as_is(f"{EXPERTS}.down_proj", "blocks.feed_forward.down.kernel"),
        as_is(f"{EXPERTS}.down_proj_bias", "blocks.feed_forward.down.bias"),
    ),
    supported_values={"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    unused_keys=("experts_per_token", "initial_context_length"),  # duplicates
)
