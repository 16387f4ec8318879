"""Rollouts are what the model's distribution says, whatever the batch, the step and the mesh."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rungs.model import rollouts
from rungs.model.decoding import DecodingState
from rungs.model.generation import Generator, Request
from rungs.model.gpt import GPT
from rungs.model.rollouts import Rollout, RolloutBatch, RolloutRequest, RolloutSampler
from rungs.model.sampling import Sampling
from rungs.parallel import sharding
from rungs.planning.program import collectives
from tests.model.test_generation import ARCHITECTURES, varied_model
from tests.support.configs import mesh_of
from tests.support.sharded_models import random_model_and_optimizer, run_of
from tests.support.tiny_model import bind_and_jit

STOPS = (3, 9)
PROMPTS = [[5, 1, 30], [7], [3, 9, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [5, 1, 30], [2, 2]]
RANDOMNESS = [(0, 4, row, 1) for row in range(len(PROMPTS))]
REQUEST = RolloutRequest(8, 12, 24, 1.4, STOPS)


def sample(
    sampler: RolloutSampler,
    prompts: Sequence[list[int]],
    randomness: Sequence[Sequence[int]],
    request: RolloutRequest,
) -> list[Rollout]:
    """Return a text for each prompt, a batch at a time."""
    parts = [
        slice(at, at + request.batch_size) for at in range(0, len(prompts), request.batch_size)
    ]
    batches = [RolloutBatch(sampler, prompts[part], randomness[part], request) for part in parts]
    return [rollout for batch in batches for rollout in batch.write().values()]


def trained_log_probs(
    model: GPT, prompts: Sequence[list[int]], rollouts: list[Rollout], temperature: float
) -> list[np.ndarray]:
    """Return the log-probabilities of the new tokens as a trainer computes them: without a cache,
    from texts padded on the right."""
    length = model.config.context_length
    inputs_BS = np.zeros((len(prompts), length), np.int32)
    targets_BS = np.full_like(inputs_BS, -1)
    for row, (prompt, rollout) in enumerate(zip(prompts, rollouts, strict=True)):
        text = prompt + rollout.tokens
        inputs_BS[row, : len(text) - 1] = text[:-1]
        targets_BS[row, len(prompt) - 1 : len(text) - 1] = rollout.tokens

    def log_probs(model: GPT, inputs_BS: jax.Array, targets_BS: jax.Array) -> jax.Array:
        return model.log_probs(inputs_BS, targets_BS, temperature)

    found_BS = np.asarray(bind_and_jit(log_probs, model)(inputs_BS, targets_BS))
    return [found[targets >= 0] for found, targets in zip(found_BS, targets_BS, strict=True)]


def assert_log_probs_near(
    found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], within: float
) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, rtol=0, atol=within)


@pytest.fixture(scope="module")
def model() -> GPT:
    return varied_model(**ARCHITECTURES["windows"] | {"n_layers": 2})


@pytest.fixture(scope="module")
def sampler(model: GPT) -> RolloutSampler:
    return RolloutSampler(model)


def test_log_probs_are_those_of_the_trainer(model: GPT, sampler: RolloutSampler) -> None:
    assert_trained_log_probs(model, sampler)


@pytest.mark.long
@pytest.mark.parametrize("name", ["experts", "recipe", "hybrid"])
def test_log_probs_are_those_of_the_trainer_in(name: str) -> None:
    model = varied_model(**ARCHITECTURES[name])
    assert_trained_log_probs(model, RolloutSampler(model))


def assert_trained_log_probs(model: GPT, sampler: RolloutSampler) -> None:
    rollouts = sample(sampler, PROMPTS, RANDOMNESS, REQUEST)
    assert len({len(rollout.tokens) for rollout in rollouts}) > 1
    wanted = trained_log_probs(model, PROMPTS, rollouts, REQUEST.temperature)
    assert_log_probs_near([rollout.log_probs for rollout in rollouts], wanted, 1e-4)


@pytest.mark.long
def test_log_probs_in_bfloat16_are_near_those_of_the_trainer(model: GPT) -> None:
    sampler = RolloutSampler(model, compute_dtype=jnp.bfloat16)
    rollouts = sample(sampler, PROMPTS, RANDOMNESS, REQUEST)
    wanted = trained_log_probs(model, PROMPTS, rollouts, REQUEST.temperature)
    found = np.concatenate([rollout.log_probs for rollout in rollouts])
    assert found.dtype == np.float32
    difference = np.abs(found - np.concatenate(wanted))
    assert 1e-4 < difference.mean() < 0.05


def test_a_text_is_that_of_generate_and_its_stop_token(model: GPT, sampler: RolloutSampler) -> None:
    sampling = Sampling(temperature=REQUEST.temperature)
    request = Request(REQUEST.new_tokens, sampling, seed=11)
    generated = Generator(model).generate(PROMPTS, request)
    rollouts = sample(sampler, PROMPTS, [(11, row) for row in range(len(PROMPTS))], REQUEST)
    for rollout, unstopped in zip(rollouts, generated, strict=True):
        places = [place for place, token in enumerate(unstopped) if token in STOPS]
        assert rollout.tokens == unstopped[: places[0] + 1 if places else None]
        assert rollout.finished == bool(places)
        assert len(rollout.log_probs) == len(rollout.tokens)
    assert {rollout.finished for rollout in rollouts} == {False, True}


def test_a_text_depends_on_its_numbers_only(sampler: RolloutSampler) -> None:
    """Not on its place, on other rows or on the size of the batch."""
    rollouts = sample(sampler, PROMPTS, RANDOMNESS, REQUEST)
    order = [4, 2, 0, 1, 5, 3]
    moved = sample(
        sampler, [PROMPTS[row] for row in order], [RANDOMNESS[row] for row in order], REQUEST
    )
    in_twos = sample(sampler, PROMPTS, RANDOMNESS, REQUEST._replace(batch_size=2))
    alone = sample(sampler, PROMPTS[3:4], RANDOMNESS[3:4], REQUEST)
    for others in ([moved[order.index(row)] for row in range(6)], in_twos):
        assert [other.tokens for other in others] == [rollout.tokens for rollout in rollouts]
        assert_log_probs_near(
            [other.log_probs for other in others], [r.log_probs for r in rollouts], 1e-5
        )
    assert alone[0].tokens == rollouts[3].tokens
    assert rollouts[0].tokens != rollouts[4].tokens  # the same prompt, another number
    for place in range(4):
        numbers = [(*row[:place], row[place] + 1, *row[place + 1 :]) for row in RANDOMNESS]
        others = sample(sampler, PROMPTS, numbers, REQUEST)
        assert all(one.tokens != two.tokens for one, two in zip(rollouts, others, strict=True))


TURNS = RolloutRequest(8, 12, 52, 1.4, tuple(range(0, 32, 3)), has_turns=True)
REPLIES = [[4], [8] * 17, [2], [], [1, 1], [6]]
"""To each text's turns."""
TURNS_OF = [3, 3, 4, 9, 3, 1]
"""How many turns each text has."""


def play(
    sampler: RolloutSampler, rows: Sequence[int], stops: tuple[int, ...] = TURNS.stop_tokens
) -> list[list[tuple[int, float]]]:
    """Return the tokens of texts in turns with their log-probabilities, 0 in replies."""
    prompts, numbers = [PROMPTS[row % 6] for row in rows], [(0, 4, row, 1) for row in rows]
    size = max(len(rows), TURNS.batch_size)
    request = TURNS._replace(batch_size=size, stop_tokens=stops)
    batch = RolloutBatch(sampler, prompts, numbers, request)
    texts: list[list[tuple[int, float]]] = [[] for _ in rows]
    turns, ended, replies = [0] * len(rows), 0, dict[int, list[int]]()
    while ended < len(rows):
        found = batch.write(replies)
        assert found
        for place, new in found.items():
            texts[place] += zip(new.tokens, new.log_probs.tolist(), strict=True)
            turns[place] += 1
        replies = {
            place: REPLIES[rows[place] % 6]
            for place in found
            if turns[place] < TURNS_OF[rows[place] % 6]
            and len(texts[place]) + len(REPLIES[rows[place] % 6]) < TURNS.new_tokens
        }
        for place, reply in replies.items():
            texts[place] += [(token, 0.0) for token in reply]
        ended += len(found) - len(replies)
    return texts


def assert_turns_are_those_of_one_pass(
    model: GPT,
    sampler: RolloutSampler,
    count: int = len(PROMPTS),
    stops: tuple[int, ...] = TURNS.stop_tokens,
) -> None:
    """And a text is the same if it waits for no other one. Only of more than 16, of which few stop,
    some wait."""
    texts = play(sampler, range(count), stops)
    assert len({len(text) for text in texts}) > 3
    for row, text in enumerate(texts[: len(PROMPTS)]):
        [alone] = play(sampler, [row], stops)
        assert [token for token, _ in alone] == [token for token, _ in text]
    whole = [Rollout([token for token, _ in text], np.empty(0), True) for text in texts]
    prompts = [PROMPTS[row % 6] for row in range(count)]
    wanted = trained_log_probs(model, prompts, whole, TURNS.temperature)
    for text, one_pass in zip(texts, wanted, strict=True):
        own = np.array([log_prob for _, log_prob in text])
        np.testing.assert_allclose(own[own < 0], one_pass[own < 0], rtol=0, atol=1e-4)


def test_texts_with_turns_are_those_of_one_pass(model: GPT, sampler: RolloutSampler) -> None:
    assert_turns_are_those_of_one_pass(model, sampler)


def test_long_replies_are_read_together(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "TOGETHER", 2)
    assert_turns_are_those_of_one_pass(model, RolloutSampler(model))


def test_rows_whose_texts_are_over_are_dropped(
    model: GPT, sampler: RolloutSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight, two are left for two texts and more; `play` counts on that each text is found."""
    monkeypatch.setattr(rollouts, "FEWEST_ROWS", 1)
    sizes = set[int]()
    drop = RolloutBatch._drop_rows

    def seen(self: RolloutBatch, state: DecodingState) -> None:
        drop(self, state)
        sizes.add(len(self._rows.text_B))

    monkeypatch.setattr(RolloutBatch, "_drop_rows", seen)
    assert_turns_are_those_of_one_pass(model, sampler)
    assert sizes == {8, 2}


@pytest.mark.long
@pytest.mark.parametrize("name", ["recipe", "hybrid", "latent"])
def test_texts_with_turns_are_those_of_one_pass_in(name: str) -> None:
    model = varied_model(**ARCHITECTURES[name])
    assert_turns_are_those_of_one_pass(model, RolloutSampler(model), 48, STOPS)


def test_the_first_turn_is_that_of_a_text_without_turns(sampler: RolloutSampler) -> None:
    batch, found = RolloutBatch(sampler, PROMPTS, RANDOMNESS, TURNS), dict[int, Rollout]()
    while len(found) < len(PROMPTS):
        found |= batch.write()
    wanted = sample(sampler, PROMPTS, RANDOMNESS, TURNS._replace(has_turns=False))
    assert_same([found[row] for row in range(len(PROMPTS))], wanted)


def test_samples_have_the_frequencies_of_their_log_probs(
    model: GPT, sampler: RolloutSampler
) -> None:
    rows, request = 4000, RolloutRequest(4000, 4, 1, 1.3, STOPS)
    numbers = [(0, row) for row in range(rows)]
    rollouts = sample(sampler, [[5, 1, 30]] * rows, numbers, request)
    logits_V = bind_and_jit(GPT.__call__, model)(jnp.array([[5, 1, 30]]))[0, -1]
    wanted = np.asarray(jax.nn.log_softmax(logits_V / 1.3))
    tokens = np.array([rollout.tokens[0] for rollout in rollouts])
    counts = np.bincount(tokens, minlength=32)
    # a standard error of at most 0.008
    np.testing.assert_allclose(counts / rows, np.exp(wanted), rtol=0, atol=0.03)
    found = np.concatenate([rollout.log_probs for rollout in rollouts])
    np.testing.assert_allclose(found, wanted[tokens], rtol=0, atol=1e-5)


@contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Yield a list that gets an entry for each program that JAX compiles or loads."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:  # noqa: ARG001
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def shifted(model: GPT, by: float) -> GPT:
    """Return a copy of the model with other weights."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda array: array * (1 + by), state))


def test_new_weights_and_prompts_compile_nothing(model: GPT, sampler: RolloutSampler) -> None:
    wanted = sample(sampler, PROMPTS, RANDOMNESS, REQUEST)
    other, again = shifted(model, 0.1), shifted(model, 0.0)
    with count_compilations() as compiled, jax.transfer_guard("disallow"):
        sampler.refresh(other)
        moved = sample(sampler, PROMPTS[:4], RANDOMNESS[:4], REQUEST)
        sample(sampler, [[1] * 9] * 17, [RANDOMNESS[0]] * 17, REQUEST)
        sampler.refresh(again)
        found = sample(sampler, PROMPTS, RANDOMNESS, REQUEST)
    assert not compiled
    for one, expected in zip(found, wanted, strict=True):
        assert one.tokens == expected.tokens
        np.testing.assert_array_equal(one.log_probs, expected.log_probs)
    assert all(
        one.log_probs[0] != old.log_probs[0] for one, old in zip(moved, wanted, strict=False)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 10}, "a prompt has 11 tokens; at most 10 fit"),
        ({"new_tokens": 54}, "a prompt has 11 tokens; at most 10 fit"),
    ],
)
def test_invalid_requests_raise(
    sampler: RolloutSampler, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sample(sampler, PROMPTS, RANDOMNESS, REQUEST._replace(**changes))


@pytest.mark.parametrize("prompts", [[[]], [[1], []], [[1, 32]], [[-1]]])
def test_invalid_prompts_raise(sampler: RolloutSampler, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="a prompt has"):
        sample(sampler, prompts, RANDOMNESS[: len(prompts)], REQUEST)


def test_without_stop_tokens_the_longest_text_fills_the_context(
    model: GPT, sampler: RolloutSampler
) -> None:
    request = RolloutRequest(2, 40, 24, 1.0, ())
    prompt = list(range(20)) * 2
    rollouts = sample(sampler, [prompt, prompt[:5]], RANDOMNESS[:2], request)
    for rollout in rollouts:
        assert (len(rollout.tokens), len(rollout.log_probs)) == (24, 24)
        assert not rollout.finished
    wanted = trained_log_probs(model, [prompt, prompt[:5]], rollouts, 1.0)
    assert_log_probs_near([rollout.log_probs for rollout in rollouts], wanted, 1e-4)


MESH_REQUEST = RolloutRequest(8, 3, 5, 1.0, tuple(range(0, 61, 4)))
MESH_PROMPTS = [[5, 1, 30], [7], [3, 9], [60, 2, 2], [8], [5, 1], [13]]


@functools.cache
def sampler_on(architecture: str, mode: str, devices: int) -> RolloutSampler:
    """Return a sampler on a mesh, of a model whose weights are the same on all meshes."""
    mesh = mesh_of(devices, mode=mode)
    model, _ = random_model_and_optimizer(run_of(architecture, mode, mesh), mesh)
    return RolloutSampler(model, mesh)


def sample_pairs(sampler: RolloutSampler, request: RolloutRequest = MESH_REQUEST) -> list[Rollout]:
    """Sample two texts for each prompt."""
    prompts = [MESH_PROMPTS[number // 2] for number in range(14)]
    return sample(sampler, prompts, [(2, row) for row in range(14)], request)


def assert_same(found: list[Rollout], wanted: list[Rollout]) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert [one.finished for one in found] == [one.finished for one in wanted]
    assert_log_probs_near([o.log_probs for o in found], [o.log_probs for o in wanted], 1e-5)


@pytest.mark.parametrize(
    ("architecture", "mesh"),
    [
        ("llama", "fsdp 4"),
        pytest.param("hybrid", "fsdp 4", marks=pytest.mark.long),
    ],
)
def test_a_mesh_samples_the_same(architecture: str, mesh: str) -> None:
    mode, devices = mesh.split()
    wanted = sample_pairs(sampler_on(architecture, "dp", 1))
    assert len({len(one.tokens) for one in wanted}) > 1
    assert_same(sample_pairs(sampler_on(architecture, mode, int(devices))), wanted)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["windows", "hybrid"])
def test_rows_of_a_prompt_that_is_read_once_are_the_same(architecture: str) -> None:
    sampler = RolloutSampler(varied_model(**ARCHITECTURES[architecture]))
    prompts = [PROMPTS[number // 4] for number in range(20)]
    numbers = [(2, row) for row in range(20)]
    wanted = sample(sampler, prompts, numbers, REQUEST)
    for rows in (2, 4):
        found = sample(sampler, prompts, numbers, REQUEST._replace(rows_per_prompt=rows))
        assert_same(found, wanted)


def test_devices_read_their_own_prompts_once() -> None:
    sampler, request = sampler_on("llama", "dp", 2), MESH_REQUEST._replace(rows_per_prompt=2)
    assert_same(sample_pairs(sampler, request), sample_pairs(sampler_on("llama", "dp", 1)))
    with pytest.raises(ValueError, match="not all 2 rows of a group have the same prompt"):
        sample(sampler, MESH_PROMPTS[:2], [(2, 0), (2, 1)], request)


def test_a_prompt_of_one_token_needs_no_reading() -> None:
    sampler = sampler_on("llama", "dp", 1)
    request = MESH_REQUEST._replace(prompt_tokens=1, rows_per_prompt=4)
    prompts, numbers = [[7]] * 8, [(2, row) for row in range(8)]
    found = sample(sampler, prompts, numbers, request)
    assert_same(found, sample(sampler, prompts, numbers, MESH_REQUEST))


def test_devices_decode_without_waiting_for_each_other() -> None:
    """The loop has no communication; so some rows may stop before those of other devices."""
    sampler = sampler_on("llama", "fsdp", 4)
    [rows] = sampler._placed([np.zeros((8, 3), np.int32)])
    zeros = rows[:, 0]
    prompts = rows, zeros, zeros > 0, rows.astype(jnp.uint32)
    lowered = sampler.write.lower(sampler._weights, *prompts, request=MESH_REQUEST)
    assert lowered.out_info.tokens_BT.shape == (8, 8)
    kinds = {one.kind for one in collectives(lowered.compile())}
    assert kinds <= {"all-gather"}  # of the results


def test_padding_of_the_vocabulary_is_never_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 61 is padded to 128 rows, as on an accelerator."""
    monkeypatch.setattr(sharding, "_is_cpu", lambda _: False)
    padded = sampler_on.__wrapped__("llama", "fsdp", 2)
    outer, _ = padded._weights
    assert len(outer.token_embedding.embedding.get_value().values_OI) == 128
    assert_same(sample_pairs(padded), sample_pairs(sampler_on("llama", "dp", 1)))


def test_a_mesh_that_does_not_fit_raises() -> None:
    mesh = mesh_of(1, 2, "tp")
    model, _ = random_model_and_optimizer(run_of("gpt2", "tp", mesh), mesh)
    with pytest.raises(ValueError, match="needs sharding mode dp or fsdp"):
        RolloutSampler(model, mesh)
