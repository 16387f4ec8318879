"""`rungs.look` against a plain recomputation in float64, and against transformers."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import rungs
from rungs.model import blocks, gpt
from rungs.model.layers import RMSNorm
from rungs.step.state import named_arrays
from tests.model.test_gpt import VARIANTS
from tests.support import direct_contributions as direct
from tests.support import published_models, reference_gpt
from tests.support.commands import run_script
from tests.support.long import long_except
from tests.support.published_models import MODELS
from tests.support.tiny_model import random_model, random_tokens

QUICK = ["a-to-a", "mixtral", "gemma-2"]
LONG = ["olmo-3", "recipe", "gpt-oss", "gated-heads", "deepseek-v3"]


def in_float64(model: rungs.GPT) -> dict[str, np.ndarray]:
    return {name: np.asarray(array, np.float64) for name, array in named_arrays(model).items()}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def assert_close(found: Any, expected: Any, size: float | None = None) -> None:
    """Assert that arrays differ by rounding. `size` is that of the numbers they come from; by
    default their own."""
    expected = np.asarray(expected)
    assert np.shape(found) == expected.shape
    size = max(np.abs(expected).max(initial=0), 0.01) if size is None else size
    np.testing.assert_allclose(found, expected, atol=2e-5 * size, rtol=0)


@pytest.mark.parametrize("name", long_except(QUICK, QUICK + LONG))
def test_it_is_what_a_plain_recomputation_gives(name: str) -> None:
    model = random_model(**VARIANTS[name])
    config, weights, tokens_BS = model.config, in_float64(model), random_tokens(2, 7)
    found = rungs.look(model, tokens_BS)
    assert (found.tokens_BS == tokens_BS).all()
    for row, tokens in enumerate(tokens_BS):
        seen = direct.see(config, weights, tokens)
        check_activations(found, seen, row)
        logits = [
            reference_gpt.soft_cap(direct.logits(config, weights, x), config.final_soft_cap)
            for x in seen.states
        ]
        # the reference of the model itself agrees with that of these tests
        assert_close(logits[-1], reference_gpt.forward(config, weights, tokens)[-1])
        likeliest = logits[-1][-1].argmax()
        chosen = np.append(tokens[1:], likeliest)
        assert (found.chosen_BS[row] == chosen).all()
        check_predictions(found, np.array(logits), chosen, row)
        every = np.arange(len(tokens) - 1)
        assert_close(found.losses_BS[row], -log_softmax(logits[-1])[every, tokens[1:]])
        check_contributions(found, weights, seen, chosen, row)


def check_activations(found: rungs.Look, seen: direct.Seen, row: int) -> None:
    assert_close(found.embedding_BSD[row], seen.states[0])
    if found.layers is None:
        assert not len(seen.weights_LNST)
        return
    assert_close(found.layers.weights_LBNST[:, row], seen.weights_LNST)
    assert_close(found.layers.heads_LBSNH[:, row], seen.heads_LSNH)
    assert_close(found.layers.attention_LBSD[:, row], seen.attention_LSD)
    assert_close(found.layers.residual_LBSD[:, row], seen.states[1:])
    if found.layers.feed_forward_LBSD is None:
        assert not len(seen.feed_forward_LSD)
    else:
        assert_close(found.layers.feed_forward_LBSD[:, row], seen.feed_forward_LSD)


def check_predictions(found: rungs.Look, logits: np.ndarray, chosen: np.ndarray, row: int) -> None:
    log_probs = log_softmax(logits)
    order = np.argsort(-log_probs, axis=-1)[..., :5]
    top, at = found.predictions, np.arange(len(chosen))
    assert_close(top.log_probs_LBSC[:, row], np.take_along_axis(log_probs, order, -1))
    given = np.take_along_axis(log_probs, top.tokens_LBSC[:, row].astype(int), -1)
    assert_close(top.log_probs_LBSC[:, row], given)
    assert_close(top.chosen_log_probs_LBS[:, row], log_probs[:, at, chosen])


def check_contributions(
    found: rungs.Look, weights: dict[str, np.ndarray], seen: direct.Seen, chosen: Any, row: int
) -> None:
    config, parts = found.config, found.contributions
    expected = direct.contributions(config, weights, seen.parts, chosen)
    assert_close(parts.embedding_BS[row], expected["embedding"])
    parts_size = np.abs(list(expected.values())).sum(axis=0).max()
    assert_close(parts.biases_BS[row], expected["biases"], parts_size)  # what the others leave
    assert_close(parts.logits_BS[row], np.sum(list(expected.values()), axis=0))
    for layer in range(config.n_layers):
        for head in range(config.n_heads or 0):
            assert_close(parts.heads_LBNS[layer, row, head], expected[f"head {layer} {head}"])
        if config.feed_forward != "none":
            assert_close(parts.feed_forward_LBS[layer, row], expected[f"feed_forward {layer}"])


@pytest.mark.parametrize("name", long_except(["gemma2"], ["gemma2", "gpt-oss"]))
def test_it_is_what_transformers_computes(name: str, tmp_path: Path) -> None:
    target = tmp_path / "run"
    assert run_script("pretrained.py", "import", MODELS / name, target).returncode == 0
    expected = published_models.expected(name)
    attentions = load_file(MODELS / name / "attentions.safetensors")["attentions"]
    found = rungs.look(rungs.load_model(target), expected["tokens"])
    assert found.layers is not None
    assert_close(found.layers.weights_LBNST[:, 0], attentions)
    states = expected["hidden_states"]  # the last is normalized
    assert_close(found.embedding_BSD, states[0])
    assert_close(found.layers.residual_LBSD[:-1], states[1:-1])
    log_probs = log_softmax(expected["logits"])
    assert_close(found.predictions.log_probs_LBSC[-1], -np.sort(-log_probs)[..., :5])


def test_the_chosen_tokens_are_those_asked_for() -> None:
    model, tokens_BS = random_model(), random_tokens(2, 5)
    chosen_BS = np.full((2, 5), 3)
    found = rungs.look(model, tokens_BS, chosen_BS, candidates=2)
    logits_BSV = np.asarray(model(jnp.asarray(tokens_BS)))
    assert_close(found.contributions.logits_BS, logits_BSV[..., 3])
    assert_close(found.predictions.chosen_log_probs_LBS[-1], log_softmax(logits_BSV)[..., 3])
    assert found.predictions.tokens_LBSC.shape == (3, 2, 5, 2)
    assert_close(found.losses_BS, rungs.look(model, tokens_BS).losses_BS)


class DoubledNorm(RMSNorm):
    """A kind of norm that look has never seen."""

    def __call__(self, x: Any) -> Any:
        return 2 * super().__call__(x)

    def linear(self, x_BSD: Any) -> Any:
        return 2 * super().linear(x_BSD)


def test_a_norm_of_another_kind_brings_its_linear_form(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, gpt):
        monkeypatch.setattr(module, "make_norm", lambda _, width: DoubledNorm(width, 1e-5))
    model = random_model(**VARIANTS["mistral"])
    parts = rungs.look(model, random_tokens(2, 7)).contributions
    heads_BS, layers_BS = parts.heads_LBNS.sum((0, 2)), parts.feed_forward_LBS.sum(0)
    summed_BS = parts.embedding_BS + heads_BS + layers_BS + parts.biases_BS
    assert_close(summed_BS, parts.logits_BS)
    assert_close(parts.biases_BS, np.zeros_like(parts.biases_BS), float(abs(summed_BS).max()))


def test_one_token_has_no_loss() -> None:
    found = rungs.look(random_model(), random_tokens(1, 1))
    assert found.losses_BS.shape == (1, 0)
    assert found.layers is not None
    assert (found.layers.weights_LBNST == 1).all()


@pytest.mark.parametrize(
    ("tokens", "chosen", "message"),
    [
        ([[99]], None, "vocab_size is 32"),
        ([[0] * 9], None, "context_length is 8"),
        (np.zeros((1, 0), int), None, "no tokens"),
        ([[1, 2]], [[1]], r"shape \(1, 1\), not \(1, 2\)"),
        ([[1, 2]], [[1, 99]], "vocab_size is 32"),
    ],
)
def test_wrong_tokens_are_refused(tokens: Any, chosen: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rungs.look(random_model(), tokens, chosen)
