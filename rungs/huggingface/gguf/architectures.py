"""llama.cpp's architectures, each a family whose `config.json` is the metadata of a GGUF file,
without the architecture's name before the keys. Tensors are those of a family of transformers, by
`gguf`'s table of names. Metadata has no key for what is constant in an architecture; llama.cpp's
`src/models/<architecture>.cpp` has it. A key in the place of a tensor's name says something about
that tensor: that the file has it, or what it holds."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from rungs.config.model_config import MOST_LAYERS, ModelConfig, RopeScaling
from rungs.huggingface.attention_keys import periodic, shortest_period, yarn_attention_factor
from rungs.huggingface.config_keys import HFConfig, Key, SameValue, Values
from rungs.huggingface.families import gemma, llama
from rungs.huggingface.families.family import Family, Rule
from rungs.huggingface.families.gpt2 import GPT2
from rungs.model.positions import scale_frequencies

PART = "/"
"""Stands between a tensor's name and the number of its part, such as an expert."""
WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
FREQUENCIES = "rope_freqs.weight"
"""By what each rotary frequency is divided."""
_SCALING = "rope.scaling."
_LLAMA3 = "rope.llama3"
"""Rungs' own key: the numbers from which `FREQUENCIES` were computed."""
_LLAMA3_DEFAULTS = (1.0, 4.0, 8192)
"""Those of Llama 3.1 to 3.3, without the factor."""
_LLAMA3_KEYS = ("low_frequency_factor", "high_frequency_factor", "original_context_length")


@dataclass(frozen=True)
class HasTensor:
    """Whether the file has a tensor."""

    tensor: str
    key: str
    if_there: bool = True
    """Value of `key` if the tensor is there."""

    def read(self, metadata: HFConfig) -> Values:
        return {self.key: (metadata.take(self.tensor) is not None) == self.if_there}

    def write(self, model: ModelConfig) -> Values:
        return {self.tensor: True if getattr(model, self.key) == self.if_there else None}


@dataclass(frozen=True)
class HeadWidth:
    """The width of attention heads; `is_square` if it must be emb_dim ÷ n_heads."""

    is_square: bool = False

    def read(self, metadata: HFConfig) -> Values:
        widths = [width for key in WIDTHS if (width := metadata.take(key)) is not None]
        if any(width != widths[0] for width in widths):
            metadata.reject(WIDTHS[0], f"{', '.join(WIDTHS)} must be equal")
        return {"head_dim": next(iter(widths), None)}

    def write(self, model: ModelConfig) -> Values:
        return {} if self.is_square else dict.fromkeys(WIDTHS, model.head_width)


@dataclass(frozen=True)
class AttentionScale:
    """llama.cpp divides scores by √head_dim, and in the largest model by √(emb_dim ÷ n_heads)."""

    largest: int
    """Number of layers of the largest model."""

    def read(self, metadata: HFConfig) -> Values:
        width, heads = (metadata.taken[key] for key in ("embedding_length", "attention.head_count"))
        are_given = isinstance(width, int) and isinstance(heads, int) and heads > 0
        is_largest = are_given and metadata.taken["block_count"] == self.largest
        return {"query_pre_attn_scalar": float(width // heads) if is_largest else None}

    def write(self, _: ModelConfig, /) -> Values:
        return {}


@dataclass(frozen=True)
class SlidingLayers:
    """A sliding window in all layers but the last of each period."""

    period: int
    default_window: int | None = None

    def read(self, metadata: HFConfig) -> Values:
        window = metadata.take("attention.sliding_window", self.default_window)
        pattern = metadata.take("attention.sliding_window_pattern", self.period)
        layers = metadata.taken["block_count"]
        if not window or not isinstance(layers, int) or not 0 < layers <= MOST_LAYERS:
            return {}
        if isinstance(pattern, int) and pattern > 0:
            pattern = periodic(pattern, layers)
        if not isinstance(pattern, list) or len(pattern) != layers:
            allowed = "must be a period, or true or false for each layer"
            metadata.reject("attention.sliding_window_pattern", allowed)
            return {}
        kinds = ["sliding" if is_sliding else "global" for is_sliding in pattern]
        return {"sliding_window": window, "layer_pattern": shortest_period(kinds)}

    def write(self, model: ModelConfig) -> Values:
        pattern = [kind == "sliding" for kind in model.layer_kinds()]
        if not any(pattern):
            return {}
        is_default = pattern == periodic(self.period, model.n_layers)
        return {
            "attention.sliding_window": model.sliding_window,
            "attention.sliding_window_pattern": None if is_default else pattern,
        }


@dataclass(frozen=True)
class Rope:
    """Rotary positions; `divides` if llama.cpp divides the architecture's frequencies one by one,
    as Llama 3 needs it, `yarn` if it scales them by YaRN, in layers without a window alone, whose
    base must be that of the others."""

    divides: bool = False
    yarn: bool = False

    def read(self, metadata: HFConfig) -> Values:
        theta = metadata.take("rope.freq_base", 10_000.0)
        kind = metadata.take(f"{_SCALING}type", "linear")
        factor = metadata.take(f"{_SCALING}factor")
        length = metadata.take(
            f"{_SCALING}original_context_length", metadata.taken["context_length"]
        )
        metadata.ignore((f"{_SCALING}finetuned",))
        if kind not in self._kinds():
            metadata.reject(f"{_SCALING}type", f"must be {' or '.join(self._kinds())}")
        values = {"rope_theta": theta, "rope_scaling": None}
        if self.yarn:
            if metadata.take("rope.freq_base_swa", theta) != theta:
                metadata.reject("rope.freq_base_swa", "must be rope.freq_base")
            values["sliding_rope_theta"] = theta
        if self.divides and metadata.take(FREQUENCIES) is not None:
            values["rope_scaling"] = _read_llama3(metadata, theta)
        elif kind == "yarn" and self.yarn:
            values["rope_scaling"] = _read_yarn(metadata, factor, length)
        elif kind == "linear" and factor not in (None, 0, 1):
            values["rope_scaling"] = {"type": "linear", "factor": factor}
        return values

    def write(self, model: ModelConfig) -> Values:
        values: Values = {"rope.freq_base": model.rope_theta}
        scaling = model.rope_scaling
        if scaling and scaling.type in self._kinds():
            for key in ("type", "factor", "original_context_length"):
                values[_SCALING + key] = getattr(scaling, key)
        elif scaling and scaling.type == "llama3" and self.divides:
            divisors = _divisors(scaling, model.rope_theta, model.head_width)
            values[_LLAMA3] = [float(getattr(scaling, key)) for key in ("factor", *_LLAMA3_KEYS)]
            values[FREQUENCIES] = divisors.tolist()
        return values

    def _kinds(self) -> tuple[str, ...]:
        return ("none", "linear", "yarn") if self.yarn else ("none", "linear")


def _read_yarn(metadata: HFConfig, factor: Any, length: Any) -> Values:
    """Return YaRN as in the paper, which is what llama.cpp computes whatever these keys say."""
    attention_factor = yarn_attention_factor(factor)
    for key, value in {"attn_factor": attention_factor, "beta_fast": 32, "beta_slow": 1}.items():
        given = metadata.take(f"{_SCALING}yarn_{key}", value)
        if not isinstance(given, int | float) or not math.isclose(given, value, rel_tol=1e-6):
            metadata.reject(f"{_SCALING}yarn_{key}", f"must be {value:g}")
    return {
        "type": "yarn",
        "factor": factor,
        "low_frequency_factor": 1.0,
        "high_frequency_factor": 32.0,
        "original_context_length": length,
        "attention_factor": attention_factor,
    }


def _read_llama3(metadata: HFConfig, theta: float) -> Values | None:
    """Return Llama 3's scaling if it gives the frequencies in the file."""
    found = metadata.taken[FREQUENCIES]
    numbers = metadata.take(_LLAMA3, [max(found, default=0), *_LLAMA3_DEFAULTS])
    try:
        factor, low, high, length = numbers
        scaling = dict(zip(_LLAMA3_KEYS, (low, high, int(length)), strict=True))
        scaling |= {"type": "llama3", "factor": factor}
        divisors = _divisors(RopeScaling.model_validate(scaling), theta, 2 * len(found))
        if np.allclose(divisors, found, rtol=1e-4):
            return scaling
    except (TypeError, ValueError, ArithmeticError):
        pass
    metadata.reject(FREQUENCIES, "must be those of Llama 3")
    return None


def _divisors(scaling: RopeScaling, theta: float, head_width: int) -> np.ndarray:
    frequencies = theta ** -(np.arange(0, head_width, 2) / head_width)
    return frequencies / scale_frequencies(frequencies, scaling, theta)


@dataclass(frozen=True)
class Architecture(Family):
    """One of llama.cpp's architectures."""

    interleaves: bool = False
    """Whether both halves of a head's queries and keys, which rotate together, take turns."""

    def to_hf_config(self, model: ModelConfig) -> dict[str, Any]:
        """Translate `model.json` to metadata, without keys that are not given."""
        keys = super().to_hf_config(model)
        return {key: value for key, value in keys.items() if value is not None}

    def convert(
        self, name: str, tensor: np.ndarray, model: ModelConfig, *, loads: bool
    ) -> np.ndarray:
        """Return a tensor in float32 as llama.cpp has it or, if `loads`, one of its tensors as
        Rungs has it."""
        heads = {".attn_q.": model.n_heads, ".attn_k.": model.n_kv_heads or model.n_heads}
        count = next((heads[part] for part in heads if part in name), None)
        if self.interleaves and count:
            pairs = (-1, 2) if loads else (2, -1)
            split = tensor.reshape(count, *pairs, *tensor.shape[1:])
            return split.swapaxes(1, 2).reshape(tensor.shape)
        if self.constants["norm"] == "rms_norm_plus_one" and name.endswith("norm.weight"):
            return tensor - 1 if loads else tensor + 1
        return tensor


def _architecture(
    name: str, family: Family, keys: tuple[Key, ...], constants: Values, **options: Any
) -> Architecture:
    """Return the architecture that runs models of a family, with further constants."""
    arch = next(arch for arch, known in MODEL_ARCH_NAMES.items() if known == name)
    table = get_tensor_name_map(arch, 1)
    rules = []
    for rule in family.tensors:
        plain = rule.hf_name.replace(".{expert}", "").replace("{layer}", "0")
        if found := table.get_name(plain, try_suffixes=(".weight", ".bias")):
            part = f"{PART}{{expert}}" if "{expert}" in rule.hf_name else ""
            is_matrix = rule.parameters[0].endswith("kernel")  # also in GPT-2, outputs come first
            stored = found.replace("blk.0.", "blk.{layer}.") + part
            rules.append(Rule(stored, rule.parameters, transposed=is_matrix))
    return Architecture(
        name, name, keys, family.constants | constants, tuple(rules), "", (), **options
    )


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
RMS_KEYS = (*SIZES, RMS_EPSILON, HeadWidth())
LLAMA_KEYS = (
    *RMS_KEYS,
    HEAD_IS_TIED,
    HasTensor("blk.0.attn_q.bias", "qkv_bias"),
    HasTensor("blk.0.attn_output.bias", "attention_output_bias"),
    HasTensor("blk.0.ffn_up.bias", "ffn_bias"),
    Rope(divides=True),
)
EXPERT_COUNT = SameValue("expert_count", "n_experts")
EXPERT_KEYS = (EXPERT_COUNT, SameValue("expert_used_count", "experts_per_token"))
SWIGLU = {"feed_forward": "swiglu"}
GEGLU = {"feed_forward": "geglu_tanh"}
TIED = GEGLU | {"tied_embeddings": True}
NOPE = {"layer_pattern": ["global", "global", "global", "nope"]}

NO_EXPERTS = ("expert_count", "expert_used_count")
"""Keys that may be 0."""

ARCHITECTURES = (
    _architecture(
        "llama", llama.LLAMA, LLAMA_KEYS, SWIGLU, interleaves=True, unused_keys=NO_EXPERTS
    ),
    _architecture("llama", llama.MIXTRAL, (*LLAMA_KEYS, *EXPERT_KEYS), SWIGLU, interleaves=True),
    _architecture(
        "qwen2",
        llama.QWEN2,
        (*SIZES, RMS_EPSILON, HeadWidth(is_square=True), HEAD_IS_TIED, Rope()),
        SWIGLU,
    ),
    _architecture("qwen3", llama.QWEN3, (*RMS_KEYS, HEAD_IS_TIED, Rope()), SWIGLU),
    _architecture(
        "qwen3moe",
        llama.QWEN3_MOE,
        (
            *RMS_KEYS,
            *EXPERT_KEYS,
            SameValue("expert_feed_forward_length", "ffn_dim"),
            HEAD_IS_TIED,
            Rope(),
        ),
        SWIGLU,
    ),
    _architecture(
        "olmo2",
        llama.OLMO2,
        (*SIZES, RMS_EPSILON, HeadWidth(is_square=True), SlidingLayers(period=4), Rope(yarn=True)),
        SWIGLU,
    ),
    _architecture(
        "smollm3", llama.SMOLLM3, (*RMS_KEYS, HEAD_IS_TIED, Rope()), SWIGLU | NOPE, interleaves=True
    ),
    _architecture("gemma", gemma.GEMMA, (*RMS_KEYS, Rope()), TIED),
    _architecture(
        "gemma2",
        gemma.GEMMA2,
        (
            *RMS_KEYS,
            AttentionScale(largest=46),
            SlidingLayers(period=2, default_window=4096),
            SameValue("attn_logit_softcapping", "attention_soft_cap", 50.0),
            SameValue("final_logit_softcapping", "final_soft_cap", 30.0),
            Rope(),
        ),
        TIED,
    ),
    _architecture(
        "gemma3",
        gemma.GEMMA3,
        (
            *RMS_KEYS,
            HEAD_IS_TIED,
            AttentionScale(largest=62),
            SlidingLayers(period=6),
            SameValue("final_logit_softcapping", "final_soft_cap"),
            Rope(),
            SameValue("rope.freq_base_swa", "sliding_rope_theta", 10_000.0),
        ),
        GEGLU,
    ),
    _architecture(
        "gpt2",
        GPT2,
        (
            *SIZES,
            SameValue("attention.layer_norm_epsilon", "norm_epsilon"),
            HeadWidth(is_square=True),
            HEAD_IS_TIED,
        ),
        {"feed_forward": "gelu_tanh"},
    ),
)


def architecture_of(metadata: HFConfig) -> Architecture | None:
    """Return the architecture of a file, None if it is not supported."""
    has_experts = bool(metadata.values.get(EXPERT_COUNT.hf_key))
    found = (one for one in ARCHITECTURES if one.model_type == metadata.model_type)
    return next((one for one in found if (EXPERT_COUNT in one.keys) == has_experts), None)
