"""`model.json`: the architecture of a model, from A-to-A to GPT-2, Llama, Gemma and Mistral."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rungs.common.errors import UserError
from rungs.common.strict_json import StrictModel, check
from rungs.config.base import Config, Positive, Size
from rungs.config.latent_config import LatentConfig
from rungs.config.routing_config import RoutingConfig

MOST_LAYERS = 10_000
LayerKind = Literal["sliding", "global", "nope", "delta_net"]
NormPlacement = Literal["before", "after", "around", "output"]
FeedForwardKind = Literal[
    "none", "gelu_tanh", "gelu", "relu_squared", "swiglu", "swiglu_clamped", "geglu_tanh", "geglu"
]


class RopeScaling(StrictModel):
    """How rotary positions are stretched to a context longer than in the original training."""

    type: Literal["linear", "llama3", "yarn"]
    """linear: every angle is divided by `factor` (Chen et al. 2023). llama3: only low frequencies
    are, with a smooth transition (Llama 3.1; Grattafiori et al. 2024, section 3.4.2). yarn: the
    same, with a transition that is linear in the number of the pair of elements, and rotated
    queries and keys are multiplied by attention_factor (Peng et al. 2023, sections 3.2 to 3.4;
    OLMo 3)."""
    factor: Positive
    """How many times longer the context is."""
    low_frequency_factor: Positive | None = None
    """llama3, yarn: frequencies of wavelengths above original_context_length ÷ this are divided by
    factor."""
    high_frequency_factor: Positive | None = None
    """llama3, yarn: frequencies of wavelengths below original_context_length ÷ this are
    unchanged."""
    original_context_length: Size | None = None
    """llama3, yarn: the context length of the original training."""
    whole_pairs: bool = True
    """yarn: whether the first and last pair of the transition are rounded to whole numbers. false:
    GPT-OSS."""
    attention_factor: Positive | None = None
    """yarn: factor on rotated queries and keys; 0.1 · ln(factor) + 1 in the paper."""
    score_mscale: Positive | None = None
    """yarn: attention scores are multiplied by (0.1 · this · ln(factor) + 1)², also those of
    elements without positions (DeepSeek-V2). Absent: they are not."""

    @check
    def _keys_are_those_of_the_type(self) -> Iterator[str]:
        low, high = self.low_frequency_factor, self.high_frequency_factor
        bounds = (low, high, self.original_context_length)
        if self.type == "linear":
            if any((*bounds, self.attention_factor, self.score_mscale, not self.whole_pairs)):
                yield 'type "linear" takes only factor'
        elif (self.attention_factor is None) == (self.type == "yarn"):
            yield 'attention_factor is for type "yarn", which needs it'
        elif self.score_mscale and self.type != "yarn":
            yield 'score_mscale is for type "yarn"'
        elif low is None or high is None or self.original_context_length is None:
            yield (
                f'type "{self.type}" needs low_frequency_factor, high_frequency_factor and'
                " original_context_length"
            )
        elif low >= high:
            yield "low_frequency_factor must be below high_frequency_factor"


class MupConfig(StrictModel):
    """Maximal update parametrization, muP (Yang et al. 2022, Tensor Programs V): the learning rate
    that is best for a narrow base model is also best for wider ones. With m = emb_dim ÷
    base_emb_dim, the kernels of the blocks start with σ ÷ √m (routers: σ ÷ m) and learn at the
    learning rate ÷ m (muon: ÷ √m), logits are divided by m, and attention scores are scaled by
    1 ÷ head_dim instead of 1 ÷ √head_dim. If emb_dim equals base_emb_dim, nothing changes."""

    base_emb_dim: Size
    """emb_dim of the base model. Its ffn_dim and n_heads · head_dim are smaller by the same
    factor."""
    base_head_dim: Size | None = None
    """head_dim of the base model: attention scores are divided by head_dim ÷ √base_head_dim.
    Absent: the same head_dim as this model, so a wider model has more heads."""


class DeltaNetConfig(StrictModel):
    """Gated DeltaNet layers: linear attention whose state is a matrix per head (Yang et al. 2024,
    arXiv 2412.06464)."""

    key_heads: Size
    """Heads of queries and keys."""
    key_dim: Size
    """Width of a query and a key."""
    value_heads: Size | None = None
    """Heads of values, each with a state of its own: a multiple of key_heads. Absent: key_heads."""
    value_dim: Size | None = None
    """Width of a value. Absent: key_dim."""
    convolution_width: Size = 4
    """Tokens, its own included, of which the short convolution makes a token's query, key and
    value."""
    negative_eigenvalues: bool = False
    """Whether a token may replace up to twice what the state holds for its key, so that the state
    can alternate in sign (Grazzi et al. 2024; Olmo Hybrid)."""
    norm_epsilon: Positive | None = None
    """Added to the mean square in the norm of these layers' outputs. Absent: the model's
    norm_epsilon."""
    norm_placement: Literal["before", "around", "output"] | None = None
    """norm_placement in these layers (Olmo Hybrid: before, and output in the others). Absent: the
    model's."""

    @check
    def _heads_fit(self) -> Iterator[str]:
        if self.value_heads and self.value_heads % self.key_heads:
            yield (f"value_heads: {self.value_heads} is no multiple of key_heads {self.key_heads}")

    @property
    def values_per_key(self) -> int:
        """Value heads per key head."""
        return (self.value_heads or self.key_heads) // self.key_heads

    @property
    def value_width(self) -> int:
        """Width of a value."""
        return self.value_dim or self.key_dim


class ModelConfig(Config):
    """The architecture."""

    vocab_size: Size
    """Number of token ids in the model; at least the size of the tokenizer's vocabulary."""
    context_length: Size
    """The longest sequence that the model accepts. Also the length of training sequences, unless
    train.json has a sequence_length."""
    emb_dim: Size
    """Width of the residual stream."""
    n_layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)]
    """Number of transformer blocks. 0: the embedding goes straight into the output head."""
    n_heads: Size | None = None
    """Attention heads in each block. Required if n_layers is above 0."""
    n_kv_heads: Size | None = None
    """Key and value heads, each shared by n_heads ÷ n_kv_heads query heads: grouped-query attention
    (Ainslie et al. 2023), or multi-query attention if 1 (Shazeer 2019). Absent: n_heads."""
    head_dim: Size | None = None
    """Width of an attention head. Absent: emb_dim ÷ n_heads, which must be a whole number."""
    qkv_bias: bool = False
    """Whether the query, key and value projections have a bias."""
    attention_output_bias: bool = True
    """Whether the projection of the heads back to emb_dim has a bias."""
    latent_attention: LatentConfig | None = None
    """Multi-head latent attention (DeepSeek-V2), which needs positions rope: `{"kv_rank": 512,
    "rope_dim": 64}`. null: each key/value head has its own projections."""
    attention_sinks: bool = False
    """Whether each head has a sink, a learned score that takes a share of a query's attention
    weights, as a key without a value would, so that a head can attend to nothing (GPT-OSS, arXiv
    2508.10925, section 2.2)."""
    attention_output_gate: Literal["none", "head", "element"] = "none"
    """Gate on what attention's heads return, before the output projection: each head's output, or
    each element of it, is multiplied by the sigmoid of a learned linear function of attention's
    input (Qiu et al. 2025, arXiv 2505.06708). element: Qwen3-Next."""
    positions: Literal["none", "learned", "sinusoidal", "rope"] = "learned"
    """Position encoding. none: no positions. learned: a learned table is added to the embedding
    (GPT-2). sinusoidal: fixed sines and cosines are added (Vaswani et al. 2017, section 3.5). rope:
    queries and keys are rotated by their position (Su et al. 2021)."""
    rope_theta: Positive = 10_000.0
    """rope: the base of the wavelengths 2π · rope_theta^(2i ÷ head_dim)."""
    rope_scaling: RopeScaling | None = None
    """rope: stretch positions to a longer context: `{"type": "linear", "factor": 8}`, or type
    llama3 or yarn."""
    rope_share: Annotated[Positive, Field(le=1)] = 1.0
    """rope: the share of a head's elements that are rotated, the first ones (GPT-NeoX; Qwen3-Next:
    0.25)."""
    sliding_rope_theta: Positive | None = None
    """rope: a separate base for layers with a sliding window, which then don't use rope_scaling
    (Gemma 3, Kamath et al. 2025; OLMo 3). Absent: the same as in other layers."""
    sliding_window: Size | None = None
    """Sliding-window attention: a token attends to itself and the sliding_window − 1 tokens before
    it (Beltagy et al. 2020; Mistral 7B, Jiang et al. 2023). Absent: to all tokens before it."""
    layer_pattern: Annotated[tuple[LayerKind, ...], Field(strict=False, min_length=1)] | None = None
    """The kinds of layers, repeated over all layers: `["sliding", "global"]` alternates layers with
    and without the sliding window (Gemma 2); nope is a layer without window and without rope's
    rotation (NoPE, Kazemnejad et al. 2023; SmolLM3); delta_net has Gated DeltaNet instead of
    attention (Qwen3-Next). Absent: if sliding_window is given, all layers have it."""
    delta_net: DeltaNetConfig | None = None
    """The sizes of delta_net layers: `{"key_heads": 4, "key_dim": 64}`."""
    qk_norm: bool = False
    """Whether each head's query and key are normalized, before rope rotates them (Dehghani et al.
    2023; Qwen 3, Gemma 3)."""
    qk_norm_scope: Literal["head", "all_heads"] = "head"
    """qk_norm: head normalizes each head by itself, all_heads a token's query over all of its
    heads, and its key (OLMo 2, OLMo Team 2025, section 3.2). all_heads needs an RMS norm."""
    bidirectional: bool = False
    """Whether a token attends to all tokens of its sequence, also to later ones, for the objective
    masked_diffusion. The last token id is then the mask, which no text may have."""
    prediction_module: bool = False
    """Whether a module with one more layer predicts the token after the next (DeepSeek-V3, 2024,
    section 2.2), for the objective multi_token. Only training uses it."""
    query_pre_attn_scalar: Positive | None = None
    """Attention scores are divided by the square root of this (Gemma 2). Absent: head_dim."""
    attention_soft_cap: Positive | None = None
    """Soft cap on attention scores: cap · tanh(score ÷ cap) keeps them within ±cap (Gemma 2,
    Riviere et al. 2024, section 2). Absent: off."""
    final_soft_cap: Positive | None = None
    """The same soft cap on the model's logits. Absent: off."""
    residual: bool = True
    """true: attention and feed-forward add their output to their input. false: they replace it."""
    residual_scalars: bool = False
    """Whether each block starts with x = λ_r · x + λ_0 · x_0, where x_0 is the input of the first
    block: a residual stream with a learned scale, and a skip from the embedding (modded-nanogpt,
    nanochat). λ_r starts at 1 and λ_0 at 0. nanochat trains λ_0 at 100 times the rate of λ_r; see
    learning_rate_multipliers."""
    value_embedding_every: Size | None = None
    """Value embeddings (Zhou et al. 2024; modded-nanogpt, nanochat): every so many blocks, counted
    back from the last, the row of the token in another table is added to attention's values, times
    2 · sigmoid of a learned linear function of 12 channels of attention's input, for each head.
    nanochat: 2. Absent: none."""
    norm: Literal["none", "layer_norm", "rms_norm", "rms_norm_plus_one"] = "layer_norm"
    """Normalization. none: no norms. layer_norm: LayerNorm with scale and bias (Ba et al. 2016).
    rms_norm: RMSNorm with scale (Zhang & Sennrich 2019). rms_norm_plus_one: RMSNorm times 1 +
    scale, with a scale that starts at 0 (Gemma)."""
    norm_placement: NormPlacement = "before"
    """before: a norm before each sub-layer and one before the head (GPT-2). after: a norm after
    each sub-layer's residual sum (the original transformer). around: as before, and another norm on
    the output of each sub-layer before it is added (Gemma 2). output: a norm on the output of each
    sub-layer before it is added, and one before the head (OLMo 2, OLMo Team 2025, section 3.2)."""
    norm_epsilon: Positive = 1e-5
    """Added to the variance or mean square inside each norm."""
    norm_parameters: bool = True
    """Whether norms have parameters: a scale, and layer_norm a bias. false: they only normalize
    (OLMo, Groeneveld et al. 2024; nanochat)."""
    feed_forward: FeedForwardKind = "gelu_tanh"
    """The feed-forward sub-layer of each block. none: attention only. gelu_tanh: GELU in its tanh
    approximation (GPT-2). gelu: exact GELU (Hendrycks & Gimpel 2016). relu_squared: max(0, x)² (So
    et al. 2021, Primer). The others are gated by another projection (Shazeer 2020): swiglu (Llama),
    geglu_tanh (Gemma), geglu (exact GELU); swiglu_clamped is g · sigmoid(1.702 · g) · (u + 1), with
    the gate g at most 7 and u, the other projection, within ±7 (GPT-OSS)."""
    ffn_dim: Size | None = None
    """Hidden width of the feed-forward sub-layer. Absent: four times emb_dim."""
    ffn_bias: bool = True
    """Whether the projections of the feed-forward sub-layer have a bias."""
    n_experts: Size | None = None
    """Mixture of experts: the number of feed-forward experts in a block. Each token goes through
    experts_per_token of them (Shazeer et al. 2017; Mixtral, Jiang et al. 2024). No token is
    dropped. Absent: one feed-forward sub-layer for all tokens."""
    experts_per_token: Size | None = None
    """Mixture of experts: how many experts each token goes through, those with the highest routing
    probability."""
    normalize_expert_weights: bool = True
    """Mixture of experts: whether the probabilities of a token's experts, by which their outputs
    are weighted, are scaled to sum to 1 (Mixtral, Qwen 3). false: they are those among all experts
    (OLMoE, Muennighoff et al. 2024)."""
    expert_routing: RoutingConfig | None = None
    """Mixture of experts: how they are chosen, where that differs from Mixtral: `{"scores":
    "sigmoid", "balance_bias": true}`."""
    shared_ffn_dim: Size | None = None
    """Mixture of experts: hidden width of another feed-forward sub-layer, of shared experts, which
    all tokens go through (DeepSeekMoE, Dai et al. 2024). Absent: none."""
    shared_expert_gate: bool = False
    """Whether the output of shared experts is multiplied by the sigmoid of a learned linear
    function of their input (Qwen 2 with experts, Qwen3-Next)."""
    n_dense_layers: Annotated[int, Field(ge=0, le=MOST_LAYERS)] = 0
    """Mixture of experts: how many layers, the first ones, have one feed-forward sub-layer for all
    tokens instead (DeepSeek-V2)."""
    dense_ffn_dim: Size | None = None
    """Hidden width of the feed-forward sub-layer in the first n_dense_layers."""
    tied_embeddings: bool = False
    """Whether the output head uses the weights of the token embedding (Press & Wolf 2017)."""
    embedding_scale: Literal["none", "sqrt_emb_dim"] = "none"
    """Factor on the embedding: none, or √emb_dim (Vaswani et al. 2017; Gemma)."""
    embedding_norm: bool = False
    """Whether the embedding, with positions if they are added to it, is normalized before the first
    block (BLOOM, Le Scao et al. 2022; nanochat)."""
    init: Literal["gpt2", "truncated_normal"] = "gpt2"
    """Initial weights. gpt2: normal with σ = 0.02; residual projections are divided by
    √(2·n_layers). truncated_normal: normal with σ² = 2 ÷ (inputs + outputs) (Glorot & Bengio 2010),
    truncated at ±3σ. Biases start at 0."""
    zero_init_residual: bool = False
    """Whether the projections into the residual stream, of attention's output and of the
    feed-forward sub-layer's hidden units, start at 0, so that each block starts as the identity
    (Goyal et al. 2017, section 5.1; modded-nanogpt, nanochat). The other weights start as init
    says."""
    mup: MupConfig | None = None
    """muP: the best learning rate of a narrow base model is also the best for this one. Gives the
    widths of the base model: `{"base_emb_dim": 128}`. Needs optimizer adamw or muon, and no lora.
    null: the standard parametrization."""

    @check
    def _mup_keys_fit(self) -> Iterator[str]:
        if self.mup is None:
            return
        for key, value, needed in (
            ("init", self.init, "gpt2"),
            ("embedding_scale", self.embedding_scale, "none"),
        ):
            if value != needed:
                yield f'mup: needs {key} "{needed}"; "{value}" depends on the width'
        if self.mup.base_head_dim and self.query_pre_attn_scalar:
            yield "mup: base_head_dim and query_pre_attn_scalar both scale attention; give one"

    @check
    def _heads_fit(self) -> Iterator[str]:
        heads, kv_heads = self.n_heads, self.n_kv_heads
        if heads and kv_heads and heads % kv_heads:
            yield _does_not_divide("n_kv_heads", kv_heads, "n_heads", heads)
        if not self.n_layers:
            return
        if heads is None:
            yield "n_heads: missing; required if n_layers is above 0"
        elif not self.head_dim and self.emb_dim % heads:
            yield _does_not_divide("n_heads", heads, "emb_dim", self.emb_dim)
        elif self.positions == "rope" and (rotated := self._rotated) % 2:
            key = "head_dim" if self.rope_share == 1 else "rope_share"
            key = "latent_attention.rope_dim" if self.latent_attention else key
            yield f'{key}: {rotated:g} is odd; positions "rope" needs an even number'

    @check
    def _latent_attention_fits(self) -> Iterator[str]:
        if self.latent_attention is None:
            return
        if self.positions != "rope":
            yield f'latent_attention: needs positions "rope", not "{self.positions}"'
        for key in ("n_kv_heads", "qkv_bias", "qk_norm", "value_embedding_every", "mup"):
            if getattr(self, key) and not (key == "n_kv_heads" and self.n_kv_heads == self.n_heads):
                yield f"{key}: not supported with latent_attention; remove one of the two"
        if self.n_heads and self.value_width > self.query_width:
            yield f"latent_attention.value_dim: {self.value_width} is above {self.query_width}"

    @check
    def _positions_fit(self) -> Iterator[str]:
        if self.positions == "sinusoidal" and self.emb_dim % 2:
            yield f'emb_dim: {self.emb_dim} is odd; positions "sinusoidal" needs an even number'
        if self.positions == "rope":
            return
        if "nope" in (self.layer_pattern or ()):
            yield f'layer_pattern: "nope" needs positions "rope", not "{self.positions}"'
        for key in ("rope_scaling", "sliding_rope_theta"):
            if getattr(self, key) is not None:
                yield f'{key}: needs positions "rope", not "{self.positions}"'

    @check
    def _layers_have_a_window(self) -> Iterator[str]:
        if self.sliding_window:
            yield from ["sliding_window: not in a bidirectional model"] * self.bidirectional
            return
        kinds = set(self.layer_pattern or ())
        if kinds and ("sliding" in kinds or not kinds & {"nope", "delta_net"}):
            yield "layer_pattern: needs sliding_window"
        if self.sliding_rope_theta:
            yield "sliding_rope_theta: needs sliding_window"

    @check
    def _delta_net_fits(self) -> Iterator[str]:
        has_layers = "delta_net" in (self.layer_pattern or ())
        if has_layers != bool(self.delta_net):
            yield 'delta_net and "delta_net" in layer_pattern: give both or neither'
        if not (has_layers and self.delta_net):
            return
        if self.mup:
            yield "mup: not supported with delta_net, whose gates have no known rule; remove one"
        if self.value_embedding_every:
            yield "value_embedding_every: is for attention; not supported with delta_net"
        if self.delta_net.norm_placement and (
            self.norm_placement == "after" or not self.norm_parameters or self.norm == "none"
        ):
            yield "delta_net.norm_placement: needs norms with parameters, and not after a sum"

    @check
    def _norms_fit(self) -> Iterator[str]:
        for key in ("qk_norm", "embedding_norm") if self.norm == "none" else ():
            if getattr(self, key):
                yield f'{key}: true, but norm is "none"; choose a norm or remove {key}'
        if not self.norm_parameters and self.norm == "rms_norm_plus_one":
            yield 'norm_parameters: false, but norm "rms_norm_plus_one" has a scale; use "rms_norm"'
        if self.qk_norm and self.qk_norm_scope != "head" and not self.norm.startswith("rms_norm"):
            yield f'qk_norm_scope: "all_heads" needs norm "rms_norm", not "{self.norm}"'
        if self.norm != "none" and self.norm_placement == "after" and not self.n_layers:
            yield 'norm_placement: "after" has no effect if n_layers is 0; set norm to "none"'

    @check
    def _sublayers_fit(self) -> Iterator[str]:
        if self.prediction_module and not self.n_layers:
            yield "prediction_module: needs n_layers above 0"
        if self.zero_init_residual and not self.residual:
            yield "zero_init_residual: needs residual; without it every block would return zeros"
        if self.ffn_dim and self.feed_forward == "none":
            yield f'ffn_dim: {self.ffn_dim}, but feed_forward is "none"; remove one of them'
        total, each = self.n_experts, self.experts_per_token
        if (total is None) != (each is None):
            yield "n_experts and experts_per_token: give both or neither"
        elif total and self.feed_forward == "none":
            yield f'n_experts: {total}, but feed_forward is "none"; remove one of them'
        elif total and each and each > total:
            yield f"experts_per_token: {each} is above n_experts {total}"
        dense = self.n_dense_layers
        if dense and not self.dense_ffn_dim:
            yield "dense_ffn_dim: missing; required with n_dense_layers"
        elif dense and dense >= self.n_layers:
            yield f"n_dense_layers: {dense} is not below n_layers {self.n_layers}"
        elif dense and self.value_embedding_every:
            yield "value_embedding_every: not supported with n_dense_layers; remove one of the two"
        if self.shared_expert_gate and not self.shared_ffn_dim:
            yield "shared_expert_gate: needs shared_ffn_dim"
        for key in ("expert_routing", "shared_ffn_dim", "n_dense_layers"):
            if getattr(self, key) and not total:
                yield f"{key}: needs n_experts"
        groups, of_token = self.routing.groups, self.routing.groups_per_token
        if total and groups and of_token:
            if total % groups:
                yield _does_not_divide("expert_routing.groups", groups, "n_experts", total)
            elif each and each > total // groups * of_token:
                yield f"experts_per_token: {each} is more than {of_token} groups have"

    def require_next_token(self) -> None:
        """Raise UserError if the model fills in masked tokens instead of predicting the next."""
        if self.bidirectional:
            what = "it fills in masked tokens, and predicts no next one; generate.py runs it"
            raise UserError(f"the model is bidirectional: {what}")

    @property
    def mask_token(self) -> int:
        """The token that stands for an unknown one, if the model is bidirectional."""
        return self.vocab_size - 1

    @property
    def head_width(self) -> int:
        """Width of one attention head. Requires a model with layers."""
        assert self.n_heads is not None
        return self.head_dim or self.emb_dim // self.n_heads

    def norm_placement_of(self, kind: LayerKind) -> NormPlacement:
        """Where the norms of a kind of layers are."""
        own = self.delta_net.norm_placement if self.delta_net and kind == "delta_net" else None
        return own or self.norm_placement

    @property
    def rotary_width(self) -> int:
        """Elements of a head that rope rotates. Requires a model with layers."""
        return int(self._rotated)

    @property
    def _rotated(self) -> float:
        latent = self.latent_attention
        return latent.rope_dim if latent else self.head_width * self.rope_share

    @property
    def query_width(self) -> int:
        """Width of one head's queries and keys. Requires a model with layers."""
        latent = self.latent_attention
        return self.head_width + (latent.rope_dim if latent else 0)

    @property
    def value_width(self) -> int:
        """Width of one head's values. Requires a model with layers."""
        latent = self.latent_attention
        return (latent.value_dim if latent else None) or self.head_width

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Heads in a layer's cache, and the widths of their two arrays: keys and values, or the
        shared key and the latent. Requires a model with layers."""
        if latent := self.latent_attention:
            return 1, latent.rope_dim, latent.kv_rank
        return self.n_kv_heads or self.n_heads or 1, self.head_width, self.head_width

    @property
    def width_multiplier(self) -> float:
        """In muP, the ratio of the model's width to its base model's; otherwise 1."""
        return self.emb_dim / self.mup.base_emb_dim if self.mup else 1.0

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores. Requires a model with layers."""
        scaling = self.rope_scaling
        mscale = (scaling.score_mscale if scaling else None) or 0
        if mscale and scaling:
            mscale = 0.1 * mscale * math.log(scaling.factor)
        if self.mup and self.mup.base_head_dim:
            return math.sqrt(self.mup.base_head_dim) / self.head_width
        return (1 + mscale) ** 2 / math.sqrt(self.query_pre_attn_scalar or self.query_width)

    @property
    def routing(self) -> RoutingConfig:
        """How a mixture of experts chooses."""
        return self.expert_routing or RoutingConfig()

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward sub-layer has a gate."""
        return self.feed_forward in ("swiglu", "swiglu_clamped", "geglu_tanh", "geglu")

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the feed-forward sub-layer."""
        return self.ffn_dim or 4 * self.emb_dim

    @property
    def repeated_kinds(self) -> tuple[LayerKind, ...]:
        """The layer kinds of one period: the pattern and the value embeddings repeat after it."""
        default: LayerKind = "sliding" if self.sliding_window else "global"
        kinds = self.layer_pattern or (default,)
        length = min(math.lcm(len(kinds), self.value_embedding_every or 1), max(self.n_layers, 1))
        return tuple(kinds[layer % len(kinds)] for layer in range(length))

    def layer_kinds(self) -> Iterator[LayerKind]:
        """The kind of each layer."""
        period = self.repeated_kinds
        return (period[layer % len(period)] for layer in range(self.n_layers))

    @property
    def value_layers(self) -> tuple[int, ...]:
        """The layers that have a value embedding."""
        every = self.value_embedding_every
        return tuple(range((self.n_layers - 1) % every, self.n_layers, every)) if every else ()

    @property
    def value_embedding_width(self) -> int:
        """Total elements of a token's value embeddings over all layers."""
        heads = self.n_kv_heads or self.n_heads or 1
        return len(self.value_layers) * heads * self.head_width if self.value_layers else 0


def _does_not_divide(key: str, number: int, of: str, whole: int) -> str:
    small = [d for d in range(1, math.isqrt(whole) + 1) if whole % d == 0]
    near = min(sorted({*small, *(whole // d for d in small)}), key=lambda d: abs(d - number))
    return f"{key}: {number} does not divide {of} {whole}; the nearest that does is {near}"
