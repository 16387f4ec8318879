"""The largest singular values of stacked matrices, without LAPACK: its kernels in JAX wait inside
XLA's pool of threads on a CPU for other threads of that pool. When as many of them run as there are
threads, they wait for ever, which two on two cores did (`docs/log.md`)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

COUNT = 4
"""Singular values that are recorded of each matrix."""
_VECTORS, _ITERATIONS = 12, 12
"""Vectors that are iterated together, and how often. Without a gap in the spectrum, as in random
weights, the largest value comes out up to 2% too small; gaps make it exact."""
_SWEEPS, _LAST_SWEEPS = 2, 6
"""Rotations of each pair of vectors, in an iteration and for the values. One sweep is too little
for the vectors to part: values come out up to a third too large."""
_EXACT = jax.lax.Precision.HIGHEST


def largest_singular_values(matrices_LIO: Array) -> Array:
    """Return values_LK, float32, in descending order: `COUNT` of each matrix, or as many as it has.
    By power iteration of several vectors at once, from the same random ones each time (subspace
    iteration; Halko et al. 2011, algorithm 4.4)."""
    *_, inputs, outputs = matrices_LIO.shape
    vectors = min(_VECTORS, inputs, outputs)
    start_OV = jax.random.normal(jax.random.key(0), (outputs, vectors))
    right_LOV = jnp.broadcast_to(start_OV, (len(matrices_LIO), *start_OV.shape))

    def iterate(_: int, right_LOV: Array) -> Array:
        left_LIV = _orthonormal(_times(matrices_LIO, right_LOV), _SWEEPS)
        return _orthonormal(_times(matrices_LIO.swapaxes(-1, -2), left_LIV), _SWEEPS)

    right_LOV = jax.lax.fori_loop(0, _ITERATIONS, iterate, right_LOV)
    right_LOV = _orthonormal(right_LOV, _LAST_SWEEPS)
    values_LV = _lengths(_orthogonal(_times(matrices_LIO, right_LOV), _LAST_SWEEPS))
    return jnp.sort(values_LV, descending=True)[:, : min(COUNT, vectors)]


def _times(matrices: Array, vectors: Array) -> Array:
    return jnp.matmul(matrices, vectors, precision=_EXACT)


def _lengths(vectors_LNV: Array) -> Array:
    return jnp.sqrt(jnp.square(vectors_LNV).sum(axis=-2))


def _orthonormal(vectors_LNV: Array, sweeps: int) -> Array:
    vectors_LNV = _orthogonal(vectors_LNV, sweeps)
    lengths_LV = _lengths(vectors_LNV)
    return vectors_LNV / jnp.where(lengths_LV > 0, lengths_LV, 1)[:, None]


def _orthogonal(vectors_LNV: Array, sweeps: int) -> Array:
    """Return orthogonal vectors that span the same space, whose lengths are the singular values of
    the matrix of vectors: rotate pairs of vectors until all are orthogonal (one-sided Jacobi;
    Hestenes 1958). All vectors are in one of the pairs of a round."""
    vectors = vectors_LNV.shape[-1]
    half = -(-vectors // 2)
    order = _next_round(half)
    padding = ((0, 0), (0, 0), (0, 2 * half - vectors))

    def rotate(_: int, vectors_LNV: Array) -> Array:
        one, other = vectors_LNV[..., :half], vectors_LNV[..., half:]
        product = (one * other).sum(axis=-2, keepdims=True)
        difference = (other**2 - one**2).sum(axis=-2, keepdims=True)
        cotangent = difference / jnp.where(product == 0, 1, 2 * product)  # of the angle, doubled
        sign = jnp.where(cotangent < 0, -1, 1)
        tangent = sign / (jnp.abs(cotangent) + jnp.sqrt(1 + cotangent**2))
        tangent = jnp.where(product == 0, 0, tangent)
        cosine = jax.lax.rsqrt(1 + tangent**2)
        rotated = one - tangent * other, tangent * one + other
        return (jnp.concatenate(rotated, axis=-1) * jnp.tile(cosine, 2))[..., order]

    rounds = sweeps * (2 * half - 1)
    return jax.lax.fori_loop(0, rounds, rotate, jnp.pad(vectors_LNV, padding))[..., :vectors]


def _next_round(half: int) -> np.ndarray:
    """Return the order in which each vector of the first half gets another partner in the second:
    all but the first move on by a place. After 2 · half - 1 rounds all have met, and are back."""
    one, other = np.arange(half), np.arange(half, 2 * half)
    if half == 1:
        return np.concatenate([one, other])
    return np.concatenate([one[:1], other[:1], one[1:-1], other[1:], one[-1:]])
