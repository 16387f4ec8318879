"""The losses of preferences: against TRL's trainers, and against formulas in float64."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from rungs.checkpointing.weights_file import Weights
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.tokens.loader import PreferenceBatch
from rungs.data.tokens.sequences import IGNORED
from rungs.huggingface.importing import Import, find_source, import_model
from rungs.objectives.kto import KTO
from rungs.objectives.preferences import LOSSES, LogProbs, Preferences, dpo, ipo, simpo
from rungs.objectives.table import objective_of
from rungs.parallel.sharding import Layout, place_batch
from rungs.step.state import create_model_and_optimizer, host_arrays
from rungs.step.train_step import step_function
from tests.support.configs import mesh_of, train_config
from tests.support.published_models import Arrays, copy

FIXTURES = Path(__file__).parents[1] / "fixtures"
TRL = json.loads((FIXTURES / "preferences.json").read_text())
OBJECTIVES = "dpo", "ipo", "simpo"
KEYS = "beta", "simpo_gamma", "desirable_weight", "undesirable_weight"
LENGTH = 16


def config(objective: str, **keys: Any) -> TrainConfig:
    settings = {k: v for k, v in TRL["settings"][objective].items() if k in KEYS}
    given = {"objective": objective, "start_from": "runs/none", "compute_dtype": "float32"}
    return train_config(**(given | settings | {"microbatch_size": 8} | keys))


def batch() -> PreferenceBatch:
    """Return TRL's pairs as one microbatch."""
    inputs = np.full((1, 8, LENGTH), 2, np.int32)
    targets, reference = np.full_like(inputs, IGNORED), np.zeros(inputs.shape, np.float32)
    for number, pair in enumerate(TRL["pairs"]):
        for place, key in enumerate(("chosen", "rejected")):
            row, first, ids = 2 * number + place, len(pair["prompt"]), pair["prompt"] + pair[key]
            inputs[0, row, : len(ids) - 1] = ids[:-1]
            targets[0, row, first - 1 : len(ids) - 1] = ids[first:]
            reference[0, row, 0] = TRL["reference"][key][number]
    return PreferenceBatch(inputs, targets, None, reference)


def unpaired_batch() -> PreferenceBatch:
    """Return TRL's unpaired preferences as one microbatch."""
    rows = TRL["unpaired"]
    inputs = np.full((1, 2 * len(rows), LENGTH), 2, np.int32)
    targets, desirable = np.full_like(inputs, IGNORED), np.zeros_like(inputs)
    reference = np.zeros(inputs.shape, np.float32)
    for number, one in enumerate(rows):
        for place, key in enumerate(("completion", "other")):
            row, first, ids = 2 * number + place, len(one["prompt"]), one["prompt"] + one[key]
            inputs[0, row, : len(ids) - 1] = ids[:-1]
            targets[0, row, first - 1 : len(ids) - 1] = ids[first:]
            reference[0, row, 0] = one["reference"][place]
            desirable[0, row, 0] = one["label"]
    return PreferenceBatch(inputs, targets, None, reference, desirable)


def imported(folder: Path, changed: Arrays | None = None) -> Weights:
    """Return the model that TRL used, or arrays with its names, converted."""
    source = copy("llama", folder / "published", changed)
    import_model(Import.from_source(find_source(str(source))), folder / "run")
    return Weights(folder / "run" / "checkpoints" / "imported" / "model.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("objective", [*OBJECTIVES, "kto"])
def test_loss_and_gradient_are_those_of_trl(objective: str, tmp_path: Path) -> None:
    arrays = load_file(FIXTURES / "preferences.safetensors")
    prefix = f"{objective}/"
    parts = {name.removeprefix(prefix): arrays[name] for name in arrays if prefix in name}
    wanted = imported(tmp_path / "gradient", parts)
    weights = imported(tmp_path / "weights")
    run = RunConfig(weights.header.model, config(objective))
    mesh = mesh_of(1)
    start = {name: jax.numpy.asarray(weights.array(name)) for name in weights.names()}
    model, optimizer = create_model_and_optimizer(run, 2, mesh, start)
    layout = Layout.of(None, mesh)
    step = nnx.jit(step_function(objective_of(run.train), run.train, layout, keeps_gradient=True))
    given = batch() if run.train.has_reference else batch()._replace(reference_ABS=None)
    given = unpaired_batch() if objective == "kto" else given
    result: Any = step(model, optimizer, *place_batch(mesh, *given))
    np.testing.assert_allclose(result.losses_A[0], TRL["losses"][objective], rtol=1e-5)
    found = host_arrays(result.gradient, run.model.vocab_size)
    largest = max(float(np.abs(array).max()) for array in found.values())
    assert found.keys() == wanted.names()
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted.array(name), rtol=1e-5, atol=1e-5 * largest)


def log_probs() -> LogProbs:
    return LogProbs(*np.random.default_rng(0).normal(-20, 6, (4, 7)))


def test_the_losses_are_those_of_the_formulas() -> None:
    pairs = log_probs()
    chosen, rejected, reference_chosen, reference_rejected = pairs
    margins = chosen - reference_chosen - rejected + reference_rejected
    expected = np.log1p(np.exp(-0.2 * margins))
    np.testing.assert_allclose(dpo(pairs, config("dpo", beta=0.2)), expected, rtol=1e-5)
    found = ipo(pairs, config("ipo", beta=0.2))
    np.testing.assert_allclose(found, (margins - 2.5) ** 2, rtol=1e-5)
    zero = LogProbs(chosen, rejected, 0 * chosen, 0 * chosen)
    expected = np.log1p(np.exp(-(2.0 * (chosen - rejected) - 0.4)))
    found = simpo(zero, config("simpo", beta=2.0, simpo_gamma=0.4))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("lift", [0.0, 9.0])
def test_kto_is_that_of_the_formulas_without_gradient_through_its_kl(lift: float) -> None:
    """`lift` makes the KL divergence positive or not."""
    sums, reference = np.random.default_rng(2).normal(-20, 3, (2, 10))
    sums[1::2] += lift - (sums - reference)[1::2].mean() - 1
    is_desirable = np.array([1, 0, 0, 1, 1])
    kl = max((sums - reference)[1::2].mean(), 0.0)
    assert kl == pytest.approx(max(lift - 1, 0))

    def expected(sums: np.ndarray) -> np.ndarray:
        value = 0.3 * np.where(is_desirable, 1, -1) * ((sums - reference)[::2] - kl)
        return np.where(is_desirable, 1.4, 0.7) * (1 - 1 / (1 + np.exp(-value)))

    train = config("kto", beta=0.3, desirable_weight=1.4, undesirable_weight=0.7)
    given = reference, np.ones(10), is_desirable.repeat(2)
    np.testing.assert_allclose(KTO(train).losses(sums, *given), expected(sums), rtol=1e-5)
    found = jax.grad(lambda sums: KTO(train).losses(sums, *given).sum())(sums.astype(np.float32))
    changes = 1e-4 * np.eye(10)
    slopes = [(expected(sums + c) - expected(sums - c)).sum() / 2e-4 for c in changes]
    np.testing.assert_allclose(found, slopes, atol=1e-5 * np.abs(slopes).max())
    figures = KTO(train).means(sums, *given)
    rewards = 0.3 * (sums - reference)[::2]
    margin = rewards[is_desirable == 1].mean() - rewards[is_desirable == 0].mean()
    assert figures["margin"] == pytest.approx(margin)
    assert figures["kl"] == pytest.approx(kl)
    assert figures["rejected_log_prob"] == pytest.approx(sums[[2, 4]].mean())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_lengths_count_only_in_ipo_and_simpo(objective: str) -> None:
    train = config(objective)
    sums, reference, counts = np.array([-6.0, -8]), np.array([-7.0, -7]), np.array([3, 4])
    means = counts if objective != "dpo" else 1
    pairs = LogProbs.of(sums / means, reference / means)
    found = Preferences(train).losses(sums, reference, counts)
    np.testing.assert_allclose(found, LOSSES[objective](pairs, train), rtol=1e-6)


def test_of_logits_has_the_gradient_of_the_objective() -> None:
    _, (targets,), _, references, _ = batch()
    assert references is not None
    logits = np.random.default_rng(1).normal(size=(8, LENGTH, 67)).astype(np.float32)
    objective: Any = Preferences(config("dpo"))
    loss = objective.of_logits(logits, targets, None, references[0])
    log_p = logits - np.log(np.exp(logits, dtype=np.float64).sum(-1, keepdims=True))
    own = np.take_along_axis(log_p, np.maximum(targets, 0)[..., None], -1)[..., 0]
    sums = np.where(targets >= 0, own, 0).sum(-1)
    expected = dpo(LogProbs.of(sums, references[0].sum(-1)), config("dpo")).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_wrong_config_is_refused() -> None:
    for keys, problem in (
        ({"start_from": None}, "start_from: needed"),
        ({"documents": "separate"}, "not supported"),
        ({"microbatch_size": 3}, "microbatch_size: 3 is odd"),
    ):
        values = {"objective": "dpo", "start_from": "runs/none", **keys}
        with pytest.raises(ValueError, match=problem):
            train_config(**values)
