"""Generated tokens are the same with or without a cache, alone or in a batch."""

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from rungs.checkpointing.load import load_token_generator
from rungs.huggingface import importing
from rungs.huggingface.importing import Import, find_source
from rungs.model.decoding import Decoder, Prompts, states_of
from rungs.model.generation import Generator, Request, row_keys
from rungs.model.gpt import GPT
from rungs.model.sampling import Sampling
from rungs.model.weight_formats import WeightFormat
from rungs.parallel.target_device import Target, trace_for
from tests.support.configs import model_config
from tests.support.long import long_except
from tests.support.published_models import MODELS
from tests.support.sharded_models import DEEPSEEK, HYBRID, RECIPE
from tests.support.tiny_model import bind_and_jit, random_model, with_random_parameters

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
    "olmo-and-nope": LLAMA
    | {
        **{"n_layers": 4, "layer_pattern": ["sliding", "global", "nope"], "sliding_window": 4},
        **{"norm_placement": "output", "qk_norm": True, "qk_norm_scope": "all_heads"},
        "rope_scaling": {
            **{"type": "yarn", "factor": 2.0, "attention_factor": 1.1},
            **{"low_frequency_factor": 1.0, "high_frequency_factor": 8.0},
            "original_context_length": 32,
        },
    },
    "experts": LLAMA | {"n_experts": 3, "experts_per_token": 2},
    "recipe": RECIPE | {"n_layers": 4, "n_heads": 4},
    "sinks-and-gates": LLAMA
    | {
        **{"attention_sinks": True, "attention_output_gate": "head", "sliding_window": 4},
        **{"layer_pattern": ["sliding", "global"], "feed_forward": "swiglu_clamped"},
    },
    "latent": {
        **{"positions": "rope", "norm": "rms_norm", "sliding_window": 5},
        **{"layer_pattern": ["global", "sliding"], "feed_forward": "swiglu"},
        "latent_attention": {"kv_rank": 12, "query_rank": 10, "rope_dim": 8, "value_dim": 20},
    },
    "deepseek": {k: v for k, v in DEEPSEEK.items() if k != "head_dim"} | {"n_heads": 2},
    "hybrid": HYBRID | {"n_heads": 4},
}
DIFFERENT = ["windows", "olmo-and-nope", "experts", "recipe", "hybrid"]
DIFFERENT += ["latent", "sinks-and-gates", "deepseek"]
"""Those that keep more than the keys and values of every token, or use them otherwise."""
PROMPTS = [[5, 1, 30], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
SAMPLING = Sampling(temperature=1.0, top_k=20, repetition_penalty=1.3)


def varied_model(**changes: Any) -> GPT:
    """Return a model with random parameters whose greedy texts don't repeat one token, as they
    would with larger biases."""
    config = model_config(**{"context_length": 64, "emb_dim": 32, **changes})

    def size_of(path: tuple[object, ...]) -> float:
        return 3.0 if "embedding" in path else 0.03 if "bias" in path else 0.3

    return with_random_parameters(lambda: GPT(config, jax.random.key(0)), size_of)


def generate_without_cache(model: GPT, prompt: list[int], count: int) -> list[int]:
    """Return greedy tokens, each from a forward pass over the text, without cache or padding."""
    length = model.config.context_length
    predict = bind_and_jit(lambda model, S, last: model(S[None])[0, last].argmax(), model)
    text = list(prompt)
    for _ in range(count):
        tokens_S = jnp.asarray(text + [0] * (length - len(text)))
        text.append(int(predict(tokens_S, len(text) - 1)))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", long_except({"llama", "hybrid"}, ["llama", *DIFFERENT]))
def test_greedy_tokens_match_full_forward_passes(name: str) -> None:
    model = varied_model(**ARCHITECTURES[name])
    generator = Generator(model)
    expected = [generate_without_cache(model, prompt, 40) for prompt in PROMPTS]
    assert generator.generate(PROMPTS, Request(40)) == expected
    for prompt, new in zip(PROMPTS[:2], expected, strict=False):
        assert generator.generate([prompt], Request(40)) == [new]
    if model.config.n_layers:
        assert all(len(set(new)) > 3 for new in expected)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3", "mixtral", "qwen3-5"])
def test_published_models_generate_the_same_as_in_transformers(name: str, tmp_path: Path) -> None:
    importing.import_model(Import.from_source(find_source(str(MODELS / name))), tmp_path / "run")
    expected = load_file(MODELS / name / "expected.safetensors")
    prompt, greedy = expected["prompt"].tolist(), expected["greedy"].tolist()
    generator = load_token_generator(tmp_path / "run")
    beside = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert len(greedy) == 64
    assert generator.generate([prompt, beside], Request(64))[0] == greedy


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(varied_model())


def test_stream_yields_the_same_tokens(generator: Generator) -> None:
    request = Request(20, SAMPLING)
    expected = generator.generate(PROMPTS, request)
    for chunk_size in (1, 3, 64):
        pieces = list(generator.stream(PROMPTS, request, chunk_size))
        assert [len(piece[0]) for piece in pieces[:-1]] == [1] + [chunk_size] * (len(pieces) - 2)
        assert [list(itertools.chain(*rows)) for rows in zip(*pieces, strict=True)] == expected


@pytest.mark.long
def test_samples_depend_on_seed_and_row_but_not_on_other_rows(generator: Generator) -> None:
    alone = generator.generate([PROMPTS[0]], Request(20, SAMPLING))
    first, second, third = generator.generate([PROMPTS[0]] * 3, Request(20, SAMPLING))
    assert alone == [first]
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert generator.generate([PROMPTS[0]], Request(20, SAMPLING, seed=1)) != alone


def test_a_text_ends_before_its_stop_token(generator: Generator) -> None:
    unstopped = generator.generate(PROMPTS, Request(20))
    stops = (unstopped[0][5], unstopped[2][2])
    stopped = generator.generate(PROMPTS, Request(20, Sampling(stop_tokens=stops)))
    for new, cut in zip(unstopped, stopped, strict=True):
        places = [place for place, token in enumerate(new) if token in stops]
        assert cut == new[: places[0] if places else 20]
    assert len(stopped[2]) <= 2


def test_generation_stops_when_all_texts_have_ended(generator: Generator) -> None:
    first = generator.generate(PROMPTS[:1], Request(1))[0][0]
    request = Request(20, Sampling(stop_tokens=(first,)))
    assert list(generator.stream(PROMPTS[:1], request, chunk_size=4)) == [[[]]]


@pytest.mark.long
def test_a_text_beyond_the_context_continues_from_its_last_half() -> None:
    model = varied_model(context_length=10)
    text = [5, 1, 30]
    start = 0
    for _ in range(25):
        if len(text) - start > 10:
            start = len(text) - 5
        text += generate_without_cache(model, text[start:], 1)
    assert Generator(model).generate([[5, 1, 30]], Request(25)) == [text[3:]]


@pytest.mark.long
def test_a_text_beyond_the_context_does_not_depend_on_other_rows() -> None:
    generator = Generator(varied_model(context_length=16))
    prompts = [[5, 1, 30, 7, 2, 9, 4, 11, 3, 8], [7, 2], [6] * 20]
    together = generator.generate(prompts, Request(50))
    assert together == [generator.generate([prompt], Request(50))[0] for prompt in prompts]


def test_a_prompt_longer_than_the_context_is_cut_to_its_last_half_context() -> None:
    model = varied_model(context_length=10)
    prompt = list(range(1, 20))
    expected = generate_without_cache(model, prompt[-5:], 5)
    assert Generator(model).generate([prompt], Request(5)) == [expected]


def compile_counts(generator: Generator) -> tuple[int, int]:
    """Return how often prefill and decoding loop were compiled."""
    prefill: Any = generator._jit_prefill
    decode: Any = generator._jit_decode
    return prefill._cache_size(), decode._cache_size()


def test_each_bucket_compiles_once_for_all_lengths() -> None:
    generator = Generator(varied_model())
    for length, count in ((3, 5), (9, 16), (15, 11), (16, 1)):
        generator.generate([list(range(1, length + 1))], Request(count))
    assert compile_counts(generator) == (1, 1)
    generator.generate([list(range(1, 20))], Request(32))
    assert compile_counts(generator) == (2, 2)
    for chunk in generator.stream([list(range(1, 30))], Request(32), chunk_size=5):
        assert chunk
    assert compile_counts(generator) == (2, 2)


@pytest.mark.long
def test_bfloat16_gives_nearly_the_same_probabilities() -> None:
    """The first tokens of many samples in bfloat16 have the probabilities of float32."""
    model = varied_model()
    prompt_BS = jnp.asarray(PROMPTS[:1])
    logits_V = model(prompt_BS)[0, -1]
    rows = Generator(model, jnp.bfloat16).generate(
        PROMPTS[:1] * 4000, Request(1, Sampling(temperature=1.0))
    )
    counts = np.bincount([row[0] for row in rows], minlength=32)
    assert np.array_equal(logits_V, model(prompt_BS)[0, -1])  # the model is as before
    # 4000 samples: a standard error of at most 0.008; bfloat16 changes probabilities by about 0.01
    np.testing.assert_allclose(counts / 4000, jax.nn.softmax(logits_V), atol=0.04)


@pytest.mark.parametrize(
    ("target", "platform", "kernel", "weight_format"),
    [
        (Target("gpu", "8.6"), "cuda", "_attend", "int8"),
        (Target("tpu"), "tpu", "splash_mha_fwd", "dtype"),
    ],
    ids=["gpu", "tpu"],
)
def test_accelerators_read_prompts_by_the_kernels_of_training(
    target: Target, platform: str, kernel: str, weight_format: WeightFormat
) -> None:
    """Padded prompts are like documents, which the kernels know."""
    model = random_model(context_length=256, emb_dim=128, n_heads=2, n_layers=1)
    with trace_for(target, is_compiled=True):
        decoder = Decoder(model, jnp.dtype(jnp.bfloat16), weight_format)
        weights = decoder.weights(states_of(model))
        tokens_BS, padding_B = jnp.zeros((2, 128), jnp.int32), jnp.array([0, 5])
        prompts = Prompts(tokens_BS, padding_B, jnp.zeros(2, bool), row_keys(0, 2), 0)
        read = functools.partial(decoder.prefill, slots=256, sampling=Sampling())
        traced = jax.jit(read).trace(weights, prompts)
    text = traced.lower(lowering_platforms=(platform,)).as_text(debug_info=True)
    assert f'"{kernel}' in text
