"""Each kernel of `rungs/model/kernels/` next to its plain form, forward and backward. Cases call
the model's functions, which choose a kernel by device and shapes. To cover a new kernel, add a case
with shapes for which it is chosen. Axes as in `gpt.py`; M rows, E groups, I inputs, O outputs."""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rungs.checks.check import Check
from rungs.common.errors import readable_line, reason
from rungs.model.attention import causal_kernel, causal_mask, plain_attention
from rungs.model.kernels.blockwise_attention import Scoring
from rungs.model.kernels.cross_entropy import summed_loss, target_losses
from rungs.model.kernels.grouped_matmul import grouped_matmul, plain_grouped_matmul
from rungs.model.kernels.matmul import matmul, plain_matmul
from rungs.model.kernels.norms import Norm, normalize, plain_norm
from rungs.model.layers import NO_DROPOUT
from rungs.parallel import devices, target_device
from rungs.planning.program import XLA, kernels_of

PLAIN_ERRORS = 4
"""Allowed ratio of a kernel's error to its plain form's on the device, as rounding differs."""
_FLOAT32_TOLERANCES = {"gpu": 2**-10, "tpu": 2**-7}
"""By platform: accelerators round float32 matmul operands to TF32 or bfloat16."""
_EXACT_FLOAT32_TOLERANCE = 1e-5
"""On other platforms, where only the order of sums differs."""
_BATCH, _LENGTH = 2, 256

Function = Callable[..., Array]


class KernelCase(NamedTuple):
    """A kernel and its plain form, functions of the same arrays."""

    name: str
    part: str
    """Part of the model, as in `planning.program.KERNEL_PARTS`; empty for XLA on all devices."""
    kernel: Function
    plain: Function
    activations: tuple[tuple[int, ...], ...]
    """Shapes of the arguments in the compute dtype."""
    weights: tuple[tuple[int, ...], ...] = ()
    """Shapes of the following arguments, in float32."""


def checks(dtypes: list[str]) -> Iterator[Check]:
    """Yield the check of each kernel in each dtype."""
    for case in cases():
        for dtype in dtypes:
            yield check(case, dtype)


def check(case: KernelCase, dtype: str) -> Check:
    """Return the largest error of a kernel's result and gradients."""
    name = f"kernel: {case.name} {dtype}"
    try:
        arrays = _inputs(case, dtype)
        expected = _reference(case.plain, arrays)
        found, maker = _on_device(case.kernel, arrays, case.part)
        plain, _ = _on_device(case.plain, arrays, "")
    except Exception as failure:  # of a compiler or a driver
        return Check(name, "error", passed=False, notes=(readable_line(reason(failure)),))
    error, of_plain = _error(found, expected), _error(plain, expected)
    allowed = max(_tolerance(dtype), PLAIN_ERRORS * of_plain)
    notes = (f"by {maker}; plain {of_plain:.1e}",)
    limit = f"at most {allowed:.1e}"
    return Check(name, error, limit, error <= allowed, notes, "relative error")


def _tolerance(dtype: str) -> float:
    """Return the relative error that rounding alone may cause."""
    if dtype == "float32":
        return _FLOAT32_TOLERANCES.get(target_device.platform(), _EXACT_FLOAT32_TOLERANCE)
    return float(jnp.finfo(dtype).eps)


def cases() -> list[KernelCase]:
    """Return all cases. Windows and soft caps are small, to affect most scores."""
    return [
        _attention("attention", 8, 8, 64),
        _attention("attention, window", 8, 2, 64, window=100),
        _attention("attention, odd length", 8, 2, 64, length=200),
        _attention("attention, soft cap", 8, 2, 128, soft_cap=2.0),
        _attention("attention, sinks", 8, 2, 64, window=100, sink=0.5),
        _attention("attention, wide heads", 4, 2, 256, window=100, soft_cap=2.0),
        _cross_entropy(),
        _grouped_matmul(),
        KernelCase("layer norm", "", *_norms(True), ((500, 768),), ((768,), (768,))),
        KernelCase("RMS norm", "", *_norms(False), ((500, 768),), ((768,),)),
        KernelCase("matmul", "", matmul, plain_matmul, ((1000, 256),), ((256, 512),)),
    ]


def _attention(
    name: str,
    heads: int,
    kv_heads: int,
    width: int,
    length: int = _LENGTH,
    window: int | None = None,
    soft_cap: float | None = None,
    sink: float | None = None,
) -> KernelCase:
    sink_N = None if sink is None else sink * jnp.arange(heads)
    scoring = Scoring(width**-0.5, window, soft_cap, sink_N=sink_N)

    def kernel(query: Array, key: Array, value: Array) -> Array:
        kernel = causal_kernel(query, scoring)
        with jax.named_scope("attention"):  # as in `Attention`
            y: Array = kernel.causal_attention(query, key, value, scoring)
        return y

    def plain(query: Array, key: Array, value: Array) -> Array:
        mask_ST = causal_mask(length, window)
        return plain_attention(query, key, value, mask_ST, NO_DROPOUT, None, soft_cap, sink_N)

    key_BTKH = (_BATCH, length, kv_heads, width)
    shapes = (_BATCH, length, heads, width), key_BTKH, key_BTKH
    return KernelCase(name, "attention", kernel, plain, shapes)


def _cross_entropy() -> KernelCase:
    """Return a case with an eighth of the targets ignored."""
    rows, width, vocabulary = 1000, 128, 5003
    targets_M = np.random.default_rng(1).integers(0, vocabulary, rows)
    targets_M[::8] = -1

    def kernel(x_MD: Array, matrix_DV: Array) -> Array:
        return summed_loss(plain_matmul, x_MD, matrix_DV, jnp.asarray(targets_M))

    def plain(x_MD: Array, matrix_DV: Array) -> Array:
        return target_losses(plain_matmul(x_MD, matrix_DV), jnp.asarray(targets_M)).sum()

    return KernelCase(
        "cross-entropy", "loss", kernel, plain, ((rows, width),), ((width, vocabulary),)
    )


def _norms(is_centered: bool) -> tuple[Function, Function]:
    norm = Norm(1e-5, is_centered)
    return functools.partial(normalize, norm), functools.partial(plain_norm, norm)


def _grouped_matmul() -> KernelCase:
    """Return a case with groups of different sizes, one of them empty."""
    counts_E = np.array([200, 0, 1, 399, 64, 128, 136, 96], np.int32)

    def kernel(x_MI: Array, kernel_EIO: Array) -> Array:
        with jax.named_scope("experts"):
            return grouped_matmul(x_MI, kernel_EIO, jnp.asarray(counts_E))

    def plain(x_MI: Array, kernel_EIO: Array) -> Array:
        return plain_grouped_matmul(x_MI, kernel_EIO, jnp.asarray(counts_E))

    shapes = ((int(counts_E.sum()), 256),), ((len(counts_E), 256, 384),)
    return KernelCase("grouped matmul", "experts", kernel, plain, *shapes)


def _inputs(case: KernelCase, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    draw = [rng.standard_normal(shape, np.float32) for shape in case.activations + case.weights]
    count = len(case.activations)
    return [array.astype(jnp.dtype(dtype)) for array in draw[:count]] + draw[count:]


def _with_gradients(function: Function, dtype: jnp.dtype) -> Callable[..., tuple[Array, ...]]:
    """Return a function that computes the result and each argument's gradient, for a cotangent that
    varies over elements and is rounded to a dtype."""

    def both(*arrays: Array) -> tuple[Array, ...]:
        y, pull = jax.vjp(function, *arrays)
        cotangent = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return y, *pull(cotangent.astype(dtype).astype(y.dtype))

    return both


def _reference(plain: Function, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return result and gradients of the plain form in float32, on the CPU if JAX may use it."""
    exact, dtype = [array.astype(np.float32) for array in arrays], arrays[0].dtype
    with jax.default_device(devices.host_device()), jax.default_matmul_precision("highest"):
        return [np.asarray(array) for array in jax.jit(_with_gradients(plain, dtype))(*exact)]


def _on_device(
    function: Function, arrays: list[np.ndarray], part: str
) -> tuple[list[np.ndarray], str]:
    """Return result and gradients, and the name of what computed them."""
    placed = [jnp.asarray(array) for array in arrays]
    compiled = jax.jit(_with_gradients(function, placed[0].dtype)).lower(*placed).compile()
    makers = kernels_of(compiled).get(part, {XLA: 0})
    return [np.asarray(array) for array in compiled(*placed)], ", ".join(makers)


def _error(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Return the largest relative error, by norm; infinity if a result is not finite."""
    errors = [
        np.linalg.norm(np.float64(one) - np.float64(other)) / np.linalg.norm(np.float64(other))
        for one, other in zip(found, expected, strict=True)
    ]
    worst = float(max(errors))
    return worst if np.isfinite(errors).all() else float("inf")
