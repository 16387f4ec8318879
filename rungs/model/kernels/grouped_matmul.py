"""Matmul of rows sorted by group, each with the matrix of its group.

On NVIDIA GPUs XLA turns `jax.lax.ragged_dot` into one matmul of all rows with all matrices, with
the other groups' rows zeroed: the work and memory of every row in every group. These Pallas kernels
multiply each row with its own matrix only. They stay as long as JAX has its Triton backend,
deprecated since 0.11: tokamax's grouped matmul has no backward pass on compute capability 8.

Axes: M rows, E groups, I inputs, O outputs, T tiles: rows of one group that a program computes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from rungs.parallel import collectives, target_device

TILE_M, TILE_I, TILE_O = 64, 64, 128
"""Sizes of a program's block: powers of 2, as Triton requires."""
_STAGES = {2: 3, 4: 2}
"""Tiles in flight by bytes per element, for the 99 KiB of shared memory of GPUs since Ampere."""


def plain_grouped_matmul(x_MI: Array, kernel_EIO: Array, counts_E: Array) -> Array:
    """Return y_MO in float32, with operands in the dtype of x. Rows of x_MI are sorted by group;
    counts_E has each group's rows, M in total."""
    kernel_EIO = kernel_EIO.astype(x_MI.dtype)
    return jax.lax.ragged_dot(x_MI, kernel_EIO, counts_E, preferred_element_type=jnp.float32)


def grouped_matmul(x_MI: Array, kernel_EIO: Array, counts_E: Array) -> Array:
    """Like `plain_grouped_matmul`. Plans for another device use that function, which keeps as much
    for the backward pass."""
    if not target_device.is_ampere_or_later() or not target_device.is_compiled():
        return plain_grouped_matmul(x_MI, kernel_EIO, counts_E)
    return pallas_grouped_matmul(*collectives.to_common_varying(x_MI, kernel_EIO, counts_E), False)


def is_dense() -> bool:
    """Return whether the target device has no fast grouped matmul, so that all rows times all
    matrices is faster. TPUs have an instruction for groups, recent NVIDIA GPUs the kernels here."""
    return target_device.platform() != "tpu" and not target_device.is_ampere_or_later()


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def pallas_grouped_matmul(
    x_MI: Array, kernel_EIO: Array, counts_E: Array, interpret: bool
) -> Array:
    """Like `plain_grouped_matmul`; `interpret` runs the kernels step by step, on any device."""
    like_y = jax.eval_shape(plain_grouped_matmul, x_MI, kernel_EIO, counts_E)
    return _of_rows(x_MI, kernel_EIO.astype(x_MI.dtype), counts_E, like_y, interpret)


def _forward(
    x_MI: Array, kernel_EIO: Array, counts_E: Array, interpret: bool
) -> tuple[Array, tuple[Array, Array, Array]]:
    y_MO = pallas_grouped_matmul(x_MI, kernel_EIO, counts_E, interpret)
    return y_MO, (x_MI, kernel_EIO, counts_E)


def _backward(
    interpret: bool, residuals: tuple[Array, Array, Array], gradient_MO: Array
) -> tuple[Array, Array, None]:
    x_MI, kernel_EIO, counts_E = residuals
    gradient_MO = gradient_MO.astype(x_MI.dtype)
    kernel = kernel_EIO.astype(x_MI.dtype)
    like_x, like_kernel = jax.eval_shape(lambda: (x_MI, kernel_EIO))
    x_gradient_MI = _of_rows(gradient_MO, kernel, counts_E, like_x, interpret, transposed=True)
    kernel_gradient_EIO = _over_rows(x_MI, gradient_MO, counts_E, like_kernel, interpret)
    return x_gradient_MI, kernel_gradient_EIO, None


pallas_grouped_matmul.defvjp(_forward, _backward)


class _Tiles(NamedTuple):
    """The rows that each program computes."""

    first_T: Array
    end_T: Array
    """Index after the last row of the tile's group; the tile is empty unless above `first_T`."""
    group_T: Array

    @classmethod
    def of(cls, counts_E: Array, rows: int) -> Self:
        """Return enough tiles for any counts: each group may have one incomplete tile."""
        tiles_E = pl.cdiv(counts_E, TILE_M)
        tile_T = jnp.arange(pl.cdiv(rows, TILE_M) + len(counts_E))
        group_T = jnp.searchsorted(jnp.cumsum(tiles_E), tile_T, side="right")
        group_T = jnp.minimum(group_T, len(counts_E) - 1)
        end_E = jnp.cumsum(counts_E)
        tile_in_group_T = tile_T - (jnp.cumsum(tiles_E) - tiles_E)[group_T]
        first_T = (end_E - counts_E)[group_T] + TILE_M * tile_in_group_T
        return cls(*(x.astype(jnp.int32) for x in (first_T, end_E[group_T], group_T)))


def _of_rows(
    x_MI: Array,
    matrices: Array,
    counts_E: Array,
    like_MO: Any,
    interpret: bool,
    transposed: bool = False,
) -> Array:
    """Return x · the matrix of each row's group, in the dtype of `like_MO`. `matrices` is
    kernel_EIO or, if `transposed`, kernel_EOI, read in that order because XLA would transpose the
    weights of all layers before its loop over them."""
    (rows, inputs), outputs = x_MI.shape, matrices.shape[1 if transposed else 2]
    tiles = _Tiles.of(counts_E, rows)

    def kernel(first: Any, end: Any, group: Any, x: Any, kernel: Any, y: Any) -> None:
        tile = pl.program_id(0)
        row = _range(first[tile], TILE_M)
        column = _range(pl.program_id(1) * TILE_O, TILE_O)
        is_row = row < end[tile]

        def add(number: Array, total: Array) -> Array:
            depth = _range(number * TILE_I, TILE_I)
            is_depth = depth < inputs
            left = _load(x.at[row[:, None], depth[None, :]], is_row, is_depth)
            matrix_axes = depth[:, None], column[None, :]
            matrix = kernel.at[group[tile], *(matrix_axes[::-1] if transposed else matrix_axes)]
            right = _load(matrix, is_depth, column < outputs)
            return total + triton.dot(left, right)

        @pl.when(first[tile] < end[tile])
        def _() -> None:
            zeros = jnp.zeros((TILE_M, TILE_O), jnp.float32)
            total = jax.lax.fori_loop(0, pl.cdiv(inputs, TILE_I), add, zeros)
            _store(y.at[row[:, None], column[None, :]], total, is_row, column < outputs)

    grid = len(tiles.first_T), pl.cdiv(outputs, TILE_O)
    run = _program(kernel, like_MO, grid, x_MI.dtype, interpret)
    return run(*tiles, x_MI, matrices)


def _over_rows(
    x_MI: Array, gradient_MO: Array, counts_E: Array, like_EIO: Any, interpret: bool
) -> Array:
    """Return xᵀ · gradient of each group's rows, in the dtype of `like_EIO`."""
    inputs, outputs = x_MI.shape[1], gradient_MO.shape[1]
    end_E = jnp.cumsum(counts_E).astype(jnp.int32)
    first_E = end_E - counts_E.astype(jnp.int32)

    def kernel(first: Any, end: Any, x: Any, gradient: Any, result: Any) -> None:
        group = pl.program_id(0)
        depth = _range(pl.program_id(1) * TILE_I, TILE_I)
        column = _range(pl.program_id(2) * TILE_O, TILE_O)

        def add(number: Array, total: Array) -> Array:
            row = _range(first[group] + number * TILE_M, TILE_M)
            is_row = row < end[group]
            left = _load(x.at[row[:, None], depth[None, :]], is_row, depth < inputs)
            right = _load(gradient.at[row[:, None], column[None, :]], is_row, column < outputs)
            return total + triton.dot(left, right, trans_a=True)

        zeros = jnp.zeros((TILE_I, TILE_O), jnp.float32)
        tiles = pl.cdiv(end[group] - first[group], TILE_M)
        total = jax.lax.fori_loop(0, tiles, add, zeros)
        matrix = result.at[group, depth[:, None], column[None, :]]
        _store(matrix, total, depth < inputs, column < outputs)

    grid = len(counts_E), pl.cdiv(inputs, TILE_I), pl.cdiv(outputs, TILE_O)
    run = _program(kernel, like_EIO, grid, x_MI.dtype, interpret)
    return run(first_E, end_E, x_MI, gradient_MO)


def _program(
    kernel: Any, like: Any, grid: tuple[int, ...], dtype: jnp.dtype, interpret: bool
) -> Callable[..., Array]:
    compiler = triton.CompilerParams(num_warps=4, num_stages=_STAGES[dtype.itemsize])
    return pl.pallas_call(kernel, like, grid=grid, interpret=interpret, compiler_params=compiler)


def _range(first: Any, size: int) -> Array:
    return first + jnp.arange(size)


def _load(ref: Any, is_row: Array, is_column: Array) -> Array:
    return triton.load(ref, mask=is_row[:, None] & is_column[None, :], other=0.0)


def _store(ref: Any, values: Array, is_row: Array, is_column: Array) -> None:
    triton.store(ref, values.astype(ref.dtype), mask=is_row[:, None] & is_column[None, :])
