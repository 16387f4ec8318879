"""Sample texts with their log-probabilities, for reinforcement learning. The caller fixes the
shapes, so that steps don't recompile. Rows are split over the data axis of the mesh; each device
has all weights and decodes its rows until they have stopped, without communication before that.

Axes as in `decoding.py`, and K for the numbers that seed a row's random key."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.model.decoding import Decoder, DecodingState, Prompts, Weights, pad_left, states_of
from rungs.model.gpt import GPT
from rungs.model.sampling import Sampling
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
    unused_B: Array
    """True for rows that only pad the batch."""
    numbers_BK: Array
    generated_B: Array
    """Tokens of each row that are not of its prompt."""


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

        def sample(weights: Weights, batch: Batch, *, request: RolloutRequest) -> SampledBatch:
            own_rows = functools.partial(self._sample_rows, request)
            specs = PartitionSpec(), rows
            sharded = jax.shard_map(own_rows, mesh=self._mesh, in_specs=specs, out_specs=rows)
            return sharded(weights, batch)

        self._jit_sample = jax.jit(sample, static_argnames="request", out_shardings=replicated)
        self._weights = self._jit_weights(states_of(model))

    @property
    def devices(self) -> int:
        """Number of sampling devices, which must divide the batch size."""
        return self._mesh.size

    def refresh(self, model: GPT) -> None:
        """Replace the weights by those of the same model after an update."""
        del self._weights  # before the new ones need memory
        self._weights = self._jit_weights(states_of(model))

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        randomness: Sequence[Sequence[int]],
        request: RolloutRequest,
        generated: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """Return a text for each prompt. With several processes, all must call this with the same
        arguments.

        Args:
            prompts: token ids, at least one each.
            randomness: for each prompt, the numbers that seed its text, such as seed, step, prompt
                and sample; equally many, below 2³².
            generated: how many tokens at the end of each prompt already count as new ones, so that
                a text goes on with the random numbers of its next tokens. Default: none.

        Raises:
            ValueError: a prompt is empty, has a token id that the model doesn't have, or is longer
                than `prompt_tokens` or, with the new tokens, than the context; or prompts in a
                group of `rows_per_prompt` differ."""
        known = list(generated or [0] * len(prompts))
        self._check(prompts, request, known)
        size = request.batch_size
        parts = (slice(at, at + size) for at in range(0, len(prompts), size))
        batches = (
            self._start(prompts[part], randomness[part], known[part], request) for part in parts
        )
        return list(_read_in_turn(batches))[: len(prompts)]

    def _check(
        self, prompts: Sequence[Sequence[int]], request: RolloutRequest, generated: Sequence[int]
    ) -> None:
        self._decoder.check(prompts)
        room, groups = self._decoder.config.context_length, request.rows_per_prompt
        for prompt, count in zip(prompts, generated, strict=True):
            most = min(request.prompt_tokens, room - request.new_tokens + count)
            if len(prompt) > most:
                raise ValueError(f"a prompt has {len(prompt)} tokens; at most {most} fit")
        if any(prompt != prompts[row - row % groups] for row, prompt in enumerate(prompts)):
            raise ValueError(f"not all {groups} rows of a group have the same prompt")

    def _start(
        self,
        prompts: Sequence[Sequence[int]],
        randomness: Sequence[Sequence[int]],
        generated: Sequence[int],
        request: RolloutRequest,
    ) -> SampledBatch:
        """Start sampling a batch; the last one may have fewer prompts than rows."""
        used_B = np.arange(request.batch_size) < len(prompts)
        rows_B = np.where(used_B, np.arange(request.batch_size), 0)
        tokens_BS, padding_B = pad_left([prompts[row] for row in rows_B], request.prompt_tokens)
        numbers_BK = np.array([randomness[row] for row in rows_B], np.uint32)
        generated_B = np.array([generated[row] for row in rows_B], np.int32)
        arrays = tokens_BS, padding_B, ~used_B, numbers_BK, generated_B
        batch = Batch(*map(self._placed, arrays))
        return self._jit_sample(self._weights, batch, request=request)

    def _placed(self, rows: np.ndarray) -> Array:
        """Return an array with its leading axis split over the devices."""
        sharding = NamedSharding(self._mesh, Layout(self._mesh).rows_spec())
        own = rows[process_local_rows(self._mesh, len(rows))]
        with jax.transfer_guard("allow"):  # JAX calls it implicit with several processes
            return jax.make_array_from_process_local_data(sharding, own, rows.shape)

    def _sample_rows(self, request: RolloutRequest, weights: Weights, batch: Batch) -> SampledBatch:
        """Return the texts of this device's rows."""
        sampling = Sampling(temperature=request.temperature, stop_tokens=request.stop_tokens)
        first_B, *others = batch.numbers_BK.T
        keys_B = jax.vmap(jax.random.key)(first_B)
        for numbers_B in others:
            keys_B = jax.vmap(jax.random.fold_in)(keys_B, numbers_B)
        prompts = Prompts(
            batch.tokens_BS, batch.padding_B, batch.unused_B, keys_B, batch.generated_B
        )
        first = request.prompt_tokens
        slots = first + request.new_tokens
        state = self._decoder.initial_state(prompts, slots, keep_log_probs=True)
        if first > 1:
            state = self._read_prompts(weights, state, first - 1, request.rows_per_prompt)
        limit = slots - 1 - batch.generated_B.min()
        state = self._decoder.decode(weights, state, limit, sampling=sampling)
        assert state.log_probs_BT is not None
        last = self._decoder.config.vocab_size - 1  # replaces UNDEFINED; the loss will be NaN
        sampled_B, most_B = state.ends_B - first, request.new_tokens - batch.generated_B
        return SampledBatch(
            jnp.minimum(state.tokens_BT[:, first:], last),
            state.log_probs_BT[:, first:],
            jnp.minimum(sampled_B, most_B),
            state.stopped_B & (sampled_B <= most_B),
        )

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


def _read_in_turn(batches: Iterator[SampledBatch]) -> Iterator[Rollout]:
    """Yield the rollouts of all batches; each is read while the next one runs. With more in flight,
    virtual CPU devices could deadlock, as collectives block a thread each, of one per core."""
    running = None
    for started in itertools.chain(batches, [None]):
        if running is not None:
            yield from _read(running)
        running = started


def _read(sampled: SampledBatch) -> Iterator[Rollout]:
    """Yield the rollouts of a batch."""
    for tokens, log_probs, count, finished in zip(*jax.device_get(sampled), strict=True):
        yield Rollout(tokens[:count].tolist(), log_probs[:count], bool(finished))
