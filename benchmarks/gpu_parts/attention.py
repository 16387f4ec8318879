"""Attention forward and backward by each kernel that the device has, by shape: what chooses one."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from rungs.common.errors import UserError
from rungs.model.attention import KERNELS, causal_kernel
from rungs.model.kernels.blockwise_attention import Scoring

TURNS, CALLS = 5, 10
ERROR = 0.02
"""Largest relative error that rounding to bfloat16 explains, compared with the blockwise form."""


class Shape(NamedTuple):
    sequences: int
    length: int
    heads: int
    kv_heads: int
    width: int
    window: int | None = None
    soft_cap: float | None = None
    document: int | None = None
    """Tokens of each document, if they are separate."""


SHAPES = {
    "GPT-2": Shape(32, 1024, 12, 12, 64),
    "GPT-2, documents": Shape(32, 1024, 12, 12, 64, document=300),
    "Llama 1B": Shape(2, 4096, 32, 4, 64),
    "Llama 8B": Shape(1, 8192, 32, 8, 128),
    "Gemma 2, window and soft cap": Shape(1, 8192, 8, 4, 256, 4096, 50.0),
}
TINY = Shape(1, 64, 4, 2, 16, 20, 50.0, 30)


def figures(setting: Setting) -> Iterator[Figure]:
    for name, shape in {"tiny": TINY}.items() if setting.rehearse else SHAPES.items():
        reference, _ = _run("blockwise", shape, 1, 1)
        for kernel in KERNELS:
            try:
                found, seconds = _run(kernel, shape, 1 if setting.rehearse else TURNS, CALLS)
            except UserError:  # not on this device, or not with this shape
                continue
            error = max(map(_error, found, reference))
            wrong = f"{kernel}, {name}: relative error {error:.1e}" if error > ERROR else ""
            note = f"relative error {error:.1e}"
            yield Figure(f"{name}: {kernel}", [1e3 * s for s in seconds], "ms", note, wrong)


def _run(kernel: Any, shape: Shape, turns: int, calls: int) -> tuple[list[Any], list[float]]:
    """Return the result with its gradients, and the seconds of a call in each turn.

    Raises:
        UserError: the device, or the kernel, can't.
    """
    starts_BS = None
    if shape.document:
        starts_S = jnp.arange(shape.length) // shape.document * shape.document
        starts_BS = jnp.broadcast_to(starts_S, (shape.sequences, shape.length))
    rng = np.random.default_rng(0)
    heads = shape.heads, shape.kv_heads, shape.kv_heads, shape.heads
    sizes = [(shape.sequences, shape.length, n, shape.width) for n in heads]
    *arrays, dy = (jnp.asarray(rng.standard_normal(s, np.float32), jnp.bfloat16) for s in sizes)
    scoring = Scoring(shape.width**-0.5, shape.window, shape.soft_cap, starts_BS, kernel=kernel)
    module = causal_kernel(arrays[0], scoring)

    @jax.jit
    def both(query: Any, key: Any, value: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda *x: module.causal_attention(*x, scoring), query, key, value)
        return y, *pull(dy)

    found, seconds = jax.block_until_ready(both(*arrays, dy)), []
    for _ in range(turns):
        begin = time.perf_counter()
        for _ in range(calls):
            last = both(*arrays, dy)
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - begin) / calls)
    return [np.asarray(x, np.float32) for x in found], seconds


def _error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
