"""The objective of `docs/tasks/add-an-objective.md` has the loss of its formula, and is the same on
every mesh; `test_killed_and_resumed.py` trains it, without a change to the loop."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rungs.checks.parallel import ParallelCase, ParallelCheck, compare
from rungs.config.run_config import RunConfig
from rungs.data.tokens.loader import Batch
from rungs.parallel.sharding import place_batch
from rungs.step.state import create_model_and_optimizer
from rungs.step.train_step import make_step
from tests.support.committed_runs import ROOT
from tests.support.configs import mesh_of, model_config, train_config

PAGE = ROOT / "docs" / "tasks" / "add-an-objective.md"
VOCABULARY = 61


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return load_example(tmp_path_factory.mktemp("example"))


def load_example(folder: Path) -> ModuleType:
    """Return the page's code as a module, written into a folder."""
    found = re.search(r"^```python\n(# (\S+\.py)\n.*?)^```", PAGE.read_text(), re.M | re.S)
    assert found
    path = folder / found[2]
    path.write_text(found[1])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch() -> Batch:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (1, 8, 9), np.int32)
    targets = tokens[..., 1:].copy()
    targets[0, :3, 5:] = -1
    return Batch(tokens[..., :-1], targets)


def config() -> RunConfig:
    return RunConfig(model_config(vocab_size=VOCABULARY), train_config(clipping_max_norm=1.0))


@pytest.mark.long
def test_its_loss_is_that_of_the_formula(example: ModuleType) -> None:
    run, mesh = config(), mesh_of(1)
    model, optimizer = create_model_and_optimizer(run, 2, mesh)
    logits = np.asarray(model(batch().inputs_ABS[0]), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    targets = batch().targets_ABS[0]
    own = np.take_along_axis(log_p, np.maximum(targets, 0)[..., None], -1)[..., 0]
    mixed = -(1 - example.SMOOTHING) * own - example.SMOOTHING * log_p.mean(-1)
    step = make_step(example.LabelSmoothing(run.train), run.train, mesh)
    result = step(model, optimizer, *place_batch(mesh, *batch()))
    np.testing.assert_allclose(result.losses_A[0], mixed[targets >= 0].mean(), rtol=1e-6)


@pytest.mark.long
def test_the_parallel_check_passes(example: ModuleType) -> None:
    run = config()
    check = ParallelCheck(run, [batch()], 2, None, example.LabelSmoothing)
    one = check.train(ParallelCase("dp", 1, 1, 1, 8, False))
    other = check.train(ParallelCase("cp", 1, 2, 2, 4, False), one.gradient)
    assert not any(compare(other, one).exceeds)
