"""The model against a float64 NumPy reference; causality, initialization, dropout, bfloat16."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.model.attention import causal_mask, plain_attention
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT, Forward
from rungs.model.kernels.cross_entropy import target_losses
from rungs.model.layers import Dropout
from rungs.step.state import named_arrays
from tests.support import reference_gpt
from tests.support.committed_runs import ROOT
from tests.support.configs import model_config
from tests.support.long import long_except
from tests.support.tiny_model import bind_and_jit, quick_jit, random_model, random_tokens

LLAMA: dict[str, Any] = {
    "norm": "rms_norm",
    "positions": "rope",
    "feed_forward": "swiglu",
    "ffn_bias": False,
    "attention_output_bias": False,
}
GEMMA = LLAMA | {
    "emb_dim": 20,
    "head_dim": 6,
    "ffn_dim": 28,
    "norm": "rms_norm_plus_one",
    "norm_placement": "around",
    "feed_forward": "geglu_tanh",
    "sliding_window": 3,
    "tied_embeddings": True,
    "embedding_scale": "sqrt_emb_dim",
}
EXPERTS = {"n_experts": 4, "experts_per_token": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "a-to-a": {"n_layers": 0, "positions": "none", "norm": "none"},
    "sinusoidal": {"positions": "sinusoidal"},
    "no-residual": {"residual": False, "norm": "none"},
    "norm-after": {"norm_placement": "after"},
    "attention-only": {"feed_forward": "none", "norm": "none", "qkv_bias": True, "n_heads": 1},
    "exact-gelu-without-biases": {
        **{"feed_forward": "gelu", "ffn_dim": 24},
        **{"attention_output_bias": False, "ffn_bias": False},
    },
    "norms-without-parameters": {"norm_parameters": False, "qk_norm": True},
    "windowed": {"sliding_window": 3, "n_layers": 1},
    "pattern-longer-than-the-model": {
        "layer_pattern": ["global", "sliding", "global"],
        "sliding_window": 2,
    },
    "headed-layer-norm": {"qk_norm": True, "norm_placement": "after", "n_kv_heads": 1},
    "geglu-with-biases": {"feed_forward": "geglu", "ffn_dim": 10, "norm": "rms_norm"},
    "experts-with-biases": {"n_experts": 5, "experts_per_token": 3, "ffn_dim": 6},
    "one-expert-each": {
        "n_experts": 3,
        "experts_per_token": 1,
        "feed_forward": "geglu_tanh",
        "norm_placement": "after",
    },
    "llama-3": LLAMA
    | {
        "emb_dim": 24,
        "n_heads": 6,
        "n_kv_heads": 2,
        "head_dim": 8,
        "rope_theta": 1000.0,
        # of the four pairs, one is fast enough to stay unscaled, one is in between, two are slow
        "rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_frequency_factor": 1.0,
            "high_frequency_factor": 4.0,
            "original_context_length": 64,
        },
    },
    "mistral": LLAMA | {"n_heads": 4, "n_kv_heads": 1, "sliding_window": 3, "ffn_dim": 20},
    "mixtral": LLAMA | EXPERTS | {"n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 12},
    "experts-weighted-among-all": EXPERTS | {"normalize_expert_weights": False, "ffn_dim": 6},
    "olmo-3": LLAMA
    | {
        **{"emb_dim": 20, "n_layers": 5, "n_heads": 4, "n_kv_heads": 2, "head_dim": 12},
        **{"norm_placement": "output", "qk_norm": True, "qk_norm_scope": "all_heads"},
        **{"sliding_window": 3, "layer_pattern": ["sliding", "sliding", "sliding", "global"]},
        **{"rope_theta": 60.0, "sliding_rope_theta": 60.0},
        "rope_scaling": {
            **{"type": "yarn", "factor": 6.0, "attention_factor": 1.3},
            **{"low_frequency_factor": 1.0, "high_frequency_factor": 6.0},
            "original_context_length": 60,
        },
    },
    "windows-and-no-rotation": LLAMA
    | {"n_layers": 4, "sliding_window": 2, "layer_pattern": ["sliding", "nope", "global"]},
    "norms-of-all-heads": {
        **{"norm": "rms_norm_plus_one", "norm_placement": "output", "feed_forward": "none"},
        **{"qk_norm": True, "qk_norm_scope": "all_heads", "n_layers": 3},
    },
    "gemma-2": GEMMA
    | {
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "layer_pattern": ["sliding", "global"],
        "query_pre_attn_scalar": 5.0,
        "attention_soft_cap": 1.5,
        "final_soft_cap": 3.0,
    },
    "gemma-3": GEMMA
    | {
        "n_layers": 8,
        "n_heads": 3,
        "n_kv_heads": 1,
        "layer_pattern": ["sliding", "sliding", "global"],
        "qk_norm": True,
        "rope_theta": 1000.0,
        "rope_scaling": {"type": "linear", "factor": 8.0},
        "sliding_rope_theta": 10.0,
    },
}
VARIANTS["recipe"] = LLAMA | {
    **{"emb_dim": 20, "n_layers": 7, "n_heads": 6, "n_kv_heads": 3, "head_dim": 6},
    **{"sliding_window": 3, "layer_pattern": ["sliding", "sliding", "global"]},
    **{"feed_forward": "relu_squared", "norm_parameters": False, "embedding_norm": True},
    **{"residual_scalars": True, "value_embedding_every": 2, "qk_norm": True},
}
VARIANTS["latent"] = LLAMA | {
    **{"n_layers": 3, "n_heads": 3, "head_dim": 5, "attention_output_bias": True},
    **{"sliding_window": 3, "layer_pattern": ["sliding", "global", "nope"]},
    "latent_attention": {"kv_rank": 7, "query_rank": 9, "rope_dim": 6, "value_dim": 8},
}
VARIANTS["latent-yarn"] = LLAMA | {
    **{"n_heads": 2, "rope_theta": 60.0, "norm_epsilon": 1e-3},
    "latent_attention": {"kv_rank": 7, "rope_dim": 8, "rope_pairs": "neighbors"},
    "rope_scaling": {
        **{
            "type": "yarn",
            "whole_pairs": False,
            "factor": 6.0,
            "attention_factor": 1.3,
            "score_mscale": 0.7,
        },
        **{"low_frequency_factor": 1.0, "high_frequency_factor": 6.0},
        "original_context_length": 60,
    },
}
VARIANTS["deepseek-v2"] = LLAMA | {
    **{"n_experts": 6, "experts_per_token": 3, "ffn_dim": 5, "shared_ffn_dim": 7},
    "normalize_expert_weights": False,
    "expert_routing": {"groups": 3, "groups_per_token": 2, "weight_factor": 1.7},
}
VARIANTS["deepseek-v3"] = LLAMA | {
    **{"n_layers": 5, "n_dense_layers": 2, "dense_ffn_dim": 9, "sliding_window": 3},
    "layer_pattern": ["sliding", "global", "nope"],
    **{"n_experts": 8, "experts_per_token": 3, "ffn_dim": 5, "shared_ffn_dim": 6},
    "expert_routing": {
        **{"scores": "sigmoid", "balance_bias": True, "weight_factor": 2.5},
        **{"groups": 4, "groups_per_token": 2, "router_bias": True},
    },
}
VARIANTS["gpt-oss"] = LLAMA | {
    **{"n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "attention_sinks": True, "qkv_bias": True},
    **{"sliding_window": 3, "layer_pattern": ["sliding", "global"], "ffn_dim": 6},
    **{"feed_forward": "swiglu_clamped", "ffn_bias": True, "attention_soft_cap": 2.0},
    **{"n_experts": 4, "experts_per_token": 2, "expert_routing": {"router_bias": True}},
}
VARIANTS["latent-with-sinks-and-gates"] = VARIANTS["latent-yarn"] | {
    **{"attention_sinks": True, "attention_output_gate": "head"},
}
VARIANTS["gated-heads"] = {"attention_output_gate": "head", "n_heads": 4, "qkv_bias": True}
VARIANTS["qwen3-next"] = LLAMA | {
    **{"emb_dim": 20, "n_layers": 5, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 24},
    **{"norm": "rms_norm_plus_one", "qk_norm": True, "attention_output_gate": "element"},
    **{"rope_share": 0.5, "layer_pattern": ["delta_net", "delta_net", "global"]},
    "delta_net": {
        **{"key_heads": 2, "key_dim": 6, "value_heads": 6, "value_dim": 5, "norm_epsilon": 1e-3},
    },
}
VARIANTS["olmo-hybrid"] = LLAMA | {
    **{"n_layers": 4, "n_heads": 4, "ffn_dim": 24, "qk_norm": True, "qk_norm_scope": "all_heads"},
    **{"positions": "none", "norm_placement": "output"},
    "layer_pattern": ["delta_net", "global"],
    "delta_net": {
        **{"key_heads": 3, "key_dim": 4, "value_dim": 7, "convolution_width": 3},
        **{"negative_eigenvalues": True, "norm_placement": "before", "norm_epsilon": 1e-3},
    },
}
VARIANTS["only-delta-net"] = {
    **{"positions": "none", "layer_pattern": ["delta_net"]},
    "delta_net": {"key_heads": 2, "key_dim": 4, "convolution_width": 1},
}
VARIANTS["value-embeddings-of-all"] = {"value_embedding_every": 1, "emb_dim": 8, "n_heads": 2}
VARIANTS["residual-scalars"] = {"residual_scalars": True, "norm_placement": "after"}


def forward(model: GPT, tokens_BS: np.ndarray, **options: Any) -> Forward:
    return bind_and_jit(lambda model, tokens_BS: model.forward(tokens_BS, **options), model)(
        tokens_BS
    )


MASKED = ["windowed", "mixtral", "gemma-2", "recipe"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_matches_the_float64_reference(variant: str) -> None:
    model = random_model(**VARIANTS[variant])
    tokens_BS = random_tokens(3, 7)
    weights = {name: np.asarray(a, np.float64) for name, a in named_arrays(model).items()}
    expected = [reference_gpt.forward(model.config, weights, tokens) for tokens in tokens_BS]
    result = forward(model, tokens_BS, keep_hidden_states=True)
    assert result.logits_BSV.dtype == jnp.float32
    assert result.hidden_states is not None
    found = [*result.hidden_states, result.logits_BSV]
    for one, other in zip(found, map(np.stack, zip(*expected, strict=True)), strict=True):
        # float32 rounding: about 1e-7 per term, in sums of up to 64 terms and eight blocks
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * np.abs(other).max())


def test_keeping_hidden_states_does_not_change_other_outputs() -> None:
    model = random_model(**VARIANTS["mixtral"])
    tokens_BS = random_tokens(3, 7)
    kept, other = forward(model, tokens_BS, keep_hidden_states=True), forward(model, tokens_BS)
    assert other.hidden_states is None
    assert_same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    assert_same(kept.logits_BSV, other.logits_BSV)
    assert_same(bind_and_jit(GPT.__call__, model)(tokens_BS), other.logits_BSV)
    jax.tree.map(assert_same, kept.routing, other.routing)


@pytest.mark.parametrize(("masked", "batched", "kv_heads"), [(False, False, 4), (True, True, 2)])
def test_plain_attention_matches_jax_and_numpy(
    masked: bool, batched: bool, kv_heads: int, key: jax.Array
) -> None:
    before = (2, 6) if batched else (6,)
    query = jax.random.normal(key, (*before, 4, 5))
    key_, value = jax.random.normal(jax.random.fold_in(key, 1), (2, *before, kv_heads, 5))
    mask = causal_mask(6) if masked else None
    found = plain_attention(query, key_, value, mask)
    np.testing.assert_allclose(
        found, jax.nn.dot_product_attention(query, key_, value, mask=mask), rtol=1e-5, atol=1e-6
    )
    arrays = [np.asarray(a, np.float64).reshape(-1, 6, *a.shape[-2:]) for a in (query, key_, value)]
    numpy_mask = None if mask is None else np.asarray(mask)
    expected = np.stack(
        [reference_gpt.attention(q, k, v, numpy_mask) for q, k, v in zip(*arrays, strict=True)]
    )
    np.testing.assert_allclose(found, expected.reshape(query.shape), rtol=1e-5, atol=1e-6)


def reachable_positions(architecture: ModelConfig, length: int) -> np.ndarray:
    """Return a matrix that is true at (s, t) if token t can reach the logits at s."""
    seen_SS = np.eye(length, dtype=bool)
    for kind in architecture.layer_kinds():
        window = architecture.sliding_window if kind == "sliding" else None
        for s in reversed(range(length)):
            first = max(0, s + 1 - (window or length))
            seen_SS[s] = seen_SS[first : s + 1].any(axis=0)
    return seen_SS


@pytest.mark.parametrize("variant", long_except(MASKED[:3], MASKED))
def test_logits_depend_on_visible_tokens_only(variant: str) -> None:
    model = random_model(**VARIANTS[variant])
    length = model.config.context_length
    x_SD = np.random.default_rng(2).normal(size=(2, length, model.config.emb_dim))
    embedded_SD, direction_SD = jnp.asarray(x_SD, jnp.float32)
    tokens_BS = jnp.asarray(random_tokens(1, length))

    def slopes(model: GPT) -> jax.Array:
        """Return slope_SS: how a mixture of the logits at s changes with the embedding at t."""

        def decode(x_SD: jax.Array) -> jax.Array:
            hidden = model.hidden(tokens_BS, embedded_BSD=x_SD[None])
            return model.unembed(hidden.x_BSD)[0]

        logits_SV, pull = jax.vjp(decode, embedded_SD)
        mixture_V = jax.random.normal(jax.random.key(3), logits_SV.shape[1:])

        def slope_S(at_S: jax.Array) -> jax.Array:
            (gradient_SD,) = pull(at_S[:, None] * mixture_V)
            return (gradient_SD * direction_SD).sum(axis=-1)

        return jax.lax.map(slope_S, jnp.eye(length))

    influence_SS = np.abs(bind_and_jit(slopes, model)())
    seen_SS = reachable_positions(model.config, length)
    assert not np.triu(seen_SS, k=1).any()
    assert (influence_SS[~seen_SS] == 0).all()
    assert (influence_SS[seen_SS] > 0).all()


@pytest.mark.parametrize("variant", ["gpt2", "mixtral"])
def test_rows_of_a_batch_are_independent(variant: str) -> None:
    model = random_model(**VARIANTS[variant])
    tokens_BS = random_tokens(4, 8)
    logits = bind_and_jit(GPT.__call__, model)
    alone_BSV = np.concatenate([logits(row[None]) for row in tokens_BS])
    np.testing.assert_allclose(logits(tokens_BS), alone_BSV, rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_initial_loss_of_a_committed_run_is_ln_vocab_size() -> None:
    architecture = run_config.load_run(ROOT / "runs/recipe").model
    shape = (4, min(64, architecture.context_length) + 1)
    tokens_BS = np.random.default_rng(1).integers(architecture.vocab_size, size=shape)

    @quick_jit
    def initial_loss(tokens_BS: jax.Array) -> jax.Array:
        model = GPT(architecture, jax.random.key(0))
        return target_losses(model(tokens_BS[:, :-1]), tokens_BS[:, 1:]).mean()

    uniform = math.log(architecture.vocab_size)
    assert float(initial_loss(tokens_BS)) == pytest.approx(uniform, rel=0.02)


def fresh_model(architecture: ModelConfig) -> GPT:
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(architecture, jax.random.key(0))))
    state = quick_jit(lambda key: nnx.state(GPT(architecture, key)))(jax.random.key(0))
    return nnx.merge(graph, state)


@pytest.fixture(scope="module", params=[{}, GEMMA | EXPERTS], ids=["gpt2", "gemma-of-experts"])
def fresh(request: pytest.FixtureRequest) -> GPT:
    """A model with initial weights, large enough for statistics."""
    larger = {"vocab_size": 512, "emb_dim": 128, "ffn_dim": 256, "n_layers": 8}
    architecture = model_config(**request.param | larger)
    return fresh_model(architecture)


@pytest.mark.long
def test_initial_loss_is_ln_vocab_size(fresh: GPT) -> None:
    tokens_BS = np.random.default_rng(1).integers(512, size=(8, 9))
    logits_BSV = forward(fresh, tokens_BS[:, :-1]).logits_BSV
    # logits have a variance of 128 · 0.02², and add half of that to ln V
    assert float(target_losses(logits_BSV, jnp.asarray(tokens_BS[:, 1:])).mean()) == pytest.approx(
        math.log(512), rel=0.02
    )


def test_gpt2_initialization(fresh: GPT) -> None:
    weights, architecture = named_arrays(fresh), fresh.config
    assert ("head.kernel" in weights) != architecture.tied_embeddings
    for name, array in weights.items():
        if name.endswith("bias"):
            assert (array == 0).all()
        elif name.endswith("scale"):
            assert (array == (0 if architecture.norm == "rms_norm_plus_one" else 1)).all()
        else:
            residual = name.endswith(("attention.output.kernel", "down.kernel"))
            sigma = 0.02 / math.sqrt(16) if residual else 0.02
            # the standard error of a standard deviation is σ/√(2n)
            error = 5 * sigma / math.sqrt(2 * array.size)
            assert float(array.std()) == pytest.approx(sigma, abs=error)
    layers = weights["blocks.attention.query.kernel"]
    assert not np.array_equal(layers[0], layers[1])
    if architecture.n_experts:
        experts = weights["blocks.feed_forward.up.kernel"][0]
        assert not np.array_equal(experts[0], experts[1])


def test_projections_into_the_residual_stream_may_start_at_zero() -> None:
    plain, zeroed = (
        named_arrays(fresh_model(model_config(**EXPERTS, zero_init_residual=value)))
        for value in (False, True)
    )
    for name, array in zeroed.items():
        if name.endswith(("attention.output.kernel", "feed_forward.down.kernel")):
            assert not array.any()
        else:
            np.testing.assert_array_equal(array, plain[name])


def test_truncated_normal_initialization() -> None:
    architecture = model_config(emb_dim=128, ffn_dim=384, init="truncated_normal")
    weights = named_arrays(fresh_model(architecture))
    kernel = weights["blocks.feed_forward.up.kernel"]
    sigma = math.sqrt(2 / (128 + 384))
    assert float(jnp.abs(kernel).max()) <= 3 * sigma
    # a normal truncated at ±3σ has 0.98658 of its standard deviation
    assert float(kernel.std()) == pytest.approx(0.98658 * sigma, rel=0.01)


def test_dropout_keeps_the_mean_and_each_fold_has_its_own_mask(key: jax.Array) -> None:
    dropout = Dropout.of(0.25, key, jnp.arange(4))
    x = jnp.ones((4, 10_000))
    dropped = dropout(x)
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    assert float(dropped.mean()) == pytest.approx(1, abs=0.02)
    assert not np.array_equal(dropout.fold(1)(x), dropout.fold(2)(x))


def test_dropout_is_deterministic_and_off_by_default(key: jax.Array) -> None:
    model = random_model(n_layers=2)
    tokens_BS = jnp.zeros((1, 8), jnp.int32)

    def logits_at(rate: float) -> jax.Array:
        dropout = Dropout.of(rate, key, jnp.arange(1))
        return bind_and_jit(lambda model, tokens_BS: model(tokens_BS, dropout), model)(tokens_BS)

    without = bind_and_jit(GPT.__call__, model)(tokens_BS)
    assert np.array_equal(without, logits_at(0.0))
    once, again = logits_at(0.5), logits_at(0.5)
    assert np.array_equal(once, again)
    assert not np.array_equal(once, without)


def test_bfloat16_stays_close_to_float32() -> None:
    model = random_model(**VARIANTS["gemma-2"])
    tokens_BS = random_tokens(2, 8)
    exact = forward(model, tokens_BS).logits_BSV
    rounded = forward(model, tokens_BS, compute=Compute(jnp.dtype(jnp.bfloat16))).logits_BSV
    assert rounded.dtype == jnp.float32
    assert not np.array_equal(exact, rounded)
    # bfloat16 has 8 significant bits: about 0.4% per rounding
    assert np.std(rounded - exact) < 0.02 * np.std(exact)
