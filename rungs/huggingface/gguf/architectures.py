"""llama.cpp's architectures, each a family whose `config.json` is the metadata of a GGUF file,
without the architecture's name before the keys. Metadata has no key for what is constant in an
architecture; llama.cpp's `src/models/<architecture>.cpp` has it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rungs.config.model_config import ModelConfig
from rungs.huggingface.config_keys import HFConfig, Key, SameValue
from rungs.huggingface.families.family import Family, Rule, as_is, linear, norm
from rungs.huggingface.families.gemma import GEMMA_CONSTANTS
from rungs.huggingface.families.gpt2 import GPT2, QUERY_KEY_VALUE
from rungs.huggingface.families.llama import LLAMA_CONSTANTS
from rungs.huggingface.families.olmo import OLMO_CONSTANTS
from rungs.huggingface.gguf.metadata_keys import (
    AttentionScale,
    HasTensor,
    HeadWidth,
    Rope,
    SameBase,
    SlidingLayers,
)

PART = "/"
"""Stands between a tensor's name and the number of its part, such as an expert."""


@dataclass(frozen=True)
class Architecture(Family):
    """One of llama.cpp's architectures."""

    prefix: str = ""
    buffers: tuple[tuple[str, str], ...] = ()
    interleaves: bool = False
    """Whether both halves of a head's queries and keys, which rotate together, take turns."""

    def to_hf_config(self, model: ModelConfig) -> dict[str, Any]:
        """Translate `model.json` to metadata, without keys that are not given."""
        keys = super().to_hf_config(model)
        return {key: value for key, value in keys.items() if value is not None}

    @property
    def beside_metadata(self) -> set[str]:
        """The keys of `to_hf_config` that are not in a file's metadata."""
        tensors = {key.tensor for key in self.keys if isinstance(key, HasTensor)}
        return tensors | {"architectures", "model_type"}

    def stored(self, name: str, tensor: np.ndarray, model: ModelConfig) -> np.ndarray:
        """Return a tensor in float32 as llama.cpp has it."""
        if heads := self._interleaved_heads(name, model):
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            return halves.swapaxes(1, 2).reshape(tensor.shape)
        return tensor + 1 if self._adds_one(name) else tensor

    def loaded(self, name: str, tensor: np.ndarray, model: ModelConfig) -> np.ndarray:
        """Return one of llama.cpp's tensors in float32 as Rungs has it."""
        if heads := self._interleaved_heads(name, model):
            pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
            return pairs.swapaxes(1, 2).reshape(tensor.shape)
        return tensor - 1 if self._adds_one(name) else tensor

    def _interleaved_heads(self, name: str, model: ModelConfig) -> int | None:
        heads = {".attn_q.": model.n_heads, ".attn_k.": model.n_kv_heads or model.n_heads}
        found = (count for part, count in heads.items() if part in name)
        return next(found, None) if self.interleaves else None

    def _adds_one(self, name: str) -> bool:
        return self.constants["norm"] == "rms_norm_plus_one" and name.endswith("norm.weight")


SIZES: tuple[Key, ...] = (
    SameValue("vocab_size", "vocab_size"),
    SameValue("context_length", "context_length"),
    SameValue("embedding_length", "emb_dim"),
    SameValue("block_count", "n_layers"),
    SameValue("feed_forward_length", "ffn_dim"),
    SameValue("attention.head_count", "n_heads"),
    SameValue("attention.head_count_kv", "n_kv_heads"),
)
RMS_EPSILON = SameValue("attention.layer_norm_rms_epsilon", "norm_epsilon")
HEAD_IS_TIED = HasTensor("output.weight", "tied_embeddings", if_there=False)
BIASES = (
    HasTensor("blk.0.attn_q.bias", "qkv_bias"),
    HasTensor("blk.0.attn_output.bias", "attention_output_bias"),
    HasTensor("blk.0.ffn_up.bias", "ffn_bias"),
)
EXPERT_COUNT = SameValue("expert_count", "n_experts")
EXPERT_KEYS = (EXPERT_COUNT, SameValue("expert_used_count", "experts_per_token"))

LAYER = "blk.{layer}"
ENDS = (
    as_is("token_embd.weight", "token_embedding.embedding"),
    *norm("output_norm", "final_norm"),
    *linear("output", "head"),
)
INPUT_NORMS = (
    *norm(f"{LAYER}.attn_norm", "blocks.attention_norm"),
    *norm(f"{LAYER}.ffn_norm", "blocks.feed_forward_norm"),
)
ATTENTION = (
    *linear(f"{LAYER}.attn_q", "blocks.attention.query"),
    *linear(f"{LAYER}.attn_k", "blocks.attention.key"),
    *linear(f"{LAYER}.attn_v", "blocks.attention.value"),
    *linear(f"{LAYER}.attn_output", "blocks.attention.output"),
    *norm(f"{LAYER}.attn_q_norm", "blocks.attention.query_norm"),
    *norm(f"{LAYER}.attn_k_norm", "blocks.attention.key_norm"),
)
UP_AND_DOWN = (
    *linear(f"{LAYER}.ffn_up", "blocks.feed_forward.up"),
    *linear(f"{LAYER}.ffn_down", "blocks.feed_forward.down"),
)
FEED_FORWARD = (*linear(f"{LAYER}.ffn_gate", "blocks.feed_forward.gate"), *UP_AND_DOWN)
EXPERTS = (
    *linear(f"{LAYER}.ffn_gate_inp", "blocks.feed_forward.router"),
    *(
        Rule(
            f"{LAYER}.ffn_{name}_exps.weight{PART}{{expert}}",
            (f"blocks.feed_forward.{name}.kernel",),
            transposed=True,
        )
        for name in ("gate", "up", "down")
    ),
)
OUTPUT_NORMS = (
    *norm(f"{LAYER}.post_attention_norm", "blocks.attention_output_norm"),
    *norm(f"{LAYER}.post_ffw_norm", "blocks.feed_forward_output_norm"),
)
LLAMA_TENSORS = (*ENDS, *INPUT_NORMS, *ATTENTION, *FEED_FORWARD)
EXPERT_TENSORS = (*ENDS, *INPUT_NORMS, *ATTENTION, *EXPERTS)
GEMMA2_TENSORS = (*LLAMA_TENSORS, *OUTPUT_NORMS)

SWIGLU = {"feed_forward": "swiglu"}
GEMMA = GEMMA_CONSTANTS | {"feed_forward": "geglu_tanh"}
AROUND = {"norm_placement": "around"}
RMS_KEYS = (*SIZES, RMS_EPSILON, HeadWidth())
LLAMA_KEYS = (*RMS_KEYS, HEAD_IS_TIED, *BIASES, Rope(divides=True))
ARCHITECTURES = (
    Architecture(
        "llama",
        "llama",
        LLAMA_KEYS,
        LLAMA_CONSTANTS | SWIGLU,
        LLAMA_TENSORS,
        interleaves=True,
        unused_keys=("expert_count", "expert_used_count"),  # 0
    ),
    Architecture(
        "llama",
        "llama",
        (*LLAMA_KEYS, *EXPERT_KEYS),
        LLAMA_CONSTANTS | SWIGLU,
        EXPERT_TENSORS,
        interleaves=True,
    ),
    Architecture(
        "qwen2",
        "qwen2",
        (*SIZES, RMS_EPSILON, HeadWidth(is_square=True), HEAD_IS_TIED, Rope()),
        LLAMA_CONSTANTS | SWIGLU | {"qkv_bias": True},
        LLAMA_TENSORS,
    ),
    Architecture(
        "qwen3",
        "qwen3",
        (*RMS_KEYS, HEAD_IS_TIED, Rope()),
        LLAMA_CONSTANTS | SWIGLU | {"qk_norm": True},
        LLAMA_TENSORS,
    ),
    Architecture(
        "qwen3moe",
        "qwen3moe",
        (
            *RMS_KEYS,
            *EXPERT_KEYS,
            SameValue("expert_feed_forward_length", "ffn_dim"),
            HEAD_IS_TIED,
            Rope(),
        ),
        LLAMA_CONSTANTS | SWIGLU | {"qk_norm": True},
        EXPERT_TENSORS,
    ),
    Architecture(
        "olmo2",
        "olmo2",
        (
            *SIZES,
            RMS_EPSILON,
            HeadWidth(is_square=True),
            SlidingLayers(period=4),
            Rope(yarn=True),
            SameBase(),
        ),
        OLMO_CONSTANTS | SWIGLU,
        (*ENDS, *ATTENTION, *FEED_FORWARD, *OUTPUT_NORMS),
    ),
    Architecture(
        "smollm3",
        "smollm3",
        (*RMS_KEYS, HEAD_IS_TIED, Rope()),
        LLAMA_CONSTANTS | SWIGLU | {"layer_pattern": ["global", "global", "global", "nope"]},
        LLAMA_TENSORS,
        interleaves=True,
    ),
    Architecture(
        "gemma", "gemma", (*RMS_KEYS, Rope()), GEMMA | {"tied_embeddings": True}, LLAMA_TENSORS
    ),
    Architecture(
        "gemma2",
        "gemma2",
        (
            *RMS_KEYS,
            AttentionScale(largest=46),
            SlidingLayers(period=2, default_window=4096),
            SameValue("attn_logit_softcapping", "attention_soft_cap", 50.0),
            SameValue("final_logit_softcapping", "final_soft_cap", 30.0),
            Rope(),
        ),
        GEMMA | AROUND | {"tied_embeddings": True},
        GEMMA2_TENSORS,
    ),
    Architecture(
        "gemma3",
        "gemma3",
        (
            *RMS_KEYS,
            HEAD_IS_TIED,
            AttentionScale(largest=62),
            SlidingLayers(period=6),
            SameValue("final_logit_softcapping", "final_soft_cap"),
            Rope(),
            SameValue("rope.freq_base_swa", "sliding_rope_theta", 10_000.0),
        ),
        GEMMA | AROUND | {"qk_norm": True},
        GEMMA2_TENSORS,
    ),
    Architecture(
        "gpt2",
        "gpt2",
        (
            *SIZES,
            SameValue("attention.layer_norm_epsilon", "norm_epsilon"),
            HeadWidth(is_square=True),
            HEAD_IS_TIED,
        ),
        GPT2.constants | {"feed_forward": "gelu_tanh"},
        (
            *ENDS,
            as_is("position_embd.weight", "position_embedding.embedding"),
            *INPUT_NORMS,
            *linear(f"{LAYER}.attn_qkv", *QUERY_KEY_VALUE),
            *linear(f"{LAYER}.attn_output", "blocks.attention.output"),
            *UP_AND_DOWN,
        ),
    ),
)


def architecture_of(metadata: HFConfig) -> Architecture | None:
    """Return the architecture of a file, None if it is not supported."""
    has_experts = bool(metadata.values.get(EXPERT_COUNT.hf_key))
    found = (one for one in ARCHITECTURES if one.model_type == metadata.model_type)
    return next((one for one in found if (EXPERT_COUNT in one.keys) == has_experts), None)
