"""Every committed run folder: its first step compiles, in the shapes and types it asks for."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rungs.config import run_config
from rungs.parallel.mesh import one_device
from rungs.step.state import AbstractState
from rungs.step.train_step import make_train_step
from tests.support.tiny_run import ROOT

RUNS = sorted(path.parent for path in (ROOT / "runs").glob("*/train.json"))
EXPECTED = {"a-to-a", "next-token", "a-to-a-fineweb", "gpt2-small"}


def test_the_runs_there_should_be() -> None:
    assert {run.name for run in RUNS} >= EXPECTED


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.name)
def test_the_first_step_compiles(run: Path) -> None:
    settings = run_config.load_run(run)
    train = settings.train
    abstract = AbstractState(settings, 10, one_device())
    model, optimizer = abstract.fill(abstract.weights, abstract.optimizer)  # type: ignore[arg-type]
    shape = (
        train.gradient_accumulation_steps,
        train.microbatch_size,
        settings.model.context_length,
    )
    batch = jax.ShapeDtypeStruct(shape, jnp.int32)
    lowered = make_train_step(train).lower(model, optimizer, batch, batch)  # type: ignore[attr-defined]
    lowered.compile({"xla_backend_optimization_level": 0})  # it is not run; this is half the time


def test_gpt2_small_has_the_size_it_says() -> None:
    abstract = AbstractState(run_config.load_run(ROOT / "runs" / "gpt2-small"), 10, one_device())
    assert sum(leaf.size for leaf in abstract.weights.values()) == 163_009_536
