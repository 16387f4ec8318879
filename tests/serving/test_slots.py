"""Texts in rows of one program are those of `Generator`, whoever else is there."""

import copy
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungs.model.generation import Generator, Request, row_key
from rungs.model.sampling import GREEDY, Sampling
from rungs.serving.slots import MOST_LIKELY, MOST_TOKENS, Slots
from tests.support.sharded_models import HYBRID
from tests.support.tiny_model import random_model

NEW = 20
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "positions": "rope",
        "norm": "rms_norm",
        "n_heads": 4,
        "n_kv_heads": 2,
        "sliding_window": 8,
        "layer_pattern": ["sliding", "global"],
    },
    "latent": {"positions": "rope", "latent_attention": {"kv_rank": 6, "rope_dim": 4}},
    "hybrid": HYBRID,
}
SAMPLINGS = (
    GREEDY,
    Sampling(temperature=0.8, top_k=10),
    Sampling(temperature=1.0, top_p=0.9, min_p=0.02),
    Sampling(temperature=0.7, repetition_penalty=1.3),
    Sampling(repetition_penalty=1.5),
)
LENGTHS = (5, 1, 30, 16, 17)


@pytest.mark.parametrize(
    ("name", "samplings"),
    [(name, SAMPLINGS if name == "gpt2" else (GREEDY,) * 5) for name in ARCHITECTURES],
    ids=ARCHITECTURES,
)
def test_texts_that_come_and_go_are_those_of_the_generator(
    name: str, samplings: tuple[Sampling, ...]
) -> None:
    generator = Generator(random_model(context_length=64, **ARCHITECTURES[name]))
    rng = np.random.default_rng(0)
    jobs = [
        (rng.integers(generator.decoder.config.vocab_size, size=length).tolist(), sampling, seed)
        for seed, (length, sampling) in enumerate(zip(LENGTHS, samplings, strict=True))
    ]
    slots = Slots(generator, 2)
    found = list(run_in_turn(slots, jobs))
    assert slots.used == []
    for (prompt, sampling, seed), tokens in zip(jobs, found, strict=True):
        [expected] = generator.generate([prompt], Request(NEW, sampling, seed))
        assert tokens[:NEW] == expected


def run_in_turn(slots: Slots, jobs: list[tuple[list[int], Sampling, int]]) -> Iterator[list[int]]:
    """Let a text join before every second call, and yield the tokens of each."""
    found: list[list[int]] = [[] for _ in jobs]
    waiting, rows, call = list(range(len(jobs))), dict[int, int](), 0
    while waiting or rows:
        if waiting and call % 2 == 0 and not slots.are_full:
            job = waiting.pop(0)
            prompt, sampling, seed = jobs[job]
            rows[slots.join(prompt, row_key(seed, 0), sampling)] = job
        new = slots.add(3 + call % 4, log_probs=call % 3 == 0)
        for row, job in list(rows.items()):
            found[job] += new.ids_CR[:, row].tolist()
            if len(found[job]) >= NEW:
                slots.leave(row)
                del rows[row]
        call += 1
    yield from found


def test_caches_have_about_the_room_that_texts_need() -> None:
    generator = Generator(random_model(context_length=256))
    slots, short, long = Slots(generator, 4), [1, 2, 3], list(range(1, 31)) * 6
    of_short = slots.join(short, row_key(0, 0), GREEDY)
    found = slots.add(MOST_TOKENS).ids_CR[:, of_short].tolist()
    shapes = [slots.shape]
    of_long = slots.join(long, row_key(0, 0), GREEDY)
    both = slots.add(MOST_TOKENS).ids_CR
    shapes.append(slots.shape)
    slots.leave(of_long)
    last = slots.add(MOST_TOKENS).ids_CR[:, of_short]
    shapes.append(slots.shape)
    assert shapes == [(1, 64), (2, 256), (2, 64)]
    [expected] = generator.generate([short], Request(3 * MOST_TOKENS))
    assert [*found, *both[:, of_short].tolist(), *last.tolist()] == expected
    assert both[:, of_long].tolist() == generator.generate([long], Request(MOST_TOKENS))[0]


def test_log_probabilities_are_those_of_the_model() -> None:
    model = random_model(context_length=64)
    slots, text = Slots(Generator(model), 2), list(range(1, 20))
    row = slots.join(text, row_key(0, 0), GREEDY)
    added = slots.add(MOST_TOKENS, log_probs=True)
    whole = [*text, *added.ids_CR[:, row].tolist()]
    expected = np.asarray(jax.nn.log_softmax(model(jnp.array([whole]))))[0]
    places = np.arange(len(whole) - 1)
    of_token = expected[places, whole[1:]]
    found = added.log_probs_CR
    assert found is not None
    np.testing.assert_allclose(found.of_token[:, row], of_token[len(text) - 1 :], atol=2e-5)
    scored = slots.score(text)
    np.testing.assert_allclose(scored.of_token, of_token[: len(text) - 1], atol=2e-5)
    largest = -np.sort(-expected[: len(text) - 1])[:, :MOST_LIKELY]
    np.testing.assert_allclose(scored.top_K, largest, atol=2e-5)
    of_ids = np.take_along_axis(expected[: len(text) - 1], np.asarray(scored.top_ids_K), axis=1)
    np.testing.assert_allclose(of_ids, largest, atol=2e-5)


def test_log_probabilities_are_of_the_same_program() -> None:
    """Another one would take a large model half a minute to compile at the first request."""
    slots = Slots(Generator(random_model(context_length=32)), 2)
    slots.join([1, 2], row_key(0, 0), GREEDY)
    assert slots.add(1).log_probs_CR is None
    assert slots.add(1, log_probs=True).log_probs_CR is not None
    added: Any = slots._jit_add
    assert added._cache_size() == 1


def test_other_weights_use_the_same_programs() -> None:
    first = Generator(random_model(context_length=32))
    second = copy.copy(first)
    second.weights = jax.tree.map(lambda array: array * 1.5, first.weights)
    slots, found = Slots(first, 2), []
    for generator in (first, second):
        slots.use(generator)
        row = slots.join([1, 2, 3], row_key(0, 0), GREEDY)
        found.append(slots.add(MOST_TOKENS).ids_CR[:, row].tolist())
        assert [found[-1]] == generator.generate([[1, 2, 3]], Request(MOST_TOKENS))
        slots.leave(row)
    assert found[0] != found[1]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_row_may_choose_only_what_is_allowed(sampling: Sampling) -> None:
    generator = Generator(random_model(context_length=64, vocab_size=70))
    size = generator.decoder.config.vocab_size
    slots, prompt, kept = Slots(generator, 2), [1, 2, 3], [5, 31, 32, size - 1]
    free, bound = (slots.join(prompt, row_key(0, n), sampling) for n in range(2))
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[kept] = 1
    words = np.packbits(bits, bitorder="little").view(np.uint32)
    found = np.concatenate([slots.add(1, allowed={bound: words}).ids_CR for _ in range(NEW)])
    assert {*found[:, bound].tolist()} <= {*kept}
    [expected] = generator.generate([prompt], Request(NEW, sampling))
    assert found[:, free].tolist() == expected
    slots.leave(bound)
    assert slots.add(1).ids_CR.shape == (1, 2)
