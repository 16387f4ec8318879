"""`model.json`: what the model is, from A-to-A to GPT-2, Llama, Gemma and Mistral, as data."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rungs.common.strict_json import StrictModel
from rungs.config.base import Config, Positive, Size

MOST_LAYERS = 10_000
LayerKind = Literal["sliding", "global"]
FeedForwardKind = Literal["none", "gelu_tanh", "gelu", "swiglu", "geglu_tanh", "geglu"]


class RopeScaling(StrictModel):
    """How rotary positions are stretched over a context longer than the first training's."""

    type: Literal["linear", "llama3"]
    """linear: every angle divided by `factor` (Chen et al. 2023). llama3: only slow frequencies
    are, with a smooth passage between (Llama 3.1; Grattafiori et al. 2024, section 3.4.2)."""
    factor: Positive
    """How many times longer the context is."""
    low_frequency_factor: Positive | None = None
    """llama3: wavelengths above original_context_length ÷ this are divided by factor."""
    high_frequency_factor: Positive | None = None
    """llama3: wavelengths below original_context_length ÷ this stay as they are."""
    original_context_length: Size | None = None
    """llama3: the context length before."""

    CHECKS = ("_llama3_is_whole",)

    def _llama3_is_whole(self) -> str | None:
        bounds = (self.low_frequency_factor, self.high_frequency_factor)
        llama3_keys = (*bounds, self.original_context_length)
        if self.type == "linear":
            return 'type "linear" has a factor only' if any(llama3_keys) else None
        low, high = bounds
        if low is None or high is None or self.original_context_length is None:
            return (
                'type "llama3" needs low_frequency_factor, high_frequency_factor and'
                " original_context_length"
            )
        return None if low < high else "low_frequency_factor must be below high_frequency_factor"


class MupConfig(StrictModel):
    """Maximal update parametrisation, muP (Yang et al. 2022, «Tensor Programs V»): the learning
    rate that is best for a narrow base model stays so for wider ones. With m = emb_dim ÷
    base_emb_dim, kernels of the blocks start with σ ÷ √m (routers: σ ÷ m) and learn at the learning
    rate ÷ m (muon: ÷ √m), logits are divided by m, and attention scores fall with head_dim, not
    with its root. A model as wide as its base is the model without the key."""

    base_emb_dim: Size
    """emb_dim of the base model, whose ffn_dim and n_heads · head_dim are as many times smaller."""
    base_head_dim: Size | None = None
    """head_dim of the base model: scores are divided by head_dim ÷ √base_head_dim. As here where
    absent: a wider model has more heads."""


class ModelConfig(Config):
    """The architecture."""

    vocab_size: Size
    """Number of token ids the model knows; at least the tokenizer's."""
    context_length: Size
    """The longest sequence the model is made for, and the length of its training sequences
    where train.json has no sequence_length."""
    emb_dim: Size
    """Width of the residual stream."""
    n_layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)]
    """Transformer blocks; with 0 the embedding goes straight into the output head."""
    n_heads: Size | None = None
    """Attention heads of each block. Needed where n_layers is above 0."""
    n_kv_heads: Size | None = None
    """Heads of keys and values, each shared by n_heads ÷ n_kv_heads query heads: grouped-query
    attention (Ainslie et al. 2023), multi-query with 1 (Shazeer 2019). n_heads where absent."""
    head_dim: Size | None = None
    """Width of an attention head; emb_dim ÷ n_heads, which must divide, where absent."""
    qkv_bias: bool = False
    """Whether the query, key and value projections add a bias."""
    attention_output_bias: bool = True
    """Whether the projection of the heads back to emb_dim adds a bias."""
    positions: Literal["none", "learned", "sinusoidal", "rope"] = "learned"
    """How the model knows where a token stands. none; a learned table added to the embedding
    (GPT-2); fixed sines and cosines added (Vaswani et al. 2017, section 3.5); or rope: queries
    and keys rotated by their position (Su et al. 2021)."""
    rope_theta: Positive = 10_000.0
    """rope: the base of the wavelengths, 2π · rope_theta^(2i ÷ head_dim)."""
    rope_scaling: RopeScaling | None = None
    """rope: stretched over a longer context: `{"type": "linear", "factor": 8}`, or type llama3."""
    sliding_rope_theta: Positive | None = None
    """rope: another base, never scaled, in layers with a sliding window (Gemma 3, Kamath et al.
    2025); as in the others where absent."""
    sliding_window: Size | None = None
    """Sliding-window attention: a token sees itself and the sliding_window − 1 before it
    (Beltagy et al. 2020; Mistral 7B, Jiang et al. 2023). Absent: every token before it."""
    layer_pattern: Annotated[tuple[LayerKind, ...], Field(strict=False, min_length=1)] | None = None
    """Which layers the sliding window is for, repeated through the layers:
    `["sliding", "global"]` alternates (Gemma 2). Absent: all, where there is a window."""
    qk_norm: bool = False
    """Whether each head's query and key are normed, before they are rotated (Dehghani et al.
    2023; Qwen 3, Gemma 3)."""
    query_pre_attn_scalar: Positive | None = None
    """Attention scores are divided by the root of this; head_dim where absent (Gemma 2)."""
    attention_soft_cap: Positive | None = None
    """Attention scores kept within ±cap by cap · tanh(score ÷ cap) (Gemma 2, Riviere et al.
    2024, section 2). Absent: off."""
    final_soft_cap: Positive | None = None
    """The same for the model's logits."""
    residual: bool = True
    """Whether attention and feed-forward add to their input (true) or replace it (false)."""
    norm: Literal["none", "layer_norm", "rms_norm", "rms_norm_plus_one"] = "layer_norm"
    """Normalisation: none; LayerNorm (Ba et al. 2016) with scale and bias; RMSNorm (Zhang &
    Sennrich 2019) with scale; or RMSNorm times 1 + scale, the scale starting at 0 (Gemma)."""
    norm_placement: Literal["before", "after", "around"] = "before"
    """Norm before each sub-layer and once before the head (GPT-2); after each sub-layer's
    residual sum (the original transformer); or around: before, and on the output of each
    sub-layer before it is added, a sandwich (Gemma 2)."""
    norm_epsilon: Positive = 1e-5
    """Added to the variance, or mean square, inside each norm."""
    feed_forward: FeedForwardKind = "gelu_tanh"
    """Feed-forward part of each block: none; GELU in its tanh form, as GPT-2 has it; the exact
    GELU (Hendrycks & Gimpel 2016); or gated by another projection (Shazeer 2020): swiglu (Llama),
    geglu_tanh (Gemma), geglu with the exact GELU."""
    ffn_dim: Size | None = None
    """Hidden width of the feed-forward part; four times emb_dim where absent."""
    ffn_bias: bool = True
    """Whether the projections of the feed-forward part add a bias."""
    n_experts: Size | None = None
    """Mixture of experts: so many feed-forward parts, of which each token goes through
    experts_per_token (Shazeer et al. 2017; Mixtral, Jiang et al. 2024). No token is dropped.
    Absent: one feed-forward part for all."""
    experts_per_token: Size | None = None
    """The experts with the highest routing probability, which are scaled to sum to 1."""
    tied_embeddings: bool = False
    """Whether the output head is the token embedding (Press & Wolf 2017)."""
    embedding_scale: Literal["none", "sqrt_emb_dim"] = "none"
    """What the embedding is multiplied by: nothing, or √emb_dim (Vaswani et al. 2017; Gemma)."""
    init: Literal["gpt2", "truncated_normal"] = "gpt2"
    """How weights start. gpt2: normal with σ 0.02, residual projections ÷ √(2·n_layers).
    truncated_normal: cut at ±3σ, σ² = 2/(in + out) (Glorot & Bengio 2010). Biases start at 0."""

    mup: MupConfig | None = None
    """Widths of the narrow model whose learning rate is to be best here, too:
    `{"base_emb_dim": 128}`. Needs optimizer adamw or muon, and no lora. null: the standard
    parametrisation."""

    CHECKS = (
        "_mup_has_the_scales",
        "_heads_given",
        "_heads_divide_width",
        "_heads_share_keys",
        "_rotations_pair_up",
        "_rope_keys_are_used",
        "_pattern_has_a_window",
        "_queries_have_a_norm",
        "_sinusoids_pair_up",
        "_width_has_a_part",
        "_experts_fit",
        "_norm_has_a_place",
    )

    def _mup_has_the_scales(self) -> str | None:
        if self.mup is None:
            return None
        for key, needed in (("init", "gpt2"), ("embedding_scale", "none")):
            if getattr(self, key) != needed:
                return f'mup: needs {key} "{needed}"; "{getattr(self, key)}" scales with the width'
        if self.mup.base_head_dim and self.query_pre_attn_scalar:
            return "mup: base_head_dim and query_pre_attn_scalar both scale attention; give one"
        return None

    def _heads_given(self) -> str | None:
        if self.n_layers and self.n_heads is None:
            return "n_heads: missing; needed where n_layers is above 0"
        return None

    def _heads_divide_width(self) -> str | None:
        if not self.n_layers or not self.n_heads or self.head_dim:
            return None
        if self.emb_dim % self.n_heads == 0:
            return None
        near = _nearest_divisor(self.emb_dim, self.n_heads)
        return (
            f"n_heads: {self.n_heads} does not divide emb_dim {self.emb_dim}; {near} is the"
            " nearest that does"
        )

    def _heads_share_keys(self) -> str | None:
        if not self.n_heads or not self.n_kv_heads or self.n_heads % self.n_kv_heads == 0:
            return None
        near = _nearest_divisor(self.n_heads, self.n_kv_heads)
        return (
            f"n_kv_heads: {self.n_kv_heads} does not divide n_heads {self.n_heads}; {near} is the"
            " nearest that does"
        )

    def _rotations_pair_up(self) -> str | None:
        whole = self.head_dim or (self.n_heads and self.emb_dim % self.n_heads == 0)
        if self.positions != "rope" or not self.n_layers or not self.n_heads or not whole:
            return None
        if self.head_width % 2 == 0:
            return None
        return f'head_dim: {self.head_width} is odd; positions "rope" need it even'

    def _rope_keys_are_used(self) -> str | None:
        if self.positions == "rope":
            return None
        keys = ("rope_scaling", "sliding_rope_theta")
        given = next((key for key in keys if getattr(self, key) is not None), None)
        return given and f'{given}: needs positions "rope", not "{self.positions}"'

    def _pattern_has_a_window(self) -> str | None:
        if self.sliding_window:
            return None
        keys = ("layer_pattern", "sliding_rope_theta")
        given = next((key for key in keys if getattr(self, key) is not None), None)
        return given and f"{given}: needs sliding_window"

    def _queries_have_a_norm(self) -> str | None:
        if self.qk_norm and self.norm == "none":
            return 'qk_norm: true, but norm is "none"; name one, or leave qk_norm out'
        return None

    def _sinusoids_pair_up(self) -> str | None:
        if self.positions == "sinusoidal" and self.emb_dim % 2:
            return f'emb_dim: {self.emb_dim} is odd; positions "sinusoidal" need it even'
        return None

    def _width_has_a_part(self) -> str | None:
        if self.ffn_dim and self.feed_forward == "none":
            return f'ffn_dim: {self.ffn_dim}, but feed_forward is "none"; leave one of them out'
        return None

    def _experts_fit(self) -> str | None:
        total, each = self.n_experts, self.experts_per_token
        if total is None and each is None:
            return None
        if total is None or each is None:
            return "n_experts and experts_per_token: give both, or none"
        if self.feed_forward == "none":
            return f'n_experts: {total}, but feed_forward is "none"; leave one of them out'
        return None if each <= total else f"experts_per_token: {each} of n_experts {total}"

    def _norm_has_a_place(self) -> str | None:
        if self.norm != "none" and self.norm_placement == "after" and not self.n_layers:
            return 'norm_placement: "after" places no norm where n_layers is 0; set norm "none"'
        return None

    @property
    def head_width(self) -> int:
        """Width of one attention head; only where there are layers."""
        assert self.n_heads is not None
        return self.head_dim or self.emb_dim // self.n_heads

    @property
    def width_multiplier(self) -> float:
        """How many times wider than its base the model is, in muP; else 1."""
        return self.emb_dim / self.mup.base_emb_dim if self.mup else 1.0

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by; only where there are layers."""
        if self.mup and self.mup.base_head_dim:
            return math.sqrt(self.mup.base_head_dim) / self.head_width
        return 1 / math.sqrt(self.query_pre_attn_scalar or self.head_width)

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward part has a gate."""
        return self.feed_forward in ("swiglu", "geglu_tanh", "geglu")

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the feed-forward part."""
        return self.ffn_dim or 4 * self.emb_dim

    @property
    def repeated_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers in one period of the pattern."""
        if self.layer_pattern:
            return self.layer_pattern[: max(self.n_layers, 1)]
        return ("sliding",) if self.sliding_window else ("global",)

    def layer_kinds(self) -> Iterator[LayerKind]:
        """The kind of each layer."""
        period = self.repeated_kinds
        return (period[layer % len(period)] for layer in range(self.n_layers))


def _nearest_divisor(number: int, near: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min(sorted({*small, *(number // d for d in small)}), key=lambda d: abs(d - near))
