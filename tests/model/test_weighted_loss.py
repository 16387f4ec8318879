"""The weighted cross-entropy against its definition: loss, gradients and statistics."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from rungs.model.attention import apply_soft_cap
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.model.kernels import cross_entropy
from rungs.model.kernels.matmul import matmul
from rungs.parallel import collectives
from rungs.parallel.sharding import TENSOR
from tests.support.configs import mesh_of
from tests.support.tiny_model import bind_and_jit, quick_jit, random_model

ROUNDING = {"float32": 3e-6, "bfloat16": 1.5e-2}
"""Relative to the largest element."""
WIDTH, VOCABULARY, PADDED = 16, 50, 56
CAP, TEMPERATURE = 3.0, 0.7
CHUNKS = {"one-chunk": 1 << 30, "chunks": 1}


def clipped_ratio(log_probs: Any, advantages: Any, old_log_probs: Any, xp: Any = jnp) -> Any:
    """Return the weights of a clipped policy gradient: A · ρ, or 0 where the clip is active."""
    ratios = xp.exp(log_probs - old_log_probs)
    clipped = xp.where(advantages > 0, ratios > 1.3, ratios < 0.8)
    return xp.where(clipped, 0.0, advantages * ratios)


class Batch(NamedTuple):
    x: Any
    matrix: Any
    targets: Any
    extras: Any


class Result(NamedTuple):
    loss: Any
    log_probs: Any
    entropies: Any
    x_gradient: Any
    matrix_gradient: Any


def batch(tokens: int) -> Batch:
    """Return random arrays, with some targets that don't count. Their extras are NaN."""
    rng = np.random.default_rng(tokens)
    targets = rng.integers(-3, VOCABULARY, tokens).astype(np.int32)
    extras = rng.normal(size=tokens), -np.log(VOCABULARY) + 0.3 * rng.normal(size=tokens)
    x, matrix = rng.normal(size=(tokens, WIDTH)), 0.3 * rng.normal(size=(WIDTH, PADDED))
    counted = tuple(np.where(targets < 0, np.nan, extra).astype(np.float32) for extra in extras)
    return Batch(x.astype(np.float32), matrix.astype(np.float32), targets, counted)


def head(x_MD: jax.Array, matrix_DV: jax.Array) -> jax.Array:
    """Return capped logits, −inf for the last rows of the vocabulary."""
    logits = apply_soft_cap(matmul(x_MD, matrix_DV), CAP) / TEMPERATURE
    rows = logits.shape[-1]
    is_token = collectives.vocabulary_offset(rows) + jnp.arange(rows) < VOCABULARY
    return jnp.where(is_token, logits, -jnp.inf)


def defined(given: Batch) -> Result:
    """Return everything in float64 NumPy, by its definition."""
    arrays = given.x, given.matrix, *given.extras
    x, matrix, advantages, old = (np.asarray(array, np.float64) for array in arrays)
    counts, own = given.targets >= 0, np.maximum(given.targets, 0)
    capped = CAP * np.tanh(x @ matrix[:, :VOCABULARY] / CAP)
    logits = capped / TEMPERATURE
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    p, rows = np.exp(log_p), np.arange(len(own))
    log_probs = np.where(counts, log_p[rows, own], 0)
    weights = np.where(counts, clipped_ratio(log_probs, advantages, old, np), 0)
    logits_gradient = weights[:, None] * (p - np.eye(VOCABULARY)[own])
    products = logits_gradient / TEMPERATURE * (1 - (capped / CAP) ** 2)
    matrix_gradient = np.pad(x.T @ products, ((0, 0), (0, PADDED - VOCABULARY)))
    entropies = np.where(counts, -(p * log_p).sum(axis=1), 0)
    loss = -(weights * log_probs).sum()
    return Result(loss, log_probs, entropies, products @ matrix[:, :VOCABULARY].T, matrix_gradient)


def computed(given: Batch) -> Result:
    """Return the kernel's results."""

    def loss(x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, Any]:
        return cross_entropy.weighted_loss(
            head, clipped_ratio, x, matrix, given.targets, given.extras
        )

    (total, found), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        given.x, given.matrix
    )
    return Result(total, found.log_probs_M, found.entropies_M, *gradients)


def assert_near(found: Any, wanted: Any, tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        wide = np.asarray(other, np.float64)
        assert one.shape == wide.shape
        distance = np.abs(np.asarray(one, np.float64) - wide).max(initial=0)
        assert distance <= tolerance * np.abs(wide).max(initial=1.0)


@pytest.mark.parametrize("max_bytes", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("tokens", [1, 200])
def test_loss_gradients_and_statistics_match_float64(
    tokens: int, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cross_entropy.LOGITS_BYTES, "cpu", max_bytes)
    given = batch(tokens)
    found, wanted = quick_jit(computed)(given), defined(given)
    assert_near(found, wanted, ROUNDING["float32"])
    assert {array.dtype for array in found} == {jnp.dtype("float32")}


def test_the_loss_without_a_gradient_is_the_same() -> None:
    given, wanted = batch(200), defined(batch(200))
    loss, found = quick_jit(functools.partial(cross_entropy.weighted_loss, head, clipped_ratio))(
        *given
    )
    assert_near((loss, *found), wanted[:3], ROUNDING["float32"])


def test_statistics_have_no_gradient() -> None:
    given = batch(8)

    def sums(x: jax.Array) -> jax.Array:
        _, found = cross_entropy.weighted_loss(head, clipped_ratio, x, *given[1:])
        return found.log_probs_M.sum() + found.entropies_M.sum()

    assert not np.asarray(quick_jit(jax.grad(sums))(given.x)).any()


def test_a_vocabulary_split_over_devices_gives_the_same() -> None:
    given = batch(200)
    columns, whole = PartitionSpec(None, TENSOR), PartitionSpec()
    in_specs = Batch(whole, columns, whole, (whole, whole))
    out_specs = Result(whole, whole, whole, whole, columns)

    def on_each_device(given: Batch) -> Result:
        return computed(given._replace(x=collectives.to_varying(given.x, TENSOR)))

    def with_summed_gradient(given: Batch) -> Result:
        found = on_each_device(given)
        return found._replace(x_gradient=collectives.psum(found.x_gradient, TENSOR))

    sharded = jax.shard_map(
        with_summed_gradient, mesh=mesh_of(1, 4), in_specs=(in_specs,), out_specs=out_specs
    )
    assert_near(quick_jit(sharded)(given), defined(given), ROUNDING["float32"])


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gemma": {
        "positions": "rope",
        "norm": "rms_norm_plus_one",
        "tied_embeddings": True,
        "n_kv_heads": 1,
        "final_soft_cap": 4.0,
    },
}


def with_gradient(loss: Any, model: GPT) -> tuple[list[Any], dict[Any, np.ndarray]]:
    """Return the loss, log-probabilities and entropies, and the gradient of each parameter."""
    graph, state = nnx.split(model)
    of_state = jax.value_and_grad(lambda state: loss(nnx.merge(graph, state)), has_aux=True)
    (total, statistics), gradient = quick_jit(of_state)(state)
    arrays = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(gradient)}
    return [total, *statistics], arrays


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("gemma", "float32"), pytest.param("gpt2", "bfloat16", marks=pytest.mark.long)],
)
def test_a_model_has_the_gradients_of_the_plain_form(
    architecture: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cross_entropy.LOGITS_BYTES, "cpu", 1)
    model = random_model(context_length=40, n_layers=1, **ARCHITECTURES[architecture])
    rng, compute = np.random.default_rng(0), Compute(jnp.dtype(dtype))
    tokens_BS = jnp.asarray(rng.integers(32, size=(4, 40)))
    targets_BS = jnp.asarray(rng.integers(-8, 32, size=(4, 40)))
    advantages_BS, noise_BS = jnp.asarray(rng.normal(size=(2, 4, 40)), jnp.float32)
    extras = advantages_BS, noise_BS - math.log(32)

    def ours(model: GPT) -> tuple[jax.Array, Any]:
        found = model.weighted_loss(
            tokens_BS, targets_BS, clipped_ratio, extras, TEMPERATURE, compute=compute
        )
        return found.total, (found.log_probs_BS, found.entropies_BS)

    def plain(model: GPT) -> tuple[jax.Array, Any]:
        log_p = jax.nn.log_softmax(model(tokens_BS, compute=compute) / TEMPERATURE)
        own = jnp.take_along_axis(log_p, jnp.maximum(targets_BS, 0)[..., None], -1)[..., 0]
        weights = jax.lax.stop_gradient(clipped_ratio(own, *extras))
        loss = -jnp.where(targets_BS >= 0, weights * own, 0).sum()
        entropies = -(jnp.exp(log_p) * log_p).sum(axis=-1)
        return loss, tuple(jnp.where(targets_BS >= 0, a, 0) for a in (own, entropies))

    (found, found_gradient), (wanted, wanted_gradient) = (
        with_gradient(side, model) for side in (ours, plain)
    )
    assert_near(found, wanted, ROUNDING[dtype])
    for path, gradient in wanted_gradient.items():
        largest = np.abs(gradient).max()
        np.testing.assert_allclose(
            found_gradient[path], gradient, rtol=0, atol=5 * ROUNDING[dtype] * largest
        )
    log_probs = functools.partial(GPT.log_probs, temperature=TEMPERATURE, compute=compute)
    log_probs_BS = bind_and_jit(log_probs, model)(tokens_BS, targets_BS)
    assert_near([log_probs_BS], [found[1]], ROUNDING["float32"])


@pytest.mark.parametrize(("vocabulary", "longest"), [(96, 16), (96, 1000), (50, 16), (33, 8)])
def test_one_pass_over_the_logits_of_a_gpu(
    vocabulary: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of equal size, and where all but some of the logits are −∞."""
    monkeypatch.setattr(cross_entropy, "LONGEST_ROW", longest)
    logits_MV = 30 * np.random.default_rng(0).normal(size=(6, vocabulary)).astype(np.float32)
    logits_MV[:, -7:] = -np.inf
    logits_MV[0, :-9] = -np.inf
    largest_M, totals_M = cross_entropy._in_one_pass(jnp.asarray(logits_MV))
    np.testing.assert_array_equal(largest_M, logits_MV.max(axis=-1))
    exact_MV = np.exp(logits_MV.astype(np.float64) - logits_MV.max(axis=-1, keepdims=True))
    np.testing.assert_allclose(totals_M, exact_MV.sum(axis=-1), rtol=1e-6)
