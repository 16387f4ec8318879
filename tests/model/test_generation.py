"""`generation.py`: with the cache or without, alone or in a batch, the tokens are the same."""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from rungs.checkpointing.load import load_model
from rungs.huggingface import importing
from rungs.huggingface.importing import Import, find_source
from rungs.model.generation import Generator, Request
from rungs.model.gpt import GPT
from rungs.model.sampling import Sampling
from tests.support.configs import model_config
from tests.support.published_models import MODELS, NAMES

LLAMA = {"positions": "rope", "norm": "rms_norm", "n_kv_heads": 1, "feed_forward": "swiglu"}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "a-to-a": {"n_layers": 0, "positions": "none", "norm": "none"},
    "sinusoidal": {"positions": "sinusoidal"},
    "llama": LLAMA,
    "windows": LLAMA
    | {
        "n_layers": 3,
        "sliding_window": 4,
        "layer_pattern": ["sliding", "global"],
        "sliding_rope_theta": 100.0,
        "qk_norm": True,
        "norm_placement": "around",
        "attention_soft_cap": 3.0,
        "final_soft_cap": 5.0,
    },
    "experts": LLAMA | {"n_experts": 3, "experts_per_token": 2},
}
PROMPTS = [[5, 1, 30], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
SAMPLING = Sampling(temperature=1.0, top_k=20, repetition_penalty=1.3)


def lively_model(**changes: Any) -> GPT:
    """A model whose every parameter is random, so that its texts do not repeat one token."""
    model = GPT(model_config(**{"context_length": 64, "emb_dim": 32, **changes}), jax.random.key(3))
    state = nnx.state(model)
    for index, (path, param) in enumerate(nnx.to_flat_state(state)):
        noise = jax.random.normal(jax.random.key(index), param.get_value().shape)
        size = 3.0 if "embedding" in path else 0.3
        param.set_value(param.get_value() + size * noise)
    nnx.update(model, state)
    return model


def one_by_one(model: GPT, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each from the whole text anew, without cache or padding at its start."""
    length = model.config.context_length
    predict = nnx.jit(lambda model, tokens_S, last: model(tokens_S[None])[0, last].argmax())
    text = list(prompt)
    for _ in range(count):
        tokens_S = jnp.asarray(text + [0] * (length - len(text)))
        text.append(int(predict(model, tokens_S, len(text) - 1)))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_are_those_of_whole_forward_passes(name: str) -> None:
    model = lively_model(**ARCHITECTURES[name])
    generator = Generator(model)
    expected = [one_by_one(model, prompt, 40) for prompt in PROMPTS]
    assert generator.continued(PROMPTS, Request(40)) == expected
    for prompt, new in zip(PROMPTS, expected, strict=True):
        assert generator.continued([prompt], Request(40)) == [new]
    if model.config.n_layers:
        assert all(len(set(new)) > 3 for new in expected)


@pytest.mark.parametrize("name", NAMES)
def test_published_models_say_what_they_say_in_transformers(name: str, tmp_path: Path) -> None:
    importing.import_model(Import.from_source(find_source(str(MODELS / name))), tmp_path / "run")
    expected = load_file(MODELS / name / "expected.safetensors")
    prompt, greedy = expected["prompt"].tolist(), expected["greedy"].tolist()
    generator = Generator(load_model(tmp_path / "run"), take_over=True)
    beside = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert len(greedy) == 64
    assert generator.continued([prompt, beside], Request(64))[0] == greedy


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(lively_model())


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_a_stream_brings_the_same_tokens(generator: Generator, at_once: int) -> None:
    request = Request(20, SAMPLING)
    pieces = list(generator.stream(PROMPTS, request, at_once))
    assert [len(piece[0]) for piece in pieces[:-1]] == [1] + [at_once] * (len(pieces) - 2)
    joined = [list(itertools.chain(*rows)) for rows in zip(*pieces, strict=True)]
    assert joined == generator.continued(PROMPTS, request)


def test_what_is_drawn_depends_on_seed_and_row_not_on_the_rows_beside_it(
    generator: Generator,
) -> None:
    alone = generator.continued([PROMPTS[0]], Request(20, SAMPLING))
    first, second, third = generator.continued([PROMPTS[0]] * 3, Request(20, SAMPLING))
    assert alone == [first]
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert generator.continued([PROMPTS[0]], Request(20, SAMPLING, seed=1)) != alone


def test_a_text_ends_at_its_stop_token(generator: Generator) -> None:
    whole = generator.continued(PROMPTS, Request(20))
    stops = (whole[0][5], whole[2][2])
    ended = generator.continued(PROMPTS, Request(20, Sampling(stop_tokens=stops)))
    for new, cut in zip(whole, ended, strict=True):
        places = [place for place, token in enumerate(new) if token in stops]
        assert cut == new[: places[0] if places else 20]
    assert len(ended[2]) <= 2


def test_no_step_is_taken_after_all_texts_have_ended(generator: Generator) -> None:
    first = generator.continued(PROMPTS[:1], Request(1))[0][0]
    request = Request(20, Sampling(stop_tokens=(first,)))
    assert list(generator.stream(PROMPTS[:1], request, at_once=4)) == [[[]]]


def test_a_text_beyond_the_context_goes_on_from_its_last_half() -> None:
    model = lively_model(context_length=10)
    text = [5, 1, 30]
    read_from = 0
    for _ in range(25):
        if len(text) - read_from > 10:
            read_from = len(text) - 5
        text += one_by_one(model, text[read_from:], 1)
    assert Generator(model).continued([[5, 1, 30]], Request(25)) == [text[3:]]


def test_a_text_beyond_the_context_does_not_depend_on_the_rows_beside_it() -> None:
    generator = Generator(lively_model(context_length=16))
    prompts = [[5, 1, 30, 7, 2, 9, 4, 11, 3, 8], [7, 2], [6] * 20]
    together = generator.continued(prompts, Request(50))
    assert together == [generator.continued([prompt], Request(50))[0] for prompt in prompts]


@pytest.mark.parametrize("prompts", [[[]], [[1], []], [[1, 32]], [[-1]]])
def test_prompts_that_cannot_be_read_raise(generator: Generator, prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="a prompt has"):
        generator.continued(prompts, Request(1))


def test_a_prompt_longer_than_the_context_is_read_from_its_last_half() -> None:
    model = lively_model(context_length=10)
    prompt = list(range(1, 20))
    expected = one_by_one(model, prompt[-5:], 5)
    assert Generator(model).continued([prompt], Request(5)) == [expected]


def compiled(generator: Generator) -> tuple[int, int]:
    """How often prefill and loop were compiled."""
    start: Any = generator._start
    go_on: Any = generator._go_on
    return start._cache_size(), go_on._cache_size()


def test_code_is_compiled_once_for_all_lengths_of_a_bucket() -> None:
    generator = Generator(lively_model())
    for length, count in ((3, 5), (9, 16), (15, 11), (16, 1)):
        generator.continued([list(range(1, length + 1))], Request(count))
    assert compiled(generator) == (1, 1)
    generator.continued([list(range(1, 20))], Request(32))
    assert compiled(generator) == (2, 2)
    for news in generator.stream([list(range(1, 30))], Request(32), at_once=5):
        assert news
    assert compiled(generator) == (2, 2)


def test_the_model_stays_as_it_was() -> None:
    model = lively_model()
    tokens_BS = jnp.arange(8)[None]
    before = np.asarray(model(tokens_BS))
    Generator(model, jnp.bfloat16).continued(PROMPTS, Request(5))
    assert np.array_equal(before, model(tokens_BS))


def test_bfloat16_gives_nearly_the_same_chances() -> None:
    """Of many texts drawn in bfloat16, first tokens have the chances of float32."""
    model = lively_model()
    logits_V = model(jnp.asarray(PROMPTS[:1]))[0, -1]
    rows = Generator(model, jnp.bfloat16).continued(
        PROMPTS[:1] * 4000, Request(1, Sampling(temperature=1.0))
    )
    counts = np.bincount([row[0] for row in rows], minlength=32)
    # 4000 draws: a standard error of at most 0.008; bfloat16 moves chances by about 0.01
    np.testing.assert_allclose(counts / 4000, jax.nn.softmax(logits_V), atol=0.04)
