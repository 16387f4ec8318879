"""Causal attention over full sequences by JAX's splash attention, on TPUs. Axes as in `gpt.py`. Its
kernels skip blocks of scores that no query attends to, and share key/value heads among query heads
without repeating them."""

import functools
import importlib.util
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from rungs.model.kernels.blockwise_attention import Scoring
from rungs.model.remat import SAVED
from rungs.parallel import collectives, target_device

LANES = 128
"""Elements in a row of a TPU's registers. Blocks of queries and keys are multiples of it."""
MAX_BLOCK = 512
"""Most queries, or keys, in a block. Blocks of 1,024 don't fit into the fast memory of a TPU v5e
with heads of 256 elements, blocks of 2,048 never."""


def supports(query_BSNH: Array | jax.ShapeDtypeStruct) -> bool:
    """Return whether the kernels support these queries: on a TPU, in bfloat16 or float32, with
    sequences of at least `LANES` tokens, as shorter ones would be mostly padding."""
    is_supported = query_BSNH.dtype in (jnp.bfloat16, jnp.float32)
    return is_supported and query_BSNH.shape[1] >= LANES and target_device.platform() == "tpu"


def causal_attention(
    query_BSNH: Array, key_BSKH: Array, value_BSKH: Array, scoring: Scoring
) -> Array:
    """Like `blockwise_attention.causal_attention`."""
    return pallas_attention(query_BSNH, key_BSKH, value_BSKH, scoring, interpret=False)


def pallas_attention(
    query_BSNH: Array, key_BSKH: Array, value_BSKH: Array, scoring: Scoring, interpret: bool
) -> Array:
    """Return y_BSNH. Queries are multiplied by the scale, which the kernels lack, and rounded to
    their dtype. Sequences are padded at the end. `interpret` emulates the kernels on any device."""
    length, heads = query_BSNH.shape[1:3]
    block = block_size(length)
    query_BSNH = (query_BSNH.astype(jnp.float32) * scoring.scale).astype(query_BSNH.dtype)
    inputs = query_BSNH, key_BSKH, value_BSKH, scoring.sink_N
    *arrays, sink_N = collectives.to_common_varying(*inputs)
    kernel = _splash_kernel(heads, length + -length % block, block, scoring, interpret)
    segments = None if scoring.starts_BS is None else _segments(scoring.starts_BS, block)
    by_head = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))
    y_BNSH = by_head(*(_by_head(array, block) for array in arrays), segments, sink_N)
    return y_BNSH[:, :, :length].swapaxes(1, 2)


def block_size(length: int) -> int:
    """Return the block's queries, and keys, for as few equal blocks as `MAX_BLOCK` allows."""
    blocks = pl.cdiv(length, MAX_BLOCK)
    return pl.cdiv(length, blocks * LANES) * LANES


def _by_head(x_BSNH: Array, block: int) -> Array:
    """Return x_BNSH, padded to whole blocks."""
    padding = -x_BSNH.shape[1] % block
    return jnp.pad(x_BSNH.swapaxes(1, 2), ((0, 0), (0, 0), (0, padding), (0, 0)))


def _segments(starts_BS: Array, block: int) -> splash_attention_kernel.SegmentIds:
    """Return the document of each query and key as the position of its start; −1 for padding."""
    padding = -starts_BS.shape[1] % block
    ids_BS = jnp.pad(starts_BS, ((0, 0), (0, padding)), constant_values=-1)
    return _splash_attention().SegmentIds(ids_BS, ids_BS)


def _splash_kernel(
    heads: int, length: int, block: int, scoring: Scoring, interpret: bool
) -> Callable[..., Array]:
    """Return the function of query_NSH, key_KSH, value_KSH, segments or None, and sink_N or None.
    Its other residuals, y and the log-sum-exp, are marked as in `remat.save_for_backward`."""
    splash = _splash_attention()
    mask = _CausalMask((length, length), (scoring.window and scoring.window - 1, 0), 0)
    blocks = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    return splash.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(blocks, block)),
        attn_logits_soft_cap=scoring.soft_cap,
        residual_checkpoint_name=SAVED,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )


class _CausalMask(splash_attention_mask.LocalMask):
    """JAX's mask, computing elements only in blocks that are partly masked: for 32,768 tokens the
    blocks take 0.6 s instead of 14."""

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        queries, keys = block
        window = self.window_size[0]
        nearest, farthest = queries.start - keys.stop + 1, queries.stop - 1 - keys.start
        shape = queries.stop - queries.start, keys.stop - keys.start
        if farthest < 0 or (window is not None and nearest > window):
            return np.zeros(shape, bool)
        if nearest >= 0 and (window is None or farthest <= window):
            return np.ones(shape, bool)
        return super().__getitem__(block)


@functools.cache
def _splash_attention() -> ModuleType:
    """Return a copy of JAX's module whose kernels declare the mesh axes along which outputs vary,
    as `jax.shard_map` with `check_vma` requires. A copy, because changing JAX's module would affect
    everyone in this process."""
    spec = importlib.util.find_spec(splash_attention_kernel.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["pl"] = SimpleNamespace(**vars(pl) | {"pallas_call": _varying_pallas_call})
    return module


def _varying_pallas_call(kernel: Any, out_shape: Any, **options: Any) -> Callable[..., Any]:
    """Return `pl.pallas_call` with outputs that vary along each mesh axis that an input does."""

    def run(*inputs: Any) -> Any:
        def outputs() -> Any:
            empty = jax.tree.map(lambda like: jnp.empty(like.shape, like.dtype), out_shape)
            return collectives.to_common_varying(empty, inputs)[0]

        return pl.pallas_call(kernel, jax.eval_shape(outputs), **options)(*inputs)

    return run
