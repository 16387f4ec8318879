"""Sample texts with their log-probabilities, for reinforcement learning. The caller fixes the
shapes, so that steps don't recompile. Rows are split over the data axis of the mesh; each device
has all weights and decodes its rows until they have stopped, without communication before that.
Texts may be written in turns, with others' tokens in between: then each row has a place of its own,
where it reads a token that is there, or else adds one, until it has to wait for a reply.

Axes as in `decoding.py`, and K for the numbers that seed a row's random key."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.model.decoding import (
    Decoder,
    DecodingState,
    Prompts,
    Weights,
    pad_left,
    states_of,
)
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.model.sampling import Sampling, next_tokens
from rungs.parallel.sharding import DATA, Layout, one_device, process_local_rows, size_along

TOGETHER = 16
"""Tokens that each row reads at once if it has so many unread ones on average."""
FEWEST_ROWS = 16
"""Rows of a device for fewer of which no program is compiled."""


class RolloutRequest(NamedTuple):
    """Settings of a batch of samples. There is no top-k or the like, as tokens must come from the
    distribution that their log-probabilities describe."""

    batch_size: int
    """Rows sampled at once, on all devices."""
    prompt_tokens: int
    """The length to which prompts are padded."""
    new_tokens: int
    """Maximum number of tokens after each prompt."""
    temperature: float
    """Divisor of the logits, above 0."""
    stop_tokens: tuple[int, ...]
    """Tokens that end the text."""
    rows_per_prompt: int = 1
    """Consecutive rows with the same prompt, which is read once. Divides a device's rows."""
    has_turns: bool = False
    """Whether texts go on after a stop token, with others' tokens in between. A call then ends as
    soon as one text in 16 has stopped."""

    @property
    def slots(self) -> int:
        """Tokens of the longest text."""
        return self.prompt_tokens + self.new_tokens


class Rollout(NamedTuple):
    """A completion of a prompt, or a turn of it."""

    tokens: list[int]
    """Token ids, including a stop token, if any."""
    log_probs: np.ndarray
    """Log-probability of each token, after the temperature: float32, in nats."""
    finished: bool
    """Whether the last token is a stop token."""


class SampledBatch(NamedTuple):
    """Results of a program call; T slots of padded prompts and of what follows."""

    tokens_BT: Array
    ends_B: Array
    """Slot after each row's last token."""
    stopped_B: Array
    """True for rows that get no more tokens."""
    unread_B: Array
    """Tokens of each row that are still to read before its last one."""
    log_probs_BT: Array
    """Of the model's tokens; of others undefined."""


class RolloutSampler:
    """Samples from a model whose weights change.

    Args:
        model: on `mesh`; its parameters are copied.
        mesh: default: one device. Axes other than `data` must have one device.
        compute_dtype: dtype of matrices, activations and, except on a CPU, the cache.

    Raises:
        ValueError: the mesh has several devices along another axis than `data`."""

    def __init__(
        self, model: GPT, mesh: Mesh | None = None, compute_dtype: jnp.dtype = jnp.float32
    ) -> None:
        self._mesh = mesh if mesh is not None else one_device()
        if size_along(self._mesh, DATA) < self._mesh.size:
            raise ValueError("sampling of rollouts needs sharding mode dp or fsdp")
        self._decoder = Decoder(model, compute_dtype)
        replicated = NamedSharding(self._mesh, PartitionSpec())
        self._jit_weights = jax.jit(self._decoder.weights, out_shardings=replicated)
        rows = Layout(self._mesh).rows_spec()
        self._by_row = NamedSharding(self._mesh, rows)

        def program(method: Callable[..., Any], results: Any, **keys: Any) -> jax.stages.Wrapped:
            """Return the program in which each device calls a method with its rows."""

            def of_all_rows(weights: Weights, *arrays: Any, request: RolloutRequest) -> Any:
                own = functools.partial(method, request)
                specs = PartitionSpec(), *[rows] * len(arrays)
                sharded = jax.shard_map(own, mesh=self._mesh, in_specs=specs, out_specs=rows)
                return sharded(weights, *arrays)

            return jax.jit(of_all_rows, static_argnames="request", out_shardings=results, **keys)

        self.write = program(self._write, replicated)
        self.begin = program(self._begin, self._by_row)
        self.keep = program(
            lambda _, __, state, rows_B: jax.tree.map(lambda x: x[rows_B], state), self._by_row
        )
        self.read = program(self._read, self._by_row, donate_argnums=1)
        self.go_on = program(self._go_on, (replicated, self._by_row), donate_argnums=1)
        self._weights = self._jit_weights(states_of(model))

    @property
    def devices(self) -> int:
        """Number of sampling devices, which must divide the batch size."""
        return self._mesh.size

    def refresh(self, model: GPT) -> None:
        """Replace the weights by those of the same model after an update."""
        del self._weights  # before the new ones need memory
        self._weights = self._jit_weights(states_of(model))

    def check(self, prompts: Sequence[Sequence[int]], request: RolloutRequest) -> None:
        """Raise ValueError unless these can be prompts."""
        self._decoder.check(prompts)
        room, groups = self._decoder.config.context_length, request.rows_per_prompt
        most = min(request.prompt_tokens, room - request.new_tokens)
        longest = max(map(len, prompts))
        if longest > most:
            raise ValueError(f"a prompt has {longest} tokens; at most {most} fit")
        if any(text != prompts[row - row % groups] for row, text in enumerate(prompts)):
            raise ValueError(f"not all {groups} rows of a group have the same prompt")

    def call(
        self, program: Any, request: RolloutRequest, arrays: Sequence[np.ndarray], *state: Any
    ) -> Any:
        """Return what one of the programs starts to compute from all rows of some arrays."""
        return program(self._weights, *state, *self._placed(arrays), request=request)

    def _placed(self, arrays: Sequence[np.ndarray]) -> list[Array]:
        """Return arrays with their leading axis split over the devices."""
        own = [rows[process_local_rows(self._mesh, len(rows))] for rows in arrays]
        shapes = [rows.shape for rows in arrays]
        with jax.transfer_guard("allow"):  # JAX calls it implicit with several processes
            return jax.make_array_from_process_local_data(self._by_row, own, shapes)

    def _write(self, request: RolloutRequest, weights: Weights, *prompts: Array) -> SampledBatch:
        """Return texts that have stopped. All rows have their next token in the same slot."""
        state = self._read_prompts(request, weights, *prompts)
        limit, sampling = jnp.asarray(request.slots - 1), _sampling(request)
        state = self._decoder.decode(weights, state, limit, sampling=sampling)
        return self._sampled(state._replace(stopped_B=jnp.ones_like(state.stopped_B)))

    def _begin(self, request: RolloutRequest, weights: Weights, *prompts: Array) -> DecodingState:
        """Return a state with a slot for each row, that of the next token to read: the last one of
        its prompt."""
        state = self._read_prompts(request, weights, *prompts)
        filled = functools.partial(jnp.full_like, state.padding_B)
        slot_B, offset_B = map(filled, (state.slot, state.sampling_offset))
        return state._replace(slot=slot_B, sampling_offset=offset_B)

    def _read(
        self, _: RolloutRequest, weights: Weights, state: DecodingState, *texts: Array
    ) -> DecodingState:
        """Read much that is unread together, but for the last tokens."""
        rows, slots = state.tokens_BT.shape
        length = min(TOGETHER, slots)
        if any(cache.slot_axis is None for cache in state.caches):  # of delta_net
            return state

        def read(state: DecodingState) -> DecodingState:
            first_B = jnp.minimum(state.slot, slots - length)
            places_BS = first_B[:, None] + jnp.arange(length)
            tokens_BS = jnp.take_along_axis(state.tokens_BT, places_BS, axis=1)
            _, caches = self._decoder.last_logits(weights, state, tokens_BS, first_B)
            slot = jnp.minimum(first_B + length, state.ends_B - 1)
            return state._replace(slot=slot, caches=caches)

        return jax.lax.while_loop(
            lambda state: _unread_B(state).sum() >= rows * length, read, _with(state, *texts)
        )

    def _go_on(
        self, request: RolloutRequest, weights: Weights, state: DecodingState, *texts: Array
    ) -> tuple[SampledBatch, DecodingState]:
        """Return texts when one in 16 has stopped, and the state."""
        state = _with(state, *texts)
        going = (~state.stopped_B).sum()
        state = jax.lax.while_loop(
            lambda state: (~state.stopped_B).sum() > going * 15 // 16,
            functools.partial(self._add_token, request, weights),
            state,
        )
        return self._sampled(state), state

    def _add_token(
        self, request: RolloutRequest, weights: Weights, state: DecodingState
    ) -> DecodingState:
        """Read a token of each text, and add the next one if there is none. Texts that have stopped
        wait before the one that is added after a reply."""
        row_B, next_B = jnp.arange(len(state.slot)), state.slot + 1
        adds_B = (next_B == state.ends_B) & ~state.stopped_B
        waits_B = (next_B == state.ends_B) & state.stopped_B
        last_B1 = state.tokens_BT[row_B, state.slot][:, None]
        logits_BV, caches = self._decoder.last_logits(weights, state, last_B1, state.slot)
        keys_B = jax.vmap(jax.random.fold_in)(state.keys_B, state.slot - state.sampling_offset)
        tokens_B = next_tokens(_sampling(request), logits_BV, logits_BV > 0, keys_B)
        log_probs_B = -target_losses(logits_BV / request.temperature, tokens_B)
        place_B = jnp.where(adds_B, next_B, request.slots)  # beyond: dropped
        ends_B = state.ends_B + adds_B
        is_last_B = jnp.isin(tokens_B, jnp.array(request.stop_tokens)) | (ends_B == request.slots)
        assert state.log_probs_BT is not None

        def kept(old: Array, new: Array) -> Array:  # with slots, waiting writes the same again
            return jnp.where(jnp.expand_dims(waits_B, range(1, new.ndim)), old, new)

        return state._replace(
            tokens_BT=state.tokens_BT.at[row_B, place_B].set(tokens_B, mode="drop"),
            log_probs_BT=state.log_probs_BT.at[row_B, place_B].set(log_probs_B, mode="drop"),
            slot=jnp.where(waits_B, state.slot, next_B),
            ends_B=ends_B,
            stopped_B=state.stopped_B | adds_B & is_last_B,
            caches=[
                jax.tree.map(kept, old, new) if new.slot_axis is None else new
                for old, new in zip(state.caches, caches, strict=True)
            ],
        )

    def _read_prompts(
        self, request: RolloutRequest, weights: Weights, *prompts: Array
    ) -> DecodingState:
        """Return a state whose caches hold the prompts but for their last tokens, computed once per
        prompt."""
        tokens_BS, padding_B, unused_B, numbers_BK = prompts
        keys_B = jax.vmap(jax.random.key)(numbers_BK[:, 0])
        for numbers_B in numbers_BK.T[1:]:
            keys_B = jax.vmap(jax.random.fold_in)(keys_B, numbers_B)
        padded = Prompts(tokens_BS, padding_B, unused_B, keys_B, 0)
        state = self._decoder.initial_state(padded, request.slots, keep_log_probs=True)
        if request.prompt_tokens == 1:
            return state

        def one_of_each(array: Array) -> Array:
            return array[:: request.rows_per_prompt]

        different = state._replace(
            tokens_BT=one_of_each(state.tokens_BT),
            padding_B=one_of_each(state.padding_B),
            caches=jax.tree.map(one_of_each, state.caches),
        )
        tokens = different.tokens_BT[:, : request.prompt_tokens - 1]
        _, caches = self._decoder.last_logits(weights, different, tokens, None)
        repeat = functools.partial(jnp.repeat, repeats=request.rows_per_prompt, axis=0)
        return state._replace(caches=jax.tree.map(repeat, caches))

    def _sampled(self, state: DecodingState) -> SampledBatch:
        assert state.log_probs_BT is not None
        last = self._decoder.config.vocab_size - 1  # replaces UNDEFINED; the loss will be NaN
        tokens_BT = jnp.minimum(state.tokens_BT, last)
        texts = tokens_BT, state.ends_B, state.stopped_B
        return SampledBatch(*texts, _unread_B(state), state.log_probs_BT)


class RolloutBatch:
    """Texts that are written together, perhaps in turns. With several processes, all must make and
    use the same ones.

    Args:
        prompts: token ids, at least one each; at most `batch_size` prompts.
        randomness: for each prompt, the numbers that seed its text, such as seed, step, prompt and
            sample; equally many, below 2³².

    Raises:
        ValueError: a prompt is empty, has a token id that the model doesn't have, or is longer than
            `prompt_tokens` or, with the new tokens, than the context; or prompts in a group of
            `rows_per_prompt` differ."""

    def __init__(
        self,
        sampler: RolloutSampler,
        prompts: Sequence[Sequence[int]],
        randomness: Sequence[Sequence[int]],
        request: RolloutRequest,
    ) -> None:
        sampler.check(prompts, request)
        self._sampler, self._request = sampler, request
        size, own = request.batch_size, len(prompts)
        rows = [*range(own), *[0] * (size - own)]  # the last ones have no text of their own
        tokens_BS, padding_B = pad_left([prompts[row] for row in rows], request.prompt_tokens)
        unused_B, numbers_BK = np.arange(size) >= own, [randomness[row] for row in rows]
        self._prompts = tokens_BS, padding_B, unused_B, np.array(numbers_BK, np.uint32)
        ends_B = np.full(size, request.prompt_tokens, np.int32)
        tokens_BT = np.pad(tokens_BS, ((0, 0), (0, request.new_tokens)))
        self._rows = _Rows(tokens_BT, ends_B, unused_B, ends_B * 0, ends_B.copy(), np.arange(size))
        self._state: DecodingState | None = None

    def write(self, replies: Mapping[int, Sequence[int]] = {}) -> dict[int, Rollout]:
        """Return what the model has written in the texts that have stopped, or have no room for
        more: all that go on, with turns at least one in 16 of them.

        Args:
            replies: what follows in texts that have stopped and go on, with room for a token after
                it. Others are over."""
        row_of = {text: row for row, text in enumerate(self._rows.text_B.tolist())}
        for text, reply in replies.items():
            self._rows.add(row_of[text], reply)
        if self._state:
            self._drop_rows(self._state)
        new: SampledBatch = jax.device_get(self._run())
        stopped = np.flatnonzero(new.stopped_B & ~self._rows.stopped_B).tolist()
        fields = SampledBatch._fields[:4]
        self._rows = self._rows._replace(**{key: np.array(getattr(new, key)) for key in fields})
        return {int(self._rows.text_B[row]): self._turn(row, new) for row in stopped}

    def _run(self) -> SampledBatch:
        """Start to write."""
        sampler, call, rows = self._sampler, self._sampler.call, self._rows
        if not self._request.has_turns:
            return call(sampler.write, self._request, self._prompts)
        if self._state is None:
            self._state = call(sampler.begin, self._request, self._prompts)
        elif rows.unread_B.sum() >= TOGETHER * len(rows.unread_B):
            self._state = call(sampler.read, self._request, rows[:3], self._state)
        sampled, self._state = call(sampler.go_on, self._request, rows[:3], self._state)
        return sampled

    def _drop_rows(self, state: DecodingState) -> None:
        """Let rows whose texts are over go, as soon as a quarter of each device's is enough; more
        sizes than that would take long to compile."""
        stopped_DB = self._rows.stopped_B.reshape(self._sampler.devices, -1)
        size = rows = stopped_DB.shape[1]
        needed = max((~stopped_DB).sum(axis=1).max(), FEWEST_ROWS)
        while needed <= size // 4:
            size //= 4
        if size < rows:
            own_DB = np.argsort(stopped_DB, axis=1, kind="stable")[:, :size]
            kept = (own_DB + rows * np.arange(len(own_DB))[:, None]).ravel()
            own = [own_DB.ravel()]
            self._state = self._sampler.call(self._sampler.keep, self._request, own, state)
            self._rows = _Rows(*(array[kept] for array in self._rows))

    def _turn(self, row: int, new: SampledBatch) -> Rollout:
        """Return what a row's turn has so far."""
        turn = slice(self._rows.begins_B[row], new.ends_B[row])
        tokens = new.tokens_BT[row, turn].tolist()
        is_finished = tokens[-1] in self._request.stop_tokens
        return Rollout(tokens, np.asarray(new.log_probs_BT[row, turn]), is_finished)


class _Rows(NamedTuple):
    """What the rows of a batch have; the first fields as in `SampledBatch`."""

    tokens_BT: np.ndarray
    ends_B: np.ndarray
    stopped_B: np.ndarray
    unread_B: np.ndarray
    begins_B: np.ndarray
    """Slot of the first token of each row's turn."""
    text_B: np.ndarray
    """Which text each row has."""

    def add(self, row: int, reply: Sequence[int]) -> None:
        """Add the tokens of a reply, after which the text goes on."""
        end = self.ends_B[row] + len(reply)
        self.tokens_BT[row, self.ends_B[row] : end] = reply
        self.ends_B[row] = self.begins_B[row] = end
        self.unread_B[row] += len(reply)
        self.stopped_B[row] = False


def _with(state: DecodingState, tokens_BT: Array, ends_B: Array, stopped_B: Array) -> DecodingState:
    return state._replace(tokens_BT=tokens_BT, ends_B=ends_B, stopped_B=stopped_B)


def _unread_B(state: DecodingState) -> Array:
    return state.ends_B - 1 - state.slot


def _sampling(request: RolloutRequest) -> Sampling:
    return Sampling(temperature=request.temperature, stop_tokens=request.stop_tokens)
