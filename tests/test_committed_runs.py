"""The first steps of committed runs compile, in the shapes and dtypes that they ask for."""

import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rungs.config import run_config
from rungs.objectives.table import make_train_step
from rungs.parallel.sharding import one_device
from rungs.step.state import AbstractState
from tests.support.committed_runs import COMMITTED_RUNS, REINFORCEMENT_RUNS, ROOT
from tests.support.long import long_except


def test_the_list_of_committed_runs_is_that_of_git() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "runs/*/model.json", "runs/*/train.json", "runs/*/reinforce.json"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {run / name for run in COMMITTED_RUNS for name in ("model.json", "train.json")}
    files |= {run / name for run in REINFORCEMENT_RUNS for name in ("model.json", "reinforce.json")}
    assert {ROOT / path for path in listed.splitlines()} == files


COMPILED = [
    *("a-to-a", "mixtral", "deepseek", "gpt-oss", "hybrid", "masked-diffusion"),
]
"""Runs that differ in their model, optimizer or objective; the first two are not long."""


@pytest.mark.parametrize("name", long_except(COMPILED[:2], COMPILED))
def test_the_first_step_compiles(name: str) -> None:
    settings = run_config.load_run(ROOT / "runs" / name)
    train = settings.train
    abstract = AbstractState(settings, 10, one_device())
    model, optimizer = abstract.fill(abstract.weights, abstract.optimizer)  # type: ignore[arg-type]
    shape = (
        train.gradient_accumulation_steps,
        train.microbatch_size,
        settings.sequence_length,
    )
    batch = jax.ShapeDtypeStruct(shape, jnp.int32)
    lowered = make_train_step(train).lower(model, optimizer, batch, batch)  # type: ignore[attr-defined]
    lowered.compile({"xla_backend_optimization_level": 0})  # it is not run; this is half the time


@pytest.mark.parametrize("run", COMMITTED_RUNS, ids=lambda path: path.name)
def test_eight_devices_divide_the_microbatch(run: Path) -> None:
    assert run_config.load_run(run).train.microbatch_size % 8 == 0


def test_gpt2_small_has_the_size_it_says() -> None:
    abstract = AbstractState(run_config.load_run(ROOT / "runs" / "gpt2-small"), 10, one_device())
    assert sum(leaf.size for leaf in abstract.weights.values()) == 163_009_536
