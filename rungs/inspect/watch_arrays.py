"""Size of weights, gradients and updates, for each layer and kind of array. Axes as in
`model/gpt.py`."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.config.model_config import ModelConfig
from rungs.model.layers import layers_with
from rungs.parallel.sharding import BLOCKS, dotted, padded_axis
from rungs.run.layer_record import ALL_ARRAYS, GRADIENT, SINGULAR_VALUE, UPDATE, WEIGHT

Statistics = dict[str, dict[str, Array]]
"""By kind of array and by statistic, a number per layer."""
_ITERATIONS = 48
"""Of power iteration. Without a gap below it, as in random weights, the largest singular value
comes out up to 2% too small; a gap makes it exact."""


class Change(NamedTuple):
    """One step's change of the trained parameters, in trees of the same structure."""

    before: nnx.State
    gradient: nnx.State
    after: nnx.State


def array_statistics(change: Change, model: ModelConfig) -> Statistics:
    """Return, for each kind of trained array, the root mean squares of weights, gradients and
    updates of each layer, and the largest singular value of its matrix; of arrays outside the
    blocks, a single root mean square. `ALL_ARRAYS` is all arrays of a layer together. Kernels of
    experts have no singular value: that would take the time of a matrix for each expert. A layer
    that lacks an array has NaN."""
    found: Statistics = {}
    sums_L: dict[str, Array] = {}
    totals_L = np.zeros(model.n_layers)
    for path, weight, gradient, update in _each(change):
        in_blocks = path[0] == BLOCKS
        count = _count(weight, model.vocab_size, in_blocks)
        squares = {
            name: _sum_of_squares(array, in_blocks)
            for name, array in (
                (WEIGHT, weight.get_value()),
                (GRADIENT, gradient),
                (UPDATE, update),
            )
        }
        name = dotted(path[1:] if in_blocks else path)
        found[name] = {key: jnp.sqrt(of_array / count) for key, of_array in squares.items()}
        if in_blocks:
            layers = np.array(layers_with(weight, model.n_layers))
            totals_L[layers] += count
            for key, of_array in squares.items():
                before_L = sums_L.get(key, jnp.zeros(model.n_layers))
                sums_L[key] = before_L.at[layers].add(of_array)
            if weight.inputs and "experts" not in weight.axes:
                found[name][SINGULAR_VALUE] = largest_singular_value(_matrices(weight))
            none_L = jnp.full(model.n_layers, jnp.nan)
            found[name] = {key: none_L.at[layers].set(own) for key, own in found[name].items()}
    if not sums_L:
        return found
    return {ALL_ARRAYS: {key: jnp.sqrt(sum_L / totals_L) for key, sum_L in sums_L.items()}} | found


def _each(change: Change) -> Iterator[tuple[tuple[Any, ...], nnx.Variable, Array, Array]]:
    """Yield path, weight, gradient and update of each parameter."""
    gradient, after = (dict(nnx.to_flat_state(state)) for state in change[1:])
    for path, weight in nnx.to_flat_state(change.before):
        update = after[path].get_value() - weight.get_value()
        yield path, weight, gradient[path].get_value(), update


def _count(weight: nnx.Variable, vocab_size: int, in_blocks: bool) -> int:
    """Return the number of elements, of a layer if there are several, without padding."""
    shape = list(weight.get_value().shape)
    if (axis := padded_axis(weight)) is not None:
        shape[axis] = vocab_size
    return math.prod(shape[in_blocks:])


def _sum_of_squares(array: Array, in_blocks: bool) -> Array:
    """Return the sum for each layer, or of the whole array, with an axis of length 1."""
    squares = jnp.square(array.astype(jnp.float32)).reshape(len(array) if in_blocks else 1, -1)
    return squares.sum(axis=1)


def _matrices(weight: nnx.Variable) -> Array:
    """Return a stacked kernel as matrices_LIO."""
    kernel = weight.get_value()
    inputs = math.prod(kernel.shape[1 : 1 + weight.inputs])
    return kernel.reshape(len(kernel), inputs, -1)


def largest_singular_value(matrices_LIO: Array) -> Array:
    """Return the largest singular value of each matrix, float32, by power iteration from the same
    random vector each time. LAPACK's decompositions in JAX may hang on a CPU (`docs/log.md`)."""
    times = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    start_O = jax.random.normal(jax.random.key(0), matrices_LIO.shape[2:])

    def iterate(_: int, right_LO: Array) -> Array:
        left_LI = _unit(times("LIO,LO->LI", matrices_LIO, right_LO))
        return _unit(times("LIO,LI->LO", matrices_LIO, left_LI))

    right_LO = jnp.broadcast_to(_unit(start_O), matrices_LIO.shape[::2])
    right_LO = jax.lax.fori_loop(0, _ITERATIONS, iterate, right_LO)
    return _length(times("LIO,LO->LI", matrices_LIO, right_LO))[..., 0]


def _unit(vectors: Array) -> Array:
    length = _length(vectors)
    return vectors / jnp.where(length == 0, 1, length)


def _length(vectors: Array) -> Array:
    return jnp.linalg.norm(vectors, axis=-1, keepdims=True)
