"""Sample texts with their log-probabilities, for reinforcement learning. The caller fixes the
shapes, so that steps don't recompile. Rows are split over the data axis of the mesh; each device
has all weights and decodes its rows until they have stopped, without communication before that.
Texts may be written in turns, with others' tokens in between, which are read then.

Axes as in `decoding.py`, and K for the numbers that seed a row's random key."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.model.decoding import (
    Decoder,
    DecodingState,
    LayerCache,
    Prompts,
    Weights,
    pad_left,
    states_of,
)
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.model.sampling import Sampling, next_tokens
from rungs.parallel import collectives
from rungs.parallel.sharding import DATA, Layout, one_device, process_local_rows, size_along


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
    """Whether texts go on after a stop token, with others' tokens in between: their keys and values
    are kept, and a call ends as soon as half of the texts have stopped."""

    @property
    def slots(self) -> int:
        """Tokens of the longest text."""
        return self.prompt_tokens + self.new_tokens


class Rollout(NamedTuple):
    """A completion of a prompt."""

    tokens: list[int]
    """Token ids, including a stop token, if any."""
    log_probs: np.ndarray
    """Log-probability of each token, after the temperature: float32, in nats."""
    finished: bool
    """Whether the last token is a stop token."""


class Batch(NamedTuple):
    """Rows of one program call, on their devices."""

    tokens_BS: Array
    padding_B: Array
    """Slots of each row without a token: before its tokens; with turns, after them."""
    unused_B: Array
    """True for rows without a text, or whose text is over."""
    numbers_BK: Array
    generated_B: Array
    """Tokens of each row that are not of its prompt."""


class Turn(NamedTuple):
    """Texts of which some have stopped; N slots of new tokens."""

    tokens_BN: Array
    log_probs_BN: Array
    counts_B: Array
    stopped_B: Array
    caches: list[LayerCache]

    @classmethod
    def begun(cls, new_tokens: int, stopped_B: Array, caches: list[LayerCache]) -> "Turn":
        """Return a turn in which nothing is written."""
        rows = len(stopped_B)
        nothing = jnp.zeros((rows, new_tokens)), jnp.zeros(rows, jnp.int32)
        log_probs_BN, counts_B = collectives.to_varying(nothing, DATA)
        return cls(log_probs_BN.astype(jnp.int32), log_probs_BN, counts_B, stopped_B, caches)


class SampledBatch(NamedTuple):
    """Results of a program call; T slots of new tokens."""

    tokens_BT: Array
    log_probs_BT: Array
    counts_B: Array
    finished_B: Array


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

        def sample(
            weights: Weights,
            batch: Batch,
            caches: list[LayerCache] | None,
            *,
            request: RolloutRequest,
            unread: int,
        ) -> tuple[SampledBatch, list[LayerCache] | None]:
            own_rows = functools.partial(self._sample_rows, request, unread)
            specs = PartitionSpec(), rows, rows
            sharded = jax.shard_map(own_rows, mesh=self._mesh, in_specs=specs, out_specs=rows)
            return sharded(weights, batch, caches)

        self._jit_sample = jax.jit(
            sample,
            static_argnames=("request", "unread"),
            donate_argnames="caches",
            out_shardings=(replicated, NamedSharding(self._mesh, rows)),
        )
        self._weights = self._jit_weights(states_of(model))

    @property
    def devices(self) -> int:
        """Number of sampling devices, which must divide the batch size."""
        return self._mesh.size

    def reads_on(self, request: RolloutRequest) -> bool:
        """Whether texts with turns are read once: a recurrent state can't go back to the slot after
        which a text has stopped."""
        return request.has_turns and "delta_net" not in self._decoder.config.layer_kinds()

    def refresh(self, model: GPT) -> None:
        """Replace the weights by those of the same model after an update."""
        del self._weights  # before the new ones need memory
        self._weights = self._jit_weights(states_of(model))

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        randomness: Sequence[Sequence[int]],
        request: RolloutRequest,
    ) -> list[Rollout]:
        """Return a text for each prompt, a batch at a time: see `RolloutBatch`."""
        size = request.batch_size
        parts = [slice(at, at + size) for at in range(0, len(prompts), size)]
        batches = [(RolloutBatch(self, randomness[part], request), part) for part in parts]
        return [one for batch, part in batches for one in batch.write(prompts[part]) if one]

    def check(
        self, texts: Sequence[Sequence[int]], generated: Sequence[int], request: RolloutRequest
    ) -> None:
        """Raise ValueError if texts can't go on."""
        self._decoder.check(texts)
        room, groups = self._decoder.config.context_length, request.rows_per_prompt
        for text, count in zip(texts, generated, strict=True):
            most = min(request.prompt_tokens, room - request.new_tokens + count)
            if len(text) > most:
                raise ValueError(f"a prompt has {len(text)} tokens; at most {most} fit")
        if any(text != texts[row - row % groups] for row, text in enumerate(texts)):
            raise ValueError(f"not all {groups} rows of a group have the same prompt")

    def run(
        self,
        rows: Sequence[np.ndarray],
        caches: list[LayerCache] | None,
        request: RolloutRequest,
        unread: int,
    ) -> tuple[SampledBatch, list[LayerCache] | None]:
        """Start sampling the rows of a `Batch`, and return its results and caches to go on with.

        Args:
            caches: of the turn before; None to read the texts from their beginning.
            unread: how many tokens at the end of each text are not in the caches."""
        batch = Batch(*map(self._placed, rows))
        return self._jit_sample(self._weights, batch, caches, request=request, unread=unread)

    def _placed(self, rows: np.ndarray) -> Array:
        """Return an array with its leading axis split over the devices."""
        sharding = NamedSharding(self._mesh, Layout(self._mesh).rows_spec())
        own = rows[process_local_rows(self._mesh, len(rows))]
        with jax.transfer_guard("allow"):  # JAX calls it implicit with several processes
            return jax.make_array_from_process_local_data(sharding, own, rows.shape)

    def _sample_rows(
        self,
        request: RolloutRequest,
        unread: int,
        weights: Weights,
        batch: Batch,
        caches: list[LayerCache] | None,
    ) -> tuple[SampledBatch, list[LayerCache] | None]:
        """Return the texts of this device's rows."""
        first_B, *others = batch.numbers_BK.T
        keys_B = jax.vmap(jax.random.key)(first_B)
        for numbers_B in others:
            keys_B = jax.vmap(jax.random.fold_in)(keys_B, numbers_B)
        prompts = Prompts(
            batch.tokens_BS, batch.padding_B, batch.unused_B, keys_B, batch.generated_B
        )
        if not self.reads_on(request):
            return self._write_to_the_end(request, weights, prompts), None
        return self._write_turn(request, unread, weights, prompts, caches)

    def _write_to_the_end(
        self, request: RolloutRequest, weights: Weights, prompts: Prompts
    ) -> SampledBatch:
        """Return texts that have stopped. All rows have their next token in the same slot."""
        first, sampling = request.prompt_tokens, _sampling(request)
        state = self._decoder.initial_state(prompts, request.slots, keep_log_probs=True)
        if first > 1:
            state = self._read_prompts(weights, state, first - 1, request.rows_per_prompt)
        generated_B = jnp.asarray(prompts.generated)
        limit = request.slots - 1 - generated_B.min()
        state = self._decoder.decode(weights, state, limit, sampling=sampling)
        assert state.log_probs_BT is not None
        last = self._decoder.config.vocab_size - 1  # replaces UNDEFINED; the loss will be NaN
        sampled_B, most_B = state.ends_B - first, request.new_tokens - generated_B
        return SampledBatch(
            jnp.minimum(state.tokens_BT[:, first:], last),
            state.log_probs_BT[:, first:],
            jnp.minimum(sampled_B, most_B),
            state.stopped_B & (sampled_B <= most_B),
        )

    def _write_turn(
        self,
        request: RolloutRequest,
        unread: int,
        weights: Weights,
        texts: Prompts,
        caches: list[LayerCache] | None,
    ) -> tuple[SampledBatch, list[LayerCache]]:
        """Return texts of which half have stopped, and their caches. Each row has its tokens from
        slot 0 on, so those that have stopped wait where they are."""
        rows, slots = texts.tokens_BS.shape
        row_B, ends_B = jnp.arange(rows), slots - texts.padding_B
        most_B, sampling = request.new_tokens - texts.generated, _sampling(request)
        unpadded = texts._replace(padding_B=jnp.zeros_like(ends_B))
        state = self._decoder.initial_state(unpadded, slots)
        if caches is None and request.prompt_tokens > 1:
            length = request.prompt_tokens - 1
            state = self._read_prompts(weights, state, length, request.rows_per_prompt)

        def is_active_B(turn: Turn) -> Array:
            return ~turn.stopped_B & (turn.counts_B < most_B)

        def add(turn: Turn, tokens_BS: Array) -> Turn:
            """Add the token after `tokens_BS`, the last ones of each text."""
            first_B = jnp.maximum(ends_B + turn.counts_B - tokens_BS.shape[1], 0)
            now = state._replace(caches=turn.caches)
            logits_BV, read = self._decoder.last_logits(weights, now, tokens_BS, first_B)
            keys_B = jax.vmap(jax.random.fold_in)(texts.keys_B, texts.generated + turn.counts_B)
            tokens_B = next_tokens(sampling, logits_BV, logits_BV > 0, keys_B)
            log_probs_B = -target_losses(logits_BV / request.temperature, tokens_B)
            active_B = is_active_B(turn)
            place_B = jnp.where(active_B, turn.counts_B, request.new_tokens)  # beyond: dropped
            kept_B = jnp.minimum(tokens_B, logits_BV.shape[-1] - 1)  # UNDEFINED; the loss is NaN
            return Turn(
                turn.tokens_BN.at[row_B, place_B].set(kept_B, mode="drop"),
                turn.log_probs_BN.at[row_B, place_B].set(log_probs_B, mode="drop"),
                turn.counts_B + active_B,
                turn.stopped_B | active_B & jnp.isin(tokens_B, jnp.array(request.stop_tokens)),
                read,
            )

        def add_next(turn: Turn) -> Turn:
            return add(turn, turn.tokens_BN[row_B, turn.counts_B - 1][:, None])

        begin = Turn.begun(request.new_tokens, texts.stopped_B, caches or state.caches)
        places_BS = jnp.maximum(ends_B - unread, 0)[:, None] + jnp.arange(unread)
        turn = add(begin, jnp.take_along_axis(texts.tokens_BS, places_BS, axis=1))
        waiting = is_active_B(begin).sum() // 2
        turn = jax.lax.while_loop(lambda turn: is_active_B(turn).sum() > waiting, add_next, turn)
        sampled = turn.tokens_BN, turn.log_probs_BN, turn.counts_B
        return SampledBatch(*sampled, turn.stopped_B & (turn.counts_B > 0)), turn.caches

    def _read_prompts(
        self, weights: Weights, state: DecodingState, length: int, rows_per_prompt: int
    ) -> DecodingState:
        """Return a state whose caches hold the first `length` slots, computed once per prompt."""

        def one_of_each(array: Array) -> Array:
            return array[::rows_per_prompt]

        prompts = state._replace(
            tokens_BT=one_of_each(state.tokens_BT),
            padding_B=one_of_each(state.padding_B),
            caches=jax.tree.map(one_of_each, state.caches),
        )
        tokens = prompts.tokens_BT[:, :length]
        _, caches = self._decoder.last_logits(weights, prompts, tokens, None)
        repeat = functools.partial(jnp.repeat, repeats=rows_per_prompt, axis=0)
        return state._replace(caches=jax.tree.map(repeat, caches))


class RolloutBatch:
    """Texts that are written together, perhaps in turns. With several processes, all must make and
    use the same ones.

    Args:
        randomness: for each text, the numbers that seed it, such as seed, step, prompt and sample;
            equally many, below 2³². At most `batch_size` texts."""

    def __init__(
        self, sampler: RolloutSampler, randomness: Sequence[Sequence[int]], request: RolloutRequest
    ) -> None:
        self._sampler, self._request = sampler, request
        rows_B = np.arange(request.batch_size) % len(randomness)
        self._numbers_BK = np.array(randomness, np.uint32)[rows_B]
        self._caches: list[LayerCache] | None = None
        self._read_B = np.zeros(request.batch_size, np.int32)
        """Tokens of each row in the caches."""

    def write(
        self, texts: Sequence[Sequence[int] | None], generated: Sequence[int] | None = None
    ) -> list[Rollout | None]:
        """Return what the model writes after each text: with turns, until half of them have
        stopped.

        Args:
            texts: token ids, at least one each; later ones go on from the earlier. None: is over.
            generated: how many tokens at the end of each already count as new ones, so that it goes
                on with the random numbers of its next tokens. Default: none.

        Raises:
            ValueError: a text is empty, has a token id that the model doesn't have, or is longer
                than `prompt_tokens` or, with the new tokens, than the context; or texts in a group
                of `rows_per_prompt` differ."""
        going = {row: text for row, text in enumerate(texts) if text is not None}
        count_of = dict(enumerate(generated or [0] * len(texts)))
        unread = self._unread(going)
        request = self._request
        if any(generated or ()):  # later, prompts are as long as the texts may be
            request = request._replace(prompt_tokens=request.slots, rows_per_prompt=1)
        self._sampler.check([*going.values()], [count_of[row] for row in going], request)
        rows_B = [row if row in going else min(going) for row in range(request.batch_size)]
        own = [going[row] for row in rows_B]
        if self._sampler.reads_on(request):
            tokens_BS, padding_B = _pad_right(own, self._request.slots)
        else:
            tokens_BS, padding_B = pad_left(own, request.prompt_tokens)
        is_over_B = np.array([row not in going for row in range(request.batch_size)])
        generated_B = np.array([count_of[row] for row in rows_B], np.int32)
        arrays = tokens_BS, padding_B, is_over_B, self._numbers_BK, generated_B
        caches, self._caches = self._caches if unread else None, None
        sampled, self._caches = self._sampler.run(arrays, caches, request, unread or 1)
        found = [*_read(sampled)]
        for row, text in going.items():
            self._read_B[row] = len(text) + len(found[row].tokens) - 1
        return [found[row] if row in going else None for row in range(len(texts))]

    def _unread(self, going: Mapping[int, Sequence[int]]) -> int | None:
        """Return how many tokens at the end of each text to read, a power of two; None for all.
        Rows with fewer unread ones read some again."""
        if self._caches is None:
            return None
        most = max(len(text) - self._read_B[row] for row, text in going.items())
        unread = 1 << (int(most) - 1).bit_length()
        return unread if unread <= min(map(len, going.values())) else None


def _sampling(request: RolloutRequest) -> Sampling:
    return Sampling(temperature=request.temperature, stop_tokens=request.stop_tokens)


def _pad_right(texts: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens_BS, int32, right-padded with zeros to a length, and padding_B, their number."""
    tokens_BS = np.zeros((len(texts), length), np.int32)
    for row, text in zip(tokens_BS, texts, strict=True):
        row[: len(text)] = text
    return tokens_BS, np.array([length - len(text) for text in texts], np.int32)


def _read(sampled: SampledBatch) -> Iterator[Rollout]:
    """Yield the rollouts of a batch."""
    for tokens, log_probs, count, finished in zip(*jax.device_get(sampled), strict=True):
        yield Rollout(tokens[:count].tolist(), log_probs[:count], bool(finished))
