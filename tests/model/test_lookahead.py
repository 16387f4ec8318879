"""Lookahead gives the text, and the distribution of texts, of plain decoding."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array
from scipy import stats

from rungs.common.errors import UserError
from rungs.model import lookahead
from rungs.model.decoding import DecodingState
from rungs.model.generation import Generator, Request
from rungs.model.gpt import GPT
from rungs.model.sampling import Sampling
from tests.model.test_generation import ARCHITECTURES, PROMPTS, SAMPLING, varied_model
from tests.support.long import long_except

DRAFT = 5  # longer than the window of "windows"
REPEATING = [[1, 2, 3, 4, 5, 6] * 4, [7, 8] * 3, PROMPTS[0], PROMPTS[2]]


@functools.cache
def generator_of(name: str) -> Generator:
    return Generator(varied_model(**ARCHITECTURES[name]))


@pytest.fixture
def generator() -> Generator:
    return generator_of("windows")


def count_passes(generator: Generator, prompt: list[int], request: Request) -> int:
    """Return how many passes a text takes after the prefill."""
    return len(list(generator.stream([prompt], request, chunk_size=1))) - 1


@pytest.mark.parametrize("name", long_except({"windows"}, ["windows", "experts", "recipe"]))
def test_greedy_text_is_that_of_plain_decoding(name: str) -> None:
    generator = generator_of(name)
    plain = generator.generate(REPEATING, Request(40))
    assert generator.generate(REPEATING, Request(40, lookahead=DRAFT)) == plain


@pytest.mark.long
def test_samples_are_those_of_plain_decoding(generator: Generator) -> None:
    cool = Sampling(temperature=0.6, top_p=0.9, min_p=0.01)
    for sampling in (SAMPLING, cool, Sampling(repetition_penalty=1.05)):
        plain, ahead = (Request(40, sampling, 3, drafted) for drafted in (0, DRAFT))
        assert generator.generate(REPEATING, ahead) == generator.generate(REPEATING, plain)


def test_a_pass_adds_several_tokens_where_text_repeats() -> None:
    generator = generator_of("a-to-a")  # soon runs in a cycle
    request = Request(40, lookahead=DRAFT)
    assert count_passes(generator, PROMPTS[0], Request(40)) == 39
    (text,) = generator.generate([PROMPTS[0]], request)
    cycle = next(n for n in range(1, 20) if text[-n:] == text[-2 * n : -n])
    assert count_passes(generator, PROMPTS[0], request) <= 2 * cycle + 3 + 40 // (DRAFT + 1)


def test_texts_end_at_their_stop_tokens(generator: Generator) -> None:
    unstopped = generator.generate(REPEATING, Request(40))
    stops = (unstopped[0][25], unstopped[1][4])
    stopped = generator.generate(REPEATING, Request(40, Sampling(stop_tokens=stops), 0, DRAFT))
    assert stopped == [
        list(itertools.takewhile(lambda token: token not in stops, text)) for text in unstopped
    ]
    assert len({len(text) for text in stopped}) > 1


def test_texts_beyond_the_context_are_those_of_plain_decoding() -> None:
    generator = Generator(varied_model(context_length=16))  # learned positions
    expected = generator.generate(REPEATING, Request(50))
    assert generator.generate(REPEATING, Request(50, lookahead=DRAFT)) == expected


def test_drafts_fit_into_the_cache_after_the_last_token(generator: Generator) -> None:
    """Prompt and new tokens fill the 32 slots that they need without lookahead."""
    prompts = np.random.default_rng(0).integers(1, 6, (4, 16)).tolist()
    expected = generator.generate(prompts, Request(16))
    assert generator.generate(prompts, Request(16, lookahead=DRAFT)) == expected


def test_a_pass_keeps_nothing_after_a_stop_token_or_a_rejected_one() -> None:
    state: Any = DecodingState(
        tokens_BT=jnp.zeros((3, 10), jnp.int32).at[:, 0].set(5),
        log_probs_BT=None,
        slot=jnp.asarray(0),
        sampling_offset=jnp.asarray(0),
        padding_B=jnp.zeros(3, jnp.int32),
        ends_B=jnp.ones(3, jnp.int32),
        stopped_B=jnp.array([False, False, True]),
        keys_B=jnp.zeros(3),
        caches=[],
    )
    tokens_BS = jnp.array([[5, 6, 7, 8]] * 3)
    drawn_BS = jnp.array([[6, 7, 8, 9], [6, 1, 8, 9], [6, 7, 8, 9]])
    stops = Sampling(stop_tokens=(7,))
    kept = lookahead.keep_agreed(stops, state, tokens_BS, drawn_BS, jnp.asarray(9))
    assert kept.ends_B.tolist() == [3, 3, 1]
    assert kept.stopped_B.tolist() == [True, False, True]
    assert kept.tokens_BT[:, :4].tolist() == [[5, 6, 7, 0], [5, 6, 1, 0], [5, 0, 0, 0]]
    assert int(kept.slot) == 2


def test_stream_yields_the_same_tokens_and_compiles_nothing(generator: Generator) -> None:
    request = Request(40, lookahead=DRAFT)
    expected = generator.generate(REPEATING, request)
    compiled: Any = generator._jit_lookahead
    counts = []
    for chunk_size in (1, 8):
        pieces = list(generator.stream(REPEATING, request, chunk_size))
        assert all(len(row) >= 1 for row in pieces[0])
        assert [list(itertools.chain(*rows)) for rows in zip(*pieces, strict=True)] == expected
        counts.append(compiled._cache_size())
    assert counts[0] == counts[1]


def test_a_state_that_cannot_go_back_has_no_lookahead() -> None:
    generator = generator_of("hybrid")
    with pytest.raises(UserError, match="lookahead: not for a model with delta_net layers"):
        generator.generate(PROMPTS, Request(1, lookahead=2))


@pytest.mark.parametrize("drafted", [-1, 64])
def test_lookahead_out_of_range_raises(generator: Generator, drafted: int) -> None:
    with pytest.raises(ValueError, match=f"lookahead {drafted} is negative, or not below"):
        generator.generate(PROMPTS, Request(1, lookahead=drafted))


def draft_by_hand(text: list[int], length: int) -> list[int] | None:
    """Return what followed the latest earlier place of the last three tokens, else of two."""
    for size in (3, 2):
        for place in range(len(text) - 1, size - 1, -1):
            if text[place - size : place] == text[-size:]:
                extended = list(text)
                while len(extended) < place + length:
                    extended.append(extended[len(extended) - len(text) + place])
                return extended[place : place + length]
    return None


def test_drafts_follow_the_latest_of_the_longest_matches() -> None:
    random = np.random.default_rng(0)
    rows, slots = 300, 24
    tokens_BT = random.integers(1, 4, (rows, slots)).astype(np.int32)
    padding_B = random.integers(0, 8, rows)
    ends_B = random.integers(padding_B + 1, slots + 1)
    state: Any = DecodingState(tokens_BT, None, None, None, padding_B, ends_B, None, None, [])  # type: ignore[arg-type]
    draft_BP, is_found_B = jax.jit(lambda: lookahead.find_drafts(state, 6))()
    places = zip(tokens_BT, padding_B, ends_B, strict=True)
    expected = [draft_by_hand(row[start:end].tolist(), 6) for row, start, end in places]
    found = [row.tolist() if ok else None for row, ok in zip(draft_BP, is_found_B, strict=True)]
    assert found == expected
    assert 30 < sum(draft is None for draft in found) < 270


SYMBOLS, DRAWS = 4, 6000
ALL_PAIRS = [0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0]
"""A de Bruijn sequence: each pair of symbols occurs, so there is always a draft."""
PLAIN, COOL = Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=3)


@pytest.fixture(scope="module")
def four_symbols() -> GPT:
    return varied_model(vocab_size=SYMBOLS, n_layers=1, emb_dim=16, context_length=32)


@nnx.jit
def last_logits(model: GPT, tokens_BS: Array) -> Array:
    return model(tokens_BS)[:, -1]


def probabilities_after(model: GPT, texts: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the probability of each symbol after each text, in float64."""
    logits = np.asarray(last_logits(model, jnp.asarray(texts)), np.float64) / sampling.temperature
    if sampling.top_k is not None:
        logits[logits < np.sort(logits)[:, -sampling.top_k, None]] = -np.inf
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def joint_probabilities(model: GPT, sampling: Sampling, count: int) -> np.ndarray:
    """Return the probability of every continuation of ALL_PAIRS by `count` symbols."""
    joint = np.ones(1)
    for length in range(count):
        ends = list(itertools.product(range(SYMBOLS), repeat=length))
        texts = np.array([[*ALL_PAIRS, *end] for end in ends])
        joint = (joint[:, None] * probabilities_after(model, texts, sampling)).ravel()
    return joint


def chi_square(model: GPT, sampling: Sampling, count: int) -> float:
    """Return the p-value of DRAWS continuations by `count` tokens, all but the first of which are
    added with lookahead."""
    request = Request(count, sampling, seed=11, lookahead=3)
    texts = np.array(Generator(model).generate([ALL_PAIRS] * DRAWS, request))
    codes = texts @ SYMBOLS ** np.arange(count - 1, -1, -1)
    counts = np.bincount(codes, minlength=SYMBOLS**count)
    expected = joint_probabilities(model, sampling, count) * DRAWS
    possible = expected > 0
    assert counts[~possible].sum() == 0
    pvalue: float = stats.chisquare(counts[possible], expected[possible]).pvalue
    return pvalue


def test_one_and_two_tokens_have_the_exact_probabilities(four_symbols: GPT) -> None:
    assert chi_square(four_symbols, COOL, 3) > 1e-3  # the seed is fixed


Draw = Callable[[Sampling, DecodingState, Array], Array]


def draw_without_removal(draw: Draw) -> Draw:
    """Return a wrong rule: what is rejected is drawn again from p, with the draft still in it."""

    def draw_twice(sampling: Sampling, state: DecodingState, logits_BSV: Array) -> Array:
        other = state._replace(keys_B=jax.vmap(jax.random.fold_in, (0, None))(state.keys_B, 999))
        drawn_BS, again_BS = (draw(sampling, it, logits_BSV) for it in (state, other))
        draft_BP, _ = lookahead.find_drafts(state, drawn_BS.shape[1] - 1)
        is_accepted_BP = drawn_BS[:, :-1] == draft_BP
        chosen_BP = jnp.where(is_accepted_BP, draft_BP, again_BS[:, :-1])
        return jnp.concatenate([chosen_BP, drawn_BS[:, -1:]], axis=1)

    return draw_twice


def draw_too_readily(draw: Draw) -> Draw:
    """Return a wrong rule: every draft is accepted."""

    def accept(sampling: Sampling, state: DecodingState, logits_BSV: Array) -> Array:
        drawn_BS = draw(sampling, state, logits_BSV)
        draft_BP, _ = lookahead.find_drafts(state, drawn_BS.shape[1] - 1)
        return jnp.concatenate([draft_BP, drawn_BS[:, -1:]], axis=1)

    return accept


@pytest.mark.parametrize("wrong", [draw_without_removal, draw_too_readily])
@pytest.mark.long
def test_wrong_acceptance_rules_fail_the_chi_square(
    four_symbols: GPT, wrong: Callable[[Draw], Draw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookahead, "draw_tokens", wrong(lookahead.draw_tokens))
    assert chi_square(four_symbols, PLAIN, 2) < 1e-10
