"""A second decoder, written from the papers in float64 NumPy: what the model is compared with.

Slow and simple on purpose: loops over sequences, heads, positions and tokens, no JAX.
"""

import cmath
import math

import numpy as np
from numpy.typing import NDArray

from rungs.config.model_config import ModelConfig
from tests.support import reference_latent, reference_router
from tests.support.reference_delta_net import delta_net, sigmoid

Floats = NDArray[np.float64]
Weights = dict[str, Floats]

DENSE = "blocks.dense_feed_forward."
SHARED = "blocks.feed_forward.shared."
EXPERTS = tuple(f"blocks.feed_forward.{name}." for name in ("gate", "up", "down"))


def forward(config: ModelConfig, weights: Weights, tokens: NDArray[np.int32]) -> list[Floats]:
    """Return, for one sequence of token ids (S,), the embedding (S, D), the output of each block
    (the last one after the final norm), and the logits (S, V)."""
    embedding = weights["token_embedding.embedding"]
    scale = math.sqrt(config.emb_dim) if config.embedding_scale == "sqrt_emb_dim" else 1.0
    states = [embedding[tokens] * scale + positions(config, weights, len(tokens))]
    if config.embedding_norm:
        states[0] = norm(config, weights, "embedding_norm", states[0])
    for number in range(config.n_layers):
        layer = weights_of_layer(config, weights, number)
        extra = value_embedding(config, weights, tokens, number)
        x = states[-1]
        if config.residual_scalars:
            x = layer["blocks.residual_scale"] * x + layer["blocks.embedding_skip"] * states[0]
        own = config_of_layer(config, number)
        states.append(block(own, layer, x, is_sliding(config, number), extra))
    if config.norm_placement != "after":
        states[-1] = norm(config, weights, "final_norm", states[-1])
    head = embedding.T if config.tied_embeddings else weights["head.kernel"]
    return [*states, soft_cap(states[-1] @ head, config.final_soft_cap)]


def kind_of(config: ModelConfig, number: int) -> str:
    pattern = config.layer_pattern or ("",)
    return pattern[number % len(pattern)]


def config_of_layer(config: ModelConfig, number: int) -> ModelConfig:
    """Return the config with the positions of a layer, which rope may leave out, the placement of
    its norms, and without experts if it has none."""
    kind = kind_of(config, number)
    if number < config.n_dense_layers:
        config = config.model_copy(update={"n_experts": None, "shared_ffn_dim": None})
    if kind == "delta_net" and config.delta_net and config.delta_net.norm_placement:
        return config.model_copy(update={"norm_placement": config.delta_net.norm_placement})
    return config.model_copy(update={"positions": "none"}) if kind == "nope" else config


def weights_of_layer(config: ModelConfig, weights: Weights, number: int) -> Weights:
    """Return what a layer has of the stacked parameters, which have rows of layers with a part."""

    def has(name: str, layer: int) -> bool:
        is_delta = kind_of(config, layer) == "delta_net"
        if name.startswith(("blocks.attention.", "blocks.delta_net.")):
            return is_delta == name.startswith("blocks.delta_net.")
        if name.startswith(("blocks.feed_forward.", DENSE)):
            return (layer < config.n_dense_layers) == name.startswith(DENSE)
        placement = config_of_layer(config, layer).norm_placement
        if "_output_norm" in name:
            return placement in ("around", "output")
        return "_norm" not in name or placement != "output"

    return {
        name.replace("dense_", ""): w[sum(has(name, layer) for layer in range(number))]
        for name, w in weights.items()
        if name.startswith("blocks.") and has(name, number)
    }


def value_embedding(
    config: ModelConfig, weights: Weights, tokens: NDArray[np.int32], number: int
) -> tuple[Floats, Floats] | None:
    """Return the vectors (S, K, H) that layer `number` adds to its values, and their gate (G, K);
    None if it adds none. Layers are counted back from the last."""
    every = config.value_embedding_every
    if every is None or (config.n_layers - 1 - number) % every:
        return None
    before = sum((config.n_layers - 1 - n) % every == 0 for n in range(number))
    heads = config.n_kv_heads or config.n_heads or 1
    width = heads * config.head_width
    table = weights["value_embedding.embedding"][:, before * width : (before + 1) * width]
    return table[tokens].reshape(len(tokens), heads, -1), weights["value_gates"][before]


def positions(config: ModelConfig, weights: Weights, length: int) -> Floats:
    if config.positions == "learned":
        return weights["position_embedding.embedding"][:length]
    table = np.zeros((length, config.emb_dim))
    if config.positions == "sinusoidal":
        half = config.emb_dim // 2
        for s in range(length):
            for i in range(half):
                angle = s / 10_000 ** (2 * i / config.emb_dim)
                table[s, i], table[s, half + i] = math.sin(angle), math.cos(angle)
    return table


def is_sliding(config: ModelConfig, number: int) -> bool:
    """Whether layer `number`, counted from 0, has the sliding window."""
    if config.layer_pattern is None:
        return config.sliding_window is not None
    return config.layer_pattern[number % len(config.layer_pattern)] == "sliding"


def block(
    config: ModelConfig,
    layer: Weights,
    x: Floats,
    sliding: bool,
    extra: tuple[Floats, Floats] | None = None,
) -> Floats:
    """(S, D) to (S, D); `extra` is from `value_embedding`."""
    feed_forward_part = feed_forward if config.n_experts is None else experts
    sublayers = ["attention"] if config.feed_forward == "none" else ["attention", "feed_forward"]
    for part in sublayers:
        name = f"blocks.{part}"
        on_input = config.norm_placement in ("before", "around")
        y = norm(config, layer, f"{name}_norm", x) if on_input else x
        if "blocks.delta_net.norm.scale" in layer and part == "attention":
            y = delta_net(config, layer, y)
        elif part == "attention":
            y = self_attention(config, layer, y, sliding, extra)
        else:
            y = feed_forward_part(config, layer, y)
        if config.norm_placement in ("around", "output"):
            y = norm(config, layer, f"{name}_output_norm", y)
        x = x + y if config.residual else y
        if config.norm_placement == "after":
            x = norm(config, layer, f"{name}_norm", x)
    return x


def norm(config: ModelConfig, weights: Weights, name: str, x: Floats) -> Floats:
    if config.norm == "none":
        return x
    scale, bias = np.ones(x.shape[-1]), np.zeros(x.shape[-1])
    if config.norm_parameters:
        scale, bias = weights[f"{name}.scale"], weights.get(f"{name}.bias", bias)
    scale = scale.reshape(-1)  # of all heads
    if config.norm == "layer_norm":
        return layer_norm(x, scale, bias, config.norm_epsilon)
    return rms_norm(x, 1 + scale if "plus_one" in config.norm else scale, config.norm_epsilon)


def layer_norm(x: Floats, scale: Floats, bias: Floats, epsilon: float) -> Floats:
    """Ba et al. 2016, equation 3."""
    deviation = x - x.mean(-1, keepdims=True)
    return deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def rms_norm(x: Floats, scale: Floats, epsilon: float) -> Floats:
    """Zhang & Sennrich 2019, equation 4."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def self_attention(
    config: ModelConfig,
    layer: Weights,
    x: Floats,
    sliding: bool,
    extra: tuple[Floats, Floats] | None = None,
) -> Floats:
    """(S, D) to (S, D)."""
    visible = np.zeros((len(x), len(x)), bool)
    for s in range(len(x)):
        width = min(s + 1, config.sliding_window) if sliding and config.sliding_window else s + 1
        visible[s, s + 1 - width : s + 1] = True
    query, key, value = projections(config, layer, x, sliding)
    if extra is not None:
        rows, gate = extra
        value += 2 / (1 + np.exp(-(x[:, : len(gate)] @ gate)))[..., None] * rows
    scale = score_scale(config, query.shape[2])
    sinks = layer.get("blocks.attention.sink")
    y = attention(query, key, value, visible, scale, config.attention_soft_cap, sinks)
    y = y * gates(config, layer, x)
    y = np.einsum("snh,nhd->sd", y, layer["blocks.attention.output.kernel"])
    return y + layer["blocks.attention.output.bias"] if config.attention_output_bias else y


def gates(config: ModelConfig, layer: Weights, x: Floats) -> Floats:
    """Return what the heads' outputs are multiplied by, (S, N, H or 1); Qiu et al. 2025, equation
    5."""
    if config.attention_output_gate == "none":
        return np.ones((len(x), config.n_heads or 0, 1))
    scores = np.tensordot(x, layer["blocks.attention.gate.kernel"], 1)
    scores = scores + layer["blocks.attention.gate.bias"] if config.qkv_bias else scores
    return sigmoid(scores if scores.ndim == 3 else scores[..., None])


def score_scale(config: ModelConfig, width: int) -> float:
    """Return the factor on scores of heads of this width, with YaRN's temperature on all of them as
    in DeepSeek-V2, section 3.1.4."""
    scaling = config.rope_scaling
    mscale = 0.1 * (scaling.score_mscale or 0) * math.log(scaling.factor) if scaling else 0
    return (1 + mscale) ** 2 / math.sqrt(config.query_pre_attn_scalar or width)


def projections(
    config: ModelConfig, layer: Weights, x: Floats, sliding: bool
) -> tuple[Floats, Floats, Floats]:
    """Return queries, keys and values, normalized and rotated, each (S, N or K, H)."""
    if config.latent_attention:
        return reference_latent.projections(config, layer, x)
    factor = 1.0  # of YaRN
    if config.rope_scaling and not (sliding and config.sliding_rope_theta):
        factor = config.rope_scaling.attention_factor or 1.0

    def projected(name: str) -> Floats:
        y = project(config, layer, x, name)
        if config.qk_norm and name != "value":
            together = y.reshape(len(y), -1) if config.qk_norm_scope == "all_heads" else y
            y = norm(config, layer, f"blocks.attention.{name}_norm", together).reshape(y.shape)
        is_rotated = config.positions == "rope" and name != "value"
        return factor * rotate(config, y, sliding) if is_rotated else y

    return projected("query"), projected("key"), projected("value")


def project(config: ModelConfig, layer: Weights, x: Floats, name: str) -> Floats:
    """Return a projection of all heads, (S, N or K, H)."""
    y = np.einsum("sd,dnh->snh", x, layer[f"blocks.attention.{name}.kernel"])
    return y + layer[f"blocks.attention.{name}.bias"] if config.qkv_bias else y


def attention(
    query: Floats,
    key: Floats,
    value: Floats,
    mask: NDArray[np.bool_] | None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: Floats | None = None,
) -> Floats:
    """For one sequence, from (S, N, H), (T, K, H), (T, K, H) and (S, T) to (S, N, H). The first
    N ÷ K query heads share the first key head, and so on (Ainslie et al. 2023, figure 2). A sink
    (N,) is another score, of a value of zeros."""
    scale = 1 / math.sqrt(query.shape[2]) if scale is None else scale
    sharing = query.shape[1] // key.shape[1]
    result = np.zeros(query.shape[:2] + value.shape[2:])
    for s in range(query.shape[0]):
        for n in range(query.shape[1]):
            scores = soft_cap(key[:, n // sharing] @ query[s, n] * scale, cap)
            if mask is not None:
                scores = np.where(mask[s], scores, -np.inf)
            scores = scores if sinks is None else np.append(scores, sinks[n])
            result[s, n] = softmax(scores)[: len(key)] @ value[:, n // sharing]
    return result


def softmax(scores: Floats) -> Floats:
    exponentials = np.exp(scores - scores.max())
    return exponentials / exponentials.sum()


def soft_cap(x: Floats, cap: float | None) -> Floats:
    """Riviere et al. 2024, section 2."""
    return x if cap is None else cap * np.tanh(x / cap)


def rotate(config: ModelConfig, x: Floats, sliding: bool) -> Floats:
    """Rotate heads (S, N, H) at positions 0 to S − 1. Of the first R elements, all H or a share of
    them, i and i + R/2 are a complex number that rotates by position · 2π ÷ wavelength (Su et al.
    2021, equation 13)."""
    half = int(x.shape[2] * config.rope_share) // 2
    result = x.copy()
    for s, n, i in np.ndindex(x.shape[0], x.shape[1], half):
        turn = cmath.exp(1j * s * 2 * math.pi / wavelength(config, i, 2 * half, sliding))
        turned = complex(x[s, n, i], x[s, n, half + i]) * turn
        result[s, n, i], result[s, n, half + i] = turned.real, turned.imag
    return result


def wavelength(config: ModelConfig, pair: int, width: int, sliding: bool) -> float:
    """Return the number of positions for a full turn of a pair in a head of this width."""
    if sliding and config.sliding_rope_theta is not None:
        return 2 * math.pi * config.sliding_rope_theta ** (2 * pair / width)
    plain = 2 * math.pi * config.rope_theta ** (2 * pair / width)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.type == "linear":
        return plain * scaling.factor
    assert scaling.original_context_length
    assert scaling.low_frequency_factor
    assert scaling.high_frequency_factor
    if scaling.type == "yarn":
        return 1 / (
            (1 - (r := yarn_ramp(config, pair, width))) / plain + r / plain / scaling.factor
        )
    if plain > scaling.original_context_length / scaling.low_frequency_factor:
        return plain * scaling.factor
    if plain < scaling.original_context_length / scaling.high_frequency_factor:
        return plain
    between = scaling.high_frequency_factor - scaling.low_frequency_factor
    turns = scaling.original_context_length / plain
    smooth = (turns - scaling.low_frequency_factor) / between
    return 1 / ((1 - smooth) / (plain * scaling.factor) + smooth / plain)


def yarn_ramp(config: ModelConfig, pair: int, width: int) -> float:
    """Return how much of a pair's frequency is divided (Peng et al. 2023, equation 17, with the
    bounds as whole numbers of pairs, as in the authors' code)."""
    scaling = config.rope_scaling
    assert scaling
    context = scaling.original_context_length
    assert context
    assert scaling.low_frequency_factor
    assert scaling.high_frequency_factor

    def pair_that_makes(turns: float) -> float:
        length = context / turns
        return width * math.log(length / (2 * math.pi)) / (2 * math.log(config.rope_theta))

    first = pair_that_makes(scaling.high_frequency_factor)
    last = pair_that_makes(scaling.low_frequency_factor)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return min(max((pair - first) / (last - first), 0.0), 1.0)


def feed_forward(config: ModelConfig, layer: Weights, x: Floats) -> Floats:
    """From (S, D) to (S, D), or (D,) to (D,)."""
    return feed_forward_linear(config, layer, "down", hidden_units(config, layer, x))


def hidden_units(config: ModelConfig, layer: Weights, x: Floats) -> Floats:
    """From (S, D) to (S, F), or (D,) to (F,)."""
    hidden = feed_forward_linear(config, layer, "up", x)
    if config.feed_forward == "swiglu":
        gate = feed_forward_linear(config, layer, "gate", x)
        return gate / (1 + np.exp(-gate)) * hidden
    if config.feed_forward == "swiglu_clamped":
        gate = np.minimum(feed_forward_linear(config, layer, "gate", x), 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(hidden, -7, 7) + 1)
    if config.feed_forward in ("geglu", "geglu_tanh"):
        gate = feed_forward_linear(config, layer, "gate", x)
        return gelu(gate, config.feed_forward == "geglu_tanh") * hidden
    if config.feed_forward == "relu_squared":
        return np.maximum(hidden, 0) ** 2
    return gelu(hidden, config.feed_forward == "gelu_tanh")


def feed_forward_linear(config: ModelConfig, layer: Weights, name: str, x: Floats) -> Floats:
    y = x @ layer[f"blocks.feed_forward.{name}.kernel"]
    return y + layer[f"blocks.feed_forward.{name}.bias"] if config.ffn_bias else y


def gelu(x: Floats, tanh_form: bool) -> Floats:
    """Hendrycks & Gimpel 2016, section 2."""
    if tanh_form:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def experts(config: ModelConfig, layer: Weights, x: Floats) -> Floats:
    """Mixture of experts, from (S, D) to (S, D) (Jiang et al. 2024, section 2.1), with the shared
    experts, if any (Dai et al. 2024, equation 9)."""
    result = np.zeros(x.shape)
    for s in range(len(x)):
        for e, weight in reference_router.weights_of_experts(config, layer, x[s]).items():
            own = {name: w[e] for name, w in layer.items() if name.startswith(EXPERTS)}
            result[s] += weight * feed_forward(config, own, x[s])
    if config.shared_ffn_dim:
        shared = {name.replace(".shared.", "."): w for name, w in layer.items() if SHARED in name}
        result += feed_forward(config, shared, x)
    return result
