"""Attention by Pallas kernels: what they compute, step by step on the CPU, and the program as
lowered for CUDA."""

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from rungs.config.run_config import RunConfig
from rungs.model.attention import causal_kernel, causal_mask
from rungs.model.kernels.blockwise_attention import Scoring
from rungs.model.kernels.triton_attention import pallas_attention
from rungs.objectives.table import make_train_step
from rungs.parallel import target_device
from rungs.parallel.sharding import Layout
from rungs.parallel.target_device import Target
from rungs.step.state import AbstractState
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.tiny_model import quick_jit

Arrays = tuple[jax.Array, ...]


def arrays(
    length: int, width: int, heads: int, kv_heads: int, dtype: str = "float32"
) -> tuple[jax.Array, ...]:
    """Return query, key, value and a gradient of the output."""
    rng, per_head = np.random.default_rng(length), (heads, kv_heads, kv_heads, heads)
    return tuple(jnp.asarray(rng.normal(size=(2, length, n, width)), dtype) for n in per_head)


def by_kernels(scoring: Scoring, query: Any, key: Any, value: Any, dy: Any) -> Arrays:
    """Return the output and the gradients of query, key and value."""
    attend = functools.partial(pallas_attention, documents=None, scoring=scoring, interpret=True)
    y, pull = jax.vjp(attend, query, key, value)
    return y, *pull(dy)


def by_definition(scoring: Scoring, *inputs: jax.Array) -> tuple[np.ndarray, ...]:
    """Return the same in float64."""
    query, key, value, dy = (np.asarray(x, np.float64).swapaxes(1, 2) for x in inputs)
    group = query.shape[1] // key.shape[1]
    all_keys, all_values = (x.repeat(group, axis=1) for x in (key, value))
    cap = scoring.soft_cap or 1e9
    tanh = np.tanh(query @ all_keys.swapaxes(2, 3) * scoring.scale / cap)
    mask = causal_mask(query.shape[2], scoring.window)
    weights = np.where(mask, np.exp(cap * tanh - (cap * tanh).max(axis=-1, keepdims=True)), 0)
    weights /= weights.sum(axis=-1, keepdims=True)
    dweights = dy @ all_values.swapaxes(2, 3)
    dscores = weights * (dweights - (dweights * weights).sum(axis=-1, keepdims=True))
    dproducts = dscores * scoring.scale * (1 - tanh * tanh)
    dkey, dvalue = (
        x.reshape(*key.shape[:2], group, *key.shape[2:]).sum(axis=2)
        for x in (dproducts.swapaxes(2, 3) @ query, weights.swapaxes(2, 3) @ dy)
    )
    return tuple(
        x.swapaxes(1, 2) for x in (weights @ all_values, dproducts @ all_keys, dkey, dvalue)
    )


def largest_error(scoring: Scoring, inputs: Arrays) -> float:
    """Return the error relative to the largest element."""
    found = quick_jit(functools.partial(by_kernels, scoring))(*inputs)
    errors = []
    for one, exact in zip(found, by_definition(scoring, *inputs), strict=True):
        assert one.shape == exact.shape
        assert one.dtype == inputs[0].dtype
        distance = np.abs(np.asarray(one, np.float64) - exact).max()
        errors.append(distance / np.abs(exact).max(initial=1.0))
    return float(max(errors))


CASE = 130, 24, 4, 2, 20, 2.0
MORE: list[tuple[Any, ...]] = [
    (130, 80, 2, 1, None, None),
    (1, 16, 1, 1, 1000, 0.5),
    (33, 256, 4, 1, 2, 2.0),
    (257, 128, 3, 3, 50, 50.0),
    (300, 8, 2, 1, 16, None),
]


@pytest.mark.parametrize(
    ("length", "width", "heads", "kv_heads", "window", "cap"),
    [CASE, *(pytest.param(*case, marks=pytest.mark.long) for case in MORE)],
)
def test_kernels_match_float64(
    length: int, width: int, heads: int, kv_heads: int, window: int | None, cap: float | None
) -> None:
    scoring = Scoring(2 * width**-0.5, window, cap)
    error = largest_error(scoring, arrays(length, width, heads, kv_heads))
    assert error < 3e-6


@pytest.mark.parametrize(
    ("dtype", "limit"), [("bfloat16", 5e-3), pytest.param("float16", 1e-3, marks=pytest.mark.long)]
)
def test_in_16_bits_only_operands_are_rounded(dtype: str, limit: float) -> None:
    error = largest_error(Scoring(1 / 4, 100, 20.0), arrays(130, 64, 2, 1, dtype))
    assert error < limit


AMPERE, TURING = Target("gpu", "8.6"), Target("gpu", "7.5")


def calls_in(traced: Any) -> tuple[dict[str, int], str]:
    """Return how often a program calls each kernel, and its text as lowered for CUDA."""
    text: str = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    return collections.Counter(re.findall(r'name = "_(\w+)"', text)), text


@pytest.mark.parametrize(
    ("mode", "remat", "forwards"),
    [("fsdp", "dots", 1), pytest.param("dp", "full", 2, marks=pytest.mark.long)],
)
def test_a_step_runs_each_kernel_once_per_layer(mode: str, remat: str, forwards: int) -> None:
    """In a loop over pairs of layers, inside `jax.shard_map`, which checks along which mesh axes
    results vary. As lowered for CUDA, so that no GPU is needed."""
    kinds = {"layer_pattern": ["sliding", "global"], "sliding_window": 16, "n_layers": 4}
    model = model_config(context_length=128, attention_soft_cap=50.0, n_kv_heads=1, **kinds)
    sharding = {"mode": mode, "data": 2, "tensor": 1}
    loop = {"remat": remat, "scan_unroll": 1}
    train = train_config(compute_dtype="bfloat16", sharding=sharding, **loop)
    mesh = mesh_of(2)
    with target_device.trace_for(AMPERE, is_compiled=True):
        state = AbstractState(RunConfig(model, train), 1, mesh)
        filled = state.fill(state.weights, state.optimizer)  # type: ignore[arg-type]
        place = NamedSharding(mesh, Layout(mesh).batch_spec(3))
        batch = jax.ShapeDtypeStruct((1, 4, 128), jnp.int32, sharding=place)
        step: Any = make_train_step(train, mesh)
        calls, text = calls_in(step.trace(*filled, batch, batch).traced)
    assert calls == {"attend": 2 * forwards, "query_gradient": 2, "key_gradients": 2}
    assert "/attention/" in text  # the named scope by which a plan finds kernels


@pytest.mark.parametrize(
    ("target", "is_compiled", "width", "dtype", "cap", "kernels"),
    [
        (AMPERE, True, 256, "bfloat16", None, {"attend": 1}),
        (AMPERE, True, 64, "float32", None, {"attend": 1}),
        (AMPERE, True, 64, "bfloat16", 30.0, {"attend": 1}),
        (AMPERE, False, 256, "bfloat16", None, {}),
        (AMPERE, True, 288, "bfloat16", None, {}),
        (TURING, True, 256, "float16", None, {}),
    ],
)
def test_attention_never_has_all_scores_in_memory(
    target: Target,
    is_compiled: bool,
    width: int,
    dtype: str,
    cap: float | None,
    kernels: dict[str, int],
) -> None:
    query, key, value, _ = arrays(512, width, 2, 1, dtype)
    with target_device.trace_for(target, is_compiled):
        scoring = Scoring(0.1, soft_cap=cap)
        run = functools.partial(causal_kernel(query, scoring).causal_attention, scoring=scoring)
        calls, text = calls_in(jax.jit(run).trace(query, key, value))
    assert calls == kernels
    assert "512x512x" not in text
