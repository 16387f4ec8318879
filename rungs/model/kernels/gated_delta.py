"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): linear attention whose state is a
matrix per head. Each token decays the state, replaces what it holds for the token's key, and reads
it:

    S_t = α_t · (I − β_t · k_t · k_tᵀ) · S_{t−1} + β_t · k_t · v_tᵀ        y_t = S_tᵀ · q_t

`recurrent` computes this as written. `chunked` computes the same with matmuls over chunks of tokens
(section 3.3). With D_tu the decay between two tokens of a chunk, and S the state before the chunk,
the values U that its tokens write solve a triangular system:

    (I + A) · U = β · (V − decayed K · S)        A_tu = β_t · (k_t · k_u) · D_tu for u < t, else 0

Decays are exponentials of differences of summed logarithms, at most 0. Documents that share a
sequence are masked everywhere, in sums of decays, too: a document's outputs are the same bits
whatever the others contain.

Axes as in `gpt.py`, but
    G value heads per key head, H width of a key, W width of a value,
    C tokens of a chunk, Z chunks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rungs.parallel import collectives

CHUNK = 64
"""Most tokens of a chunk, a power of two."""
_exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
_exact_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Operands(NamedTuple):
    """What the rule reads of each token, in float32."""

    query_BSKH: Array
    key_BSKH: Array
    """Of length at most 1."""
    value_BSKGW: Array
    log_decay_BSKG: Array
    """ln α, at most 0."""
    beta_BSKG: Array
    """Share of the old value that is replaced, from 0 to 1, or to 2 for negative eigenvalues."""


def recurrent(operands: Operands, state_BKGHW: Array) -> tuple[Array, Array]:
    """Return y_BSKGW, computed token by token, and the state after the last token."""

    def step(state_BKGHW: Array, token: Operands) -> tuple[Array, Array]:
        query_BKH, key_BKH, value_BKGW, log_decay_BKG, beta_BKG = token
        state_BKGHW = state_BKGHW * jnp.exp(log_decay_BKG)[..., None, None]
        old_BKGW = _exact_einsum("bkghw,bkh->bkgw", state_BKGHW, key_BKH)
        new_BKGW = beta_BKG[..., None] * (value_BKGW - old_BKGW)
        state_BKGHW = state_BKGHW + key_BKH[:, :, None, :, None] * new_BKGW[..., None, :]
        return state_BKGHW, _exact_einsum("bkghw,bkh->bkgw", state_BKGHW, query_BKH)

    by_token = jax.tree.map(lambda x_BS: x_BS.swapaxes(0, 1), operands)
    state_BKGHW, y_SBKGW = jax.lax.scan(step, state_BKGHW, by_token)
    return y_SBKGW.swapaxes(0, 1), state_BKGHW


def chunked(operands: Operands, starts_BS: Array | None = None) -> tuple[Array, Array]:
    """Return y_BSKGW, and the state after the last token, from a state of zeros.

    Args:
        starts_BS: position where each token's document starts; None if all are one document."""
    length = operands.key_BSKH.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())

    def by_chunk(x_BS: Array, mode: str = "constant") -> Array:
        """Return x_ZBC, padded at its end, which changes nothing: k, v, β and ln α are 0."""
        widths = [(0, 0), (0, -length % size), *[(0, 0)] * (x_BS.ndim - 2)]
        padded = jnp.pad(x_BS, widths, mode=mode)
        return padded.reshape(len(padded), -1, size, *padded.shape[2:]).swapaxes(0, 1)

    starts_ZBC = None if starts_BS is None else by_chunk(starts_BS, "edge")
    parts = jax.tree.map(by_chunk, operands)
    y_ZBCKGW, state_BKGHW = _over_chunks(parts, starts_ZBC)
    y_BSKGW = y_ZBCKGW.swapaxes(0, 1).reshape(
        operands.value_BSKGW.shape[0], -1, *y_ZBCKGW.shape[3:]
    )
    return y_BSKGW[:, :length], state_BKGHW


class _Chunk(NamedTuple):
    """A chunk as the recurrence over chunks reads it."""

    value_BKGCW: Array
    """Values to write if the state before the chunk were 0."""
    taken_BKGCH: Array
    """Product with the state: what is subtracted from these values."""
    query_BKGCH: Array
    """Decayed from the chunk's start; 0 where a document has started since."""
    scores_BKGCC: Array
    key_BKGHC: Array
    """Decayed to the chunk's end; 0 where a document starts before that."""
    kept_BKG: Array
    """Share of the state before the chunk that is left at its end."""


def _over_chunks(operands: Operands, starts_ZBC: Array | None) -> tuple[Array, Array]:
    chunks = _prepare(operands, starts_ZBC)

    def step(state_BKGHW: Array, chunk: _Chunk) -> tuple[Array, Array]:
        value_BKGCW = chunk.value_BKGCW - chunk.taken_BKGCH @ state_BKGHW
        y_BKGCW = chunk.query_BKGCH @ state_BKGHW + chunk.scores_BKGCC @ value_BKGCW
        state_BKGHW = chunk.kept_BKG[..., None, None] * state_BKGHW + chunk.key_BKGHC @ value_BKGCW
        return state_BKGHW, y_BKGCW

    width = chunks.value_BKGCW.shape[-1]
    zeros_BKGHW = jnp.zeros((*chunks.key_BKGHC.shape[1:-1], width), chunks.key_BKGHC.dtype)
    zeros_BKGHW, chunks = collectives.to_common_varying(zeros_BKGHW, chunks)
    state_BKGHW, y_ZBKGCW = jax.lax.scan(step, zeros_BKGHW, chunks)
    return y_ZBKGCW.transpose(0, 1, 4, 2, 3, 5), state_BKGHW


def _prepare(operands: Operands, starts_ZBC: Array | None) -> _Chunk:
    """Return all chunks, with a leading axis Z."""
    query_ZBKCH, key_ZBKCH = (x.swapaxes(2, 3) for x in operands[:2])
    value_ZBKGCW = operands.value_BSKGW.transpose(0, 1, 3, 4, 2, 5)
    log_decay_ZBKGC, beta_ZBKGC = (x.transpose(0, 1, 3, 4, 2) for x in operands[3:])
    is_seen_ZBCC, continues_ZBC = _masks(key_ZBKCH.shape[3], len(key_ZBKCH), starts_ZBC)
    is_seen = is_seen_ZBCC[:, :, None, None]
    sums_ZBKGC = _exact_einsum(
        "zbtu,zbkgu->zbkgt", is_seen_ZBCC.astype(beta_ZBKGC.dtype), log_decay_ZBKGC
    )
    differences = jnp.where(is_seen, sums_ZBKGC[..., None] - sums_ZBKGC[..., None, :], 0)
    decay_ZBKGCC = jnp.where(is_seen, jnp.exp(differences), 0)
    from_start_ZBKGC = jnp.exp(sums_ZBKGC) * continues_ZBC[:, :, None, None]
    keys_T = key_ZBKCH.swapaxes(-1, -2)
    system = beta_ZBKGC[..., None] * decay_ZBKGCC * (key_ZBKCH @ keys_T)[:, :, :, None]
    right = jnp.concatenate(
        [
            beta_ZBKGC[..., None] * value_ZBKGCW,
            (beta_ZBKGC * from_start_ZBKGC)[..., None] * key_ZBKCH[:, :, :, None],
        ],
        axis=-1,
    )
    solved = _solve(jnp.tril(system, -1), right)
    width = value_ZBKGCW.shape[-1]
    return _Chunk(
        value_BKGCW=solved[..., :width],
        taken_BKGCH=solved[..., width:],
        query_BKGCH=from_start_ZBKGC[..., None] * query_ZBKCH[:, :, :, None],
        scores_BKGCC=decay_ZBKGCC * (query_ZBKCH @ keys_T)[:, :, :, None],
        key_BKGHC=decay_ZBKGCC[..., -1:, :] * keys_T[:, :, :, None],
        kept_BKG=from_start_ZBKGC[..., -1],
    )


def _masks(size: int, chunks: int, starts_ZBC: Array | None) -> tuple[Array, Array]:
    """Return whether a token sees each earlier one of its chunk and itself, is_seen_ZBCC, and
    whether its document starts before the chunk, continues_ZBC; Z and B may be 1."""
    is_seen_ZBCC = jnp.tril(jnp.ones((1, 1, size, size), bool))
    if starts_ZBC is None:
        return is_seen_ZBCC, jnp.ones((1, 1, size), bool)
    is_same_ZBCC = starts_ZBC[..., None] == starts_ZBC[..., None, :]
    return is_seen_ZBCC & is_same_ZBCC, starts_ZBC < (size * jnp.arange(chunks))[:, None, None]


@jax.custom_vjp
def _solve(system_XCC: Array, right_XCW: Array) -> Array:
    """Return x with (I + system) · x = right; the system is 0 on and above its diagonal."""
    return _solve_forward(system_XCC, right_XCW)[0]


def _solve_forward(system_XCC: Array, right_XCW: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse_XCC = _inverse(system_XCC)
    solved_XCW = inverse_XCC @ right_XCW
    return solved_XCW, (inverse_XCC, solved_XCW)


def _solve_backward(saved: tuple[Array, Array], gradient_XCW: Array) -> tuple[Array, Array]:
    inverse_XCC, solved_XCW = saved
    of_right_XCW = inverse_XCC.swapaxes(-1, -2) @ gradient_XCW
    return -of_right_XCW @ solved_XCW.swapaxes(-1, -2), of_right_XCW


_solve.defvjp(_solve_forward, _solve_backward)


def _inverse(system_XCC: Array) -> Array:
    """Return the inverse of I + a strictly lower triangular matrix, whose size is a power of two.
    Starts from blocks of one element on the diagonal; two neighbors P and R with Q below P make
    [[P⁻¹, 0], [−R⁻¹ · Q · P⁻¹, R⁻¹]]. Unlike the product (I − A)(I + A²)(I + A⁴)…, whose terms
    reach 10¹⁷ if all tokens are equal, this needs no more digits than the inverse."""
    *batch, size, _ = system_XCC.shape
    inverse = jnp.ones((*batch, size, 1, 1), system_XCC.dtype)
    while (block := inverse.shape[-1]) < size:
        pairs = system_XCC.reshape(
            *batch, size // block // 2, 2, block, size // block // 2, 2, block
        )
        between = jnp.diagonal(pairs[..., 1, :, :, 0, :], axis1=-4, axis2=-2)
        first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -_exact_matmul(_exact_matmul(second, jnp.moveaxis(between, -1, -3)), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
    return inverse[..., 0, :, :]
