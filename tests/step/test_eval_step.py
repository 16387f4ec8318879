"""The validation loss of a mixture: the mean, and that of each dataset."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import ValidationData
from rungs.data.tokens.sequences import IGNORED
from rungs.model.gpt import GPT
from rungs.objectives.next_token import NextToken
from rungs.parallel.sharding import one_device
from rungs.step.eval_step import make_evaluation_step, validation_loss
from tests.support.token_datasets import configs, make_pairs, make_text, some_pairs, validation_rows


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    place, rng = tmp_path_factory.mktemp("datasets"), np.random.default_rng(0)
    few, many = (
        {split: rng.integers(0, most, 300) for split in ("train", "validation")}
        for most in (5, 30_000)
    )
    pairs = {"train": some_pairs(40, 0), "validation": some_pairs(40, 1)}
    return {
        "few": make_text(place, "few", **few),
        "many": make_text(place, "many", **many),
        "pairs": make_pairs(place, "pairs", **pairs),
    }


@pytest.mark.parametrize("weights", [{"few": 3, "many": 2, "pairs": 2}, {"pairs": 1}])
def test_losses_are_those_of_each_dataset(
    datasets: dict[str, Dataset], weights: dict[str, float]
) -> None:
    config = configs(dataset=weights, sequence_length=8)
    validation = ValidationData.of(config, datasets)
    assert validation is not None
    model = GPT(config.model, jax.random.key(1))
    step = make_evaluation_step(NextToken(config.train), config.train)
    mean, by_dataset = validation_loss(model, step, validation, one_device())

    inputs_NS, targets_NS = validation_rows(validation).swapaxes(0, 1)
    logits_NSV = nnx.jit(lambda model: model(inputs_NS))(model)
    losses_NS = np.asarray(
        optax.losses.softmax_cross_entropy_with_integer_labels(
            logits_NSV, np.maximum(targets_NS, 0)
        )
    )
    counts_NS = targets_NS != IGNORED
    own = {
        "few": inputs_NS.max(axis=1) < 5,
        "pairs": (inputs_NS == 29_999).any(axis=1) | (targets_NS == 29_999).any(axis=1),
    }
    own["many"] = ~(own["few"] | own["pairs"])
    assert mean == pytest.approx(float(losses_NS[counts_NS].mean()), rel=1e-5)
    assert list(by_dataset) == list(weights)
    for name, loss in by_dataset.items():
        counted_NS = counts_NS & own[name][:, None]
        assert loss == pytest.approx(float(losses_NS[counted_NS].mean()), rel=1e-5)
