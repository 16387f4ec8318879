"""The objective of `docs/tasks/add-an-objective.md` trains, resumes bit for bit, and is the same on
every mesh, without a change to the loop."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rungs.checks.parallel import ParallelCase, ParallelCheck, compare
from rungs.config.run_config import RunConfig, load_run
from rungs.data.tokens.loader import Batch
from rungs.parallel.sharding import place_batch
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.step.state import create_model_and_optimizer
from rungs.step.train_step import make_step
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from tests.support.charts import draw_no_charts
from tests.support.committed_runs import ROOT
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.starting import Killed, die_before
from tests.support.tiny_run import assert_same_outcome, make_dataset, make_run

PAGE = ROOT / "docs" / "tasks" / "add-an-objective.md"
VOCABULARY = 61


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The page's code as a module."""
    found = re.search(r"^```python\n(# (\S+\.py)\n.*?)^```", PAGE.read_text(), re.M | re.S)
    assert found
    path = tmp_path_factory.mktemp("example") / found[2]
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
@pytest.mark.parametrize(
    ("mode", "sizes"), [("dp", (2, 1)), ("fsdp", (2, 1)), ("tp", (1, 2)), ("cp", (1, 2))]
)
def test_the_parallel_check_passes(example: ModuleType, mode: Any, sizes: tuple[int, int]) -> None:
    run = config()
    check = ParallelCheck(run, [batch()], 2, None, example.LabelSmoothing)
    one = check.train(ParallelCase("dp", 1, 1, 1, 8, False))
    other = check.train(ParallelCase(mode, *sizes, 2, 4, False), one.gradient)
    assert not any(compare(other, one).exceeds)


@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
def test_it_resumes_bit_for_bit(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(tmp_path)
    kind = on_datasets(tmp_path, example.LabelSmoothing)
    whole, killed = (
        make_run(tmp_path / name, min_train_tokens=12 * 128) for name in ("whole", "killed")
    )

    def train(run: RunFolder) -> int:
        return launch(run, load_run(run.path), StartOptions(), kind)

    assert train(whole) == 0
    with monkeypatch.context() as patch:
        die_before(9, patch)
        with pytest.raises(Killed):
            train(killed)
    assert train(killed) == 0
    assert_same_outcome(killed, whole)
    assert metrics.read(killed.metrics)[0].train_loss is not None


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_no_charts(monkeypatch)
