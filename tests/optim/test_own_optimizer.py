"""Optimizers of other packages, found by their entry points."""

from pathlib import Path

import numpy as np
import pytest

from rungs.config.run_config import conflicts
from tests.optim.test_optimizers import (
    RATE,
    arrays,
    assert_nothing_moves,
    fresh,
    gradients,
    named,
    update,
)
from tests.support.configs import model_config, train_config

MODULE = """
import optax

def ours(train, params, model):
    return optax.scale_by_adam(train.beta1, train.beta2, train.epsilon)

def backwards(train, params, model):
    return optax.scale(-1.0)
"""
ENTRIES = "[rungs.optimizers]\nours = own_optimizers:ours\nbackwards = own_optimizers:backwards\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with two optimizers, as an installer leaves it."""
    (tmp_path / "own_optimizers.py").write_text(MODULE)
    metadata = tmp_path / "own_optimizers-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own-optimizers\nVersion: 1.0")
    (metadata / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_the_optimizer_of_a_package_is_used() -> None:
    model, wrapped = fresh("backwards")
    before, gradient = arrays(model), gradients(model)[0]
    update(model, wrapped, gradient)
    for name, expected in named(gradient).items():
        moved = arrays(model)[name] - before[name]
        np.testing.assert_allclose(moved, RATE * expected, atol=1e-6, err_msg=name)


@pytest.mark.usefixtures("installed")
def test_its_state_stays_without_a_finite_microbatch() -> None:
    assert_nothing_moves("ours")


@pytest.mark.usefixtures("installed")
def test_its_name_is_known() -> None:
    assert list(conflicts(model_config(), train_config(optimizer="ours"))) == []
    [line] = conflicts(model_config(), train_config(optimizer="backward"))
    assert line == "optimizer: no optimizer is called 'backward'; did you mean backwards?"


def test_a_name_that_is_not_installed_is_refused() -> None:
    [line] = conflicts(model_config(), train_config(optimizer="adam"))
    assert line == "optimizer: no optimizer is called 'adam'; did you mean adamw?"
