"""Causal attention over full sequences by tokamax's Pallas kernels for Mosaic GPU, on NVIDIA's
Hopper and Blackwell: one kernel forward, two backward. They have soft caps, windows and documents.

JAX deprecates the Triton backend that `triton_attention` rests on. These kernels have been compiled
for an H100 and a B200, not run, as they use what JAX's interpreter for GPUs lacks; so only
`attention_kernel` chooses them. They are called without `tokamax.Op`, which asks for a local GPU
and tunes. Axes as in `gpt.py`."""

import dataclasses
import functools
import importlib.util
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from rungs.model.kernels.blockwise_attention import Scoring
from rungs.model.remat import save_for_backward
from rungs.parallel import collectives, target_device

NEEDS = (
    "the extra cuda on Python 3.12 or later, a single NVIDIA GPU of compute capability 9 (heads of"
    " at most 256 elements) or 10 (128), causal attention in bfloat16 or float16, and no sinks"
)
MAX_HEAD_SIZE = {"9": 256, "10": 128}
"""By major compute capability. On 10, tokamax 0.0.17 has no derivative for larger heads."""
BLOCK = 128
"""Sequences are padded at the end to a multiple of it, so that no block of keys is incomplete."""
_FORWARD = {
    ("9", 128): {"block_q": 64, "block_kv": 128},
    ("9", 256): {"block_q": 64, "block_kv": 64},
    ("10", 64): {"block_q": 128, "block_kv": 128, "num_stages": 4, "collective": False},
    ("10", 128): {"block_q": 128, "block_kv": 128, "collective": False},
}
_BACKWARD = {
    ("9", 128): {"num_stages": 2},
    ("9", 256): {"num_stages": 1},
    ("10", 64): {"num_stages": 4},
    ("10", 128): {"num_stages": 2},
}
"""By capability and head size, the next larger one: what tokamax's heuristics give for causal
masks. Backward, all blocks have the capability's forward `block_q`."""


class _Kernels(NamedTuple):
    """Functions of one sequence, with their configurations."""

    forward: Any
    backward: Any

    @classmethod
    def of(cls, query_BSNH: Array) -> Self:
        major, width = _major(), query_BSNH.shape[-1]
        sizes = (size for capability, size in _FORWARD if capability == major and size >= width)
        key = major, next(sizes)
        if major == "9":
            from tokamax._src.ops.attention import pallas_mosaic_gpu_kernel_sm90 as forward
            from tokamax._src.ops.attention import pallas_mosaic_gpu_vjp_kernel_sm90 as backward
        else:
            from tokamax._src.ops.attention import pallas_mosaic_gpu_kernel_sm100 as forward
            from tokamax._src.ops.attention import pallas_mosaic_gpu_vjp_kernel_sm100 as backward
        blocks = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
        sides = dict.fromkeys(blocks, _FORWARD[key]["block_q"])
        return cls(
            functools.partial(
                forward.flash_attention_kernel,
                out_dtype=query_BSNH.dtype,
                normalize_output=True,
                return_residuals=True,
                use_stable_softmax=True,
                rescale_threshold=1.0,
                config=forward.Config(**_FORWARD[key]),
            ),
            functools.partial(
                backward.flash_attention_vjp_kernel,
                ds_dtype=None,
                config=backward.Config(**sides, **_BACKWARD[key]),
            ),
        )


def supports(query_BSNH: Array | jax.ShapeDtypeStruct) -> bool:
    """Return whether tokamax is installed, and the target device runs it for such queries. Inputs
    that vary along a mesh axis are refused by JAX: "mpmd_map does not support Refs with varying
    manual axis types"."""
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes
    is_supported = query_BSNH.dtype in (jnp.bfloat16, jnp.float16)
    fits = query_BSNH.shape[-1] <= MAX_HEAD_SIZE.get(_major(), 0)
    if collectives.axis_size(*manual_axes) > 1:
        return False
    return is_supported and fits and importlib.util.find_spec("tokamax") is not None


def causal_attention(
    query_BSNH: Array, key_BSKH: Array, value_BSKH: Array, scoring: Scoring
) -> Array:
    """Like `blockwise_attention.causal_attention`, without sinks."""
    length = query_BSNH.shape[1]
    padding = -length % BLOCK
    arrays = query_BSNH, key_BSKH, value_BSKH
    query, key, value = (
        jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
        for x in collectives.to_common_varying(*arrays)
    )
    first_keys = first_keys_B1S(scoring, *query.shape[:2])
    own = dataclasses.replace(scoring, starts_BS=None)
    return _attention(query, key, value, first_keys, own)[:, :length]


def first_keys_B1S(scoring: Scoring, batch: int, length: int) -> Array | None:
    """Return the first key that each query of padded sequences attends to, by window and document;
    None for 0."""
    if scoring.window is None and scoring.starts_BS is None:
        return None
    first = jnp.zeros((batch, length), jnp.int32)
    if scoring.starts_BS is not None:
        padding = length - scoring.starts_BS.shape[1]
        first = jnp.pad(scoring.starts_BS, ((0, 0), (0, padding)), mode="edge")
    if scoring.window is not None:
        first = jnp.maximum(first, jnp.arange(length) - scoring.window + 1)
    return first[:, None].astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(
    query: Array, key: Array, value: Array, first_keys: Array | None, scoring: Scoring
) -> Array:
    return _forward(query, key, value, first_keys, scoring)[0]


def _forward(
    query: Array, key: Array, value: Array, first_keys: Array | None, scoring: Scoring
) -> tuple[Array, tuple[Any, ...]]:
    arrays = query, key, value, None, None, first_keys, None
    y, sums = _run(_Kernels.of(query).forward, scoring, arrays)
    y, sums = jax.tree.map(save_for_backward, (y, sums))
    return y, (query, key, value, first_keys, y, sums)


def _backward(
    scoring: Scoring, residuals: tuple[Any, ...], dy: Array
) -> tuple[Array, Array, Array, None]:
    query, key, value, first_keys, y, sums = residuals
    arrays = query, key, value, sums, y, dy, None, None, first_keys, None
    of_query, of_key, of_value, _ = _run(_Kernels.of(query).backward, scoring, arrays)
    return of_query, of_key, of_value, None


_attention.defvjp(_forward, _backward)


def _run(kernel: Any, scoring: Scoring, arrays: tuple[Any, ...]) -> Any:
    """Return the outputs of a kernel for all sequences, varying along each mesh axis that an input
    does, which the kernels don't declare."""
    of_one = functools.partial(
        kernel, is_causal=True, logits_scale=scoring.scale, logits_soft_cap=scoring.soft_cap
    )
    outputs = jax.jit(jax.vmap(of_one))(*arrays)  # else JAX recomputes what "dots" has saved
    return collectives.to_common_varying(outputs, arrays)[0]


def _major() -> str:
    return target_device.target().compute_capability.split(".")[0]
