"""Texts continued by a model, with a cache of keys and values.

Prompts of unequal length are one batch: each row is filled up at its start, so that all rows end
in the same slot, and positions count from the first token of the row. Prompts are padded to a
bucket's length, slots rounded up: for each such shape there is one compiled prefill and one
compiled loop, which takes any number of steps.
Axes as in `model.py`; S is the slots of the padded prompts, T all of them.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.model.attention import Cache, cached_views
from rungs.model.gpt import GPT
from rungs.model.sampling import GREEDY, Sampling, next_tokens

SMALLEST_BUCKET = 16
SLOTS_AT_ONCE = 32
Texts = list[list[int]]
Weights = tuple[nnx.State, list[nnx.State]]
"""Of all that is outside the blocks, and of each block."""


class Request(NamedTuple):
    """What is asked of a generation, beside the prompts."""

    new_tokens: int
    """At most so many are added to each text."""
    sampling: Sampling = GREEDY
    seed: int = 0
    """Random choices depend on this, the row and the number of the token, not on other rows."""


class Growing(NamedTuple):
    """A batch of texts while tokens are added."""

    tokens_BT: Array
    """The token in each slot; free slots are zero."""
    slot: Array
    """The last slot that has a token."""
    slots_ahead: Array
    """The slot minus the number of tokens drawn for each text so far."""
    padding_B: Array
    """Slots at the start of each row that hold none of its tokens."""
    stopped_B: Array
    """Whether the row has its stop token."""
    keys_B: Array
    """A random key for each row."""
    caches: list[Cache]
    """Keys and values of each layer, up to the slot before the last."""


class Generator:
    """A model made ready to continue texts: its layers unstacked, its matrices in one type.

    On a CPU the cache is float32, and in bfloat16 a single row has a twin: XLA's CPU compiler
    would keep float32 copies of a bfloat16 cache, and of every matrix that meets a single row.

    Args:
        model: its parameters are copied, and stay as they are.
        compute_dtype: type of the matrices, of activations and, but on a CPU, of the cache.
        take_over: use up the model's parameters as they are copied, to spare the memory.
    """

    def __init__(
        self, model: GPT, compute_dtype: jnp.dtype = jnp.float32, take_over: bool = False
    ) -> None:
        on_cpu = jax.default_backend() == "cpu"
        self._config, self._dtype = model.config, jnp.dtype(compute_dtype)
        self._cache_dtype = jnp.dtype(jnp.float32) if on_cpu else self._dtype
        self._least_rows = 2 if on_cpu and self._dtype == jnp.bfloat16 else 1
        outer = nnx.merge(*nnx.split(model))
        blocks, outer.blocks = outer.blocks, None
        self._outer_graph, outer_state = nnx.split(outer)
        block_graph, stacked = nnx.split(blocks)
        self._block_graph: Any = block_graph
        layers = unstacked(stacked, self._config.n_layers, self._dtype, take_over)
        self._weights = with_matrices_in(outer_state, self._dtype), layers
        self._start = jax.jit(self._started, static_argnames=("slots", "sampling"))
        self._go_on = jax.jit(self._grown, static_argnames="sampling", donate_argnames="text")

    @property
    def context_length(self) -> int:
        """The most tokens that the model sees at a time."""
        return self._config.context_length

    def continued(self, prompts: Sequence[Sequence[int]], request: Request) -> Texts:
        """The new tokens alone of each prompt, without the stop token.

        Args:
            prompts: token ids, at least one in each.
        """
        result: Texts = [[] for _ in prompts]
        for news in self.stream(prompts, request, at_once=request.new_tokens):
            for row, new in zip(result, news, strict=True):
                row += new
        return result

    def stream(
        self, prompts: Sequence[Sequence[int]], request: Request, at_once: int = 8
    ) -> Iterator[Texts]:
        """As `continued`, but first one token for each prompt, then `at_once` after another; none
        for texts that have stopped.

        The model sees at most `context_length` tokens: a text that has outgrown them is read again
        from its last half context.

        Raises:
            ValueError: a prompt is empty, or has a token id that the model does not know.
        """
        self._refuse_what_cannot_be_read(prompts)
        texts = [list(prompt) for prompt in prompts]
        read_from = [0] * len(texts)
        most = self._config.context_length
        half = max(most // 2, 1)
        stopped_B = np.zeros(len(texts), bool)
        drawn = 0
        while drawn < request.new_tokens and not stopped_B.all():
            read_from = [
                first if len(text) - first <= most else len(text) - half
                for text, first in zip(texts, read_from, strict=True)
            ]
            windows = [text[first:] for text, first in zip(texts, read_from, strict=True)]
            count = min(most + 1 - max(map(len, windows)), request.new_tokens - drawn)
            stretch = self._stretch(windows, stopped_B, request, drawn, count, at_once)
            for columns, stops_B in stretch:
                yield [until(row, request.sampling.stop_tokens) for row in columns]
                texts = [text + row for text, row in zip(texts, columns, strict=True)]
                drawn, stopped_B = drawn + len(columns[0]), stops_B

    def logits_after(self, texts: Sequence[Sequence[int]], one_by_one: int) -> np.ndarray:
        """What texts are continued from: the first tokens of each are read at once, the last
        `one_by_one` each by itself, through the cache.

        Args:
            texts: of unequal length or not, each longer than `one_by_one` and no longer than the
                context.

        Returns:
            Logits_BSV after the last of those read at once, then after each of the others; float32.
        """
        rows = len(texts)
        tokens_BS, padding_B = left_padded([list(text[: len(text) - one_by_one]) for text in texts])
        read = tokens_BS.shape[1]
        text = self._unread(
            jnp.asarray(tokens_BS),
            jnp.asarray(padding_B),
            jnp.zeros(rows, bool),
            row_keys(0, rows),
            0,
            slots=read + one_by_one,
        )
        logits_of = jax.jit(self._logits)
        logits_BV, caches = logits_of(self._weights, text, tokens_BS, 0)
        found = [logits_BV]
        for place in range(one_by_one):
            text = text._replace(caches=caches)
            column_B1 = np.array([[each[len(each) - one_by_one + place]] for each in texts])
            logits_BV, caches = logits_of(self._weights, text, column_B1, read + place)
            found.append(logits_BV)
        return np.stack(found, axis=1)

    def _refuse_what_cannot_be_read(self, prompts: Sequence[Sequence[int]]) -> None:
        if not all(prompts):
            raise ValueError("a prompt has no token")
        if not all(0 <= token < self._config.vocab_size for text in prompts for token in text):
            raise ValueError(
                f"a prompt has a token id beyond the model's vocab_size {self._config.vocab_size}"
            )

    def _stretch(
        self,
        windows: Texts,
        stopped_B: np.ndarray,
        request: Request,
        drawn: int,
        count: int,
        at_once: int,
    ) -> Iterator[tuple[Texts, np.ndarray]]:
        """`count` tokens for each text, or fewer where all stop, from one prefill.

        Yields the new tokens of each row, a stopped one's filled up with stop tokens, and which
        rows have stopped.
        """
        rows = len(windows)
        twins = max(self._least_rows - rows, 0)
        tokens_BS, padding_B = left_padded(windows + windows[:1] * twins)
        read = tokens_BS.shape[1] - 1
        last = read + count
        slots = -(-(last + 1) // SLOTS_AT_ONCE) * SLOTS_AT_ONCE
        how = request.sampling
        text = self._start(
            self._weights,
            tokens_BS,
            padding_B,
            np.pad(stopped_B, (0, twins), mode="edge"),
            row_keys(request.seed, rows + twins),
            drawn,
            slots=slots,
            sampling=how,
        )
        while True:
            slot, stopped_B = int(text.slot), np.asarray(text.stopped_B)[:rows]
            yield np.asarray(text.tokens_BT)[:rows, read + 1 : slot + 1].tolist(), stopped_B
            if slot == last or stopped_B.all():
                return
            read = slot
            limit = min(slot + at_once, last)
            text = self._go_on(self._weights, text=text, limit=limit, sampling=how)

    def _started(
        self,
        weights: Weights,
        tokens_BS: Array,
        padding_B: Array,
        stopped_B: Array,
        keys_B: Array,
        drawn: Array,
        *,
        slots: int,
        sampling: Sampling,
    ) -> Growing:
        """The padded prompts read, and one token added."""
        text = self._unread(tokens_BS, padding_B, stopped_B, keys_B, drawn, slots)
        return self._with_next(weights, text, tokens_BS, jnp.asarray(0), sampling)

    def _unread(
        self,
        tokens_BS: Array,
        padding_B: Array,
        stopped_B: Array,
        keys_B: Array,
        drawn: Array | int,
        slots: int,
    ) -> Growing:
        """The padded prompts, their caches empty."""
        rows, length = tokens_BS.shape
        return Growing(
            tokens_BT=jnp.pad(tokens_BS, ((0, 0), (0, slots - length))),
            slot=jnp.asarray(length - 1),
            slots_ahead=jnp.asarray(length - 1 - drawn),
            padding_B=padding_B,
            stopped_B=stopped_B,
            keys_B=keys_B,
            caches=[self._empty_cache(rows, slots) for _ in range(self._config.n_layers)],
        )

    def _grown(
        self,
        weights: Weights,
        text: Growing,
        limit: Array,
        *,
        sampling: Sampling,
    ) -> Growing:
        """Tokens added up to slot `limit`, or until all rows have stopped."""

        def grow(text: Growing) -> Growing:
            last_B1 = jax.lax.dynamic_slice_in_dim(text.tokens_BT, text.slot, 1, axis=1)
            return self._with_next(weights, text, last_B1, text.slot, sampling)

        return jax.lax.while_loop(
            lambda text: (text.slot < limit) & ~text.stopped_B.all(), grow, text
        )

    def _with_next(
        self,
        weights: Weights,
        text: Growing,
        tokens_BS: Array,
        first_slot: Array,
        sampling: Sampling,
    ) -> Growing:
        """The text with the token that follows `tokens_BS`, its last ones, from `first_slot` on."""
        logits_BV, caches = self._logits(weights, text, tokens_BS, first_slot)
        keys_B = jax.vmap(jax.random.fold_in, (0, None))(text.keys_B, text.slot - text.slots_ahead)
        seen_BV = seen_tokens(text, self._config.vocab_size)
        tokens_B = next_tokens(sampling, logits_BV, seen_BV, keys_B)
        if sampling.stop_tokens:
            tokens_B = jnp.where(text.stopped_B, sampling.stop_tokens[0], tokens_B)
            stops_B = jnp.isin(tokens_B, jnp.asarray(sampling.stop_tokens))
            text = text._replace(stopped_B=text.stopped_B | stops_B)
        slot = text.slot + 1
        tokens_BT = jax.lax.dynamic_update_slice_in_dim(
            text.tokens_BT, tokens_B[:, None], slot, axis=1
        )
        return text._replace(tokens_BT=tokens_BT, slot=slot, caches=caches)

    def _logits(
        self, weights: Weights, text: Growing, tokens_BS: Array, first_slot: Array
    ) -> tuple[Array, list[Cache]]:
        """Logits after the last of the tokens, and the caches with all of them."""
        outer_state, layers = weights
        outer: GPT = nnx.merge(self._outer_graph, outer_state)
        length, slots = tokens_BS.shape[1], text.tokens_BT.shape[1]
        seen = (
            cached_views(self._config, first_slot, length, slots, text.padding_B) if layers else {}
        )
        positions_BS = jnp.maximum(first_slot + jnp.arange(length) - text.padding_B[:, None], 0)
        x_BSD = outer.embed(tokens_BS, positions_BS).astype(self._dtype)
        caches = []
        for layer, kind, old in zip(layers, self._config.layer_kinds(), text.caches, strict=True):
            block = nnx.merge(self._block_graph, layer)
            x_BSD, cache, _ = block(x_BSD, seen[kind], cache=old)
            caches.append(cache)
        return outer.unembed(x_BSD[:, -1:])[:, 0], caches

    def _empty_cache(self, rows: int, slots: int) -> Cache:
        kv_heads = self._config.n_kv_heads or self._config.n_heads or 1
        shape = (rows, kv_heads, slots, self._config.head_width)
        return Cache(jnp.zeros(shape, self._cache_dtype), jnp.zeros(shape, self._cache_dtype))


def left_padded(texts: Texts) -> tuple[np.ndarray, np.ndarray]:
    """The texts as tokens_BS, int32, filled up with zeros at their starts to a bucket's length,
    and padding_B, by how much."""
    length = SMALLEST_BUCKET
    while length < max(map(len, texts)):
        length *= 2
    tokens_BS = np.zeros((len(texts), length), np.int32)
    for row, text in zip(tokens_BS, texts, strict=True):
        row[length - len(text) :] = text
    return tokens_BS, np.array([length - len(text) for text in texts], np.int32)


def seen_tokens(text: Growing, vocab_size: int) -> Array:
    """Which tokens stand in each row: seen_BV."""
    rows, slots = text.tokens_BT.shape
    slot_T = jnp.arange(slots)
    filled_BT = (slot_T >= text.padding_B[:, None]) & (slot_T <= text.slot)
    nothing_BV = jnp.zeros((rows, vocab_size), bool)
    return nothing_BV.at[jnp.arange(rows)[:, None], text.tokens_BT].max(filled_BT)


def until(row: list[int], stop_tokens: tuple[int, ...]) -> list[int]:
    """The tokens before the first stop token."""
    return list(itertools.takewhile(lambda token: token not in stop_tokens, row))


def row_keys(seed: int, rows: int) -> Array:
    """A random key for each row, the same whatever rows there are beside it."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))


def with_matrices_in(state: nnx.State, dtype: jnp.dtype) -> nnx.State:
    """The parameters, those that are factors of a product or rows of a table in this type."""
    return jax.tree.map(lambda param: _cast(param, param[...], dtype), state, is_leaf=_is_param)


def unstacked(
    stacked: nnx.State, layers: int, dtype: jnp.dtype, take_over: bool
) -> list[nnx.State]:
    """Each layer's parameters by themselves, as `with_matrices_in`.

    Args:
        take_over: free each stacked parameter when its layers are copied.
    """
    params, tree = jax.tree.flatten(stacked, is_leaf=_is_param)
    columns = []
    for param in params:
        array = param[...]
        columns.append([_cast(param, array[layer], dtype) for layer in range(layers)])
        if take_over:
            jax.block_until_ready([copy[...] for copy in columns[-1]])
            array.delete()
    return [jax.tree.unflatten(tree, parts) for parts in zip(*columns, strict=True)]


def _cast(param: Any, array: Array, dtype: jnp.dtype) -> Any:
    return param.replace(array.astype(dtype) if param.inputs else array)


def _is_param(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
