"""The parallel check: its cases, its comparison, and the command."""

import math
import re
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from flax import nnx

from rungs.checks import parallel as parallel_check
from rungs.checks.parallel import (
    CaseResult,
    Difference,
    ParallelCase,
    ParallelCheck,
    compare,
)
from rungs.checks.short_run import Limits, ShortRun
from rungs.common import run_log
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.data.tokens.loader import Batch, TrainingData
from rungs.data.tokens.sequences import IGNORED
from rungs.objectives.next_token import NextToken
from rungs.parallel import collectives, sharding
from rungs.parallel.sharding import DATA, Layout
from rungs.parallel.target_device import Target, trace_for
from rungs.step import train_step
from rungs.step.state import copy_bytes
from smoke_tests import test_parallel as script
from tests.support.configs import model_config, train_config

FEW = ("--devices", "4", "--sequences", "2")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    """Runs the command in this process, which has enough devices, and leaves its logging alone."""
    monkeypatch.setattr(script, "_restart_with", lambda _: None)
    monkeypatch.setattr(run_log, "log_to_terminal", lambda: None)
    return CliRunner()


def rows(output: str) -> dict[tuple[str, ...], list[str]]:
    """The table: mode, mesh and split to verdict, loss, gradient and update."""
    form = r"^(\w+) +(\d×\d), (\d×\d) +(ok|FAILED) +(\S+) (\S+) (\S+)"
    return {found[:3]: [*found[3:]] for found in re.findall(form, output, re.MULTILINE)}


CASES = {
    ("dp", "1×1", "1×2"),
    ("dp", "2×1", "1×2"),
    ("fsdp", "2×1", "1×2"),
    ("tp", "1×4", "1×2"),
    ("tp", "1×4", "2×1"),
    ("fsdp_tp", "2×2", "1×2"),
    ("cp", "1×4", "1×2"),
    ("cp", "1×4", "2×1"),
    ("cp", "2×2", "1×2"),
}


@pytest.mark.long
def test_every_mode_and_split_trains_like_one_device(
    runner: CliRunner, arguments: list[str]
) -> None:
    result = runner.invoke(script.main, [*arguments, *FEW])
    assert result.exit_code == 0, result.output
    assert "2 of the 8 sequences of 16 tokens" in result.stdout
    assert "\nfsdp 4×1 does not fit: 2 sequences are not divisible by 4\n" in result.stdout
    found = rows(result.stdout)
    assert found.keys() == CASES
    assert all(float(figure) < 2e-6 for _, *figures in found.values() for figure in figures)
    assert {path.name for path in Path(arguments[0]).iterdir()} == {"model.json", "train.json"}


@pytest.mark.long
def test_a_wrong_gradient_is_found_in_the_modes_that_have_it(
    runner: CliRunner, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device takes its share of the loss for all of it. The loss that is reported stays
    right."""
    original = NextToken.loss

    def loss(*args: Any) -> Any:
        loss, aux = original(*args)
        return loss * collectives.axis_size(DATA), aux

    monkeypatch.setattr(NextToken, "loss", loss)
    result = runner.invoke(script.main, [*arguments, *FEW])
    assert result.exit_code == 1, result.output
    table = rows(result.stdout)
    wrong = {case for case, row in table.items() if row[0] == "FAILED" and row[2] == "1.0e+00"}
    assert wrong == {case for case in CASES if case[1][0] == "2"}
    assert result.stdout.count("largest difference in ") == 4


class Sequences:
    """Data with eight random sequences per step."""

    total_steps = 2

    def batch(self, step: int) -> Batch:
        tokens = np.random.default_rng(step).integers(0, 61, (2, 4, 9), np.int32)
        return Batch(tokens[..., :-1], tokens[..., 1:])


def run_of_eight(**train: object) -> RunConfig:
    """A run that takes all of `Sequences` in each step."""
    split = train_config(microbatch_size=4, gradient_accumulation_steps=2, **train)
    return RunConfig(model_config(vocab_size=61), split)


@pytest.mark.long
def test_updates_that_depend_on_padding_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """61 rows of the vocabulary are 62 on two devices."""
    monkeypatch.setattr(sharding, "padded_axis", lambda _: None)
    run = run_of_eight(optimizer="adafactor", clipping_max_norm=1.0)
    data = cast(TrainingData, Sequences())
    check = ParallelCheck.of(ShortRun.of_data(run, data, Limits(2, 8, 8)))
    one = check.train(ParallelCase("dp", 1, 1, 1, 8, False))
    split = check.train(ParallelCase("tp", 1, 2, 1, 8, False), one.gradient)
    assert compare(split, one).exceeds == (False, False, True)


@pytest.mark.long
def test_updates_that_are_wrong_in_parts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on accelerators, where each device updates its part of whole weights."""
    original = train_step.constrain

    def constrain(layout: Layout, module: Any, *only: Any) -> None:
        original(layout, module, *only)
        if layout.mode == "fsdp" and only:
            nnx.update(module, jax.tree.map(lambda weight: 2 * weight, nnx.state(module, *only)))

    run = run_of_eight(optimizer="sgd")
    data = cast(TrainingData, Sequences())
    check = ParallelCheck.of(ShortRun.of_data(run, data, Limits(1, 8, 8)))
    one = check.train(ParallelCase("dp", 1, 1, 1, 8, False))
    monkeypatch.setattr(train_step, "constrain", constrain)
    with trace_for(Target("gpu")):
        split = check.train(ParallelCase("dp", 2, 1, 1, 8, False), one.gradient)
    assert compare(split, one).exceeds == (False, False, True)


def planned_check(sequences: int = 8, **model: object) -> ParallelCheck:
    """A check without data, for planning its cases."""
    train = train_config(microbatch_size=sequences // 2, gradient_accumulation_steps=2)
    return ParallelCheck(RunConfig(model_config(**model), train), [], 10, None)


def test_the_largest_meshes_that_fit_are_taken() -> None:
    fitting, reasons = planned_check(sequences=12, n_heads=4, n_kv_heads=2).meshes(8)
    tensor = [("tp", 1, 4), ("fsdp_tp", 2, 4), ("fsdp_tp", 4, 2)]
    context = [("cp", 2, 4), ("cp", 4, 2)]
    assert fitting == [("dp", 1, 1), ("dp", 6, 1), ("fsdp", 4, 1), *tensor, *context]
    assert reasons == [
        "dp 8×1 does not fit: 12 sequences are not divisible by 8",
        "fsdp 8×1 does not fit: 12 sequences are not divisible by 8",
        "tp 1×8 does not fit: n_heads: 4 is not divisible by the 8 devices of sharding.tensor;"
        " use 8",
        "cp 1×8 does not fit: n_heads: 4 is not divisible by the 8 devices of sharding.context;"
        " use 8",
    ]


def test_meshes_too_large_for_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    check = planned_check()
    needed = parallel_check._MEMORY_FACTOR * copy_bytes(check.config)
    monkeypatch.setattr(parallel_check, "memory_bytes", lambda: 4.5 * needed)
    fitting, reasons = check.meshes(8)
    assert ("dp", 4, 1) in fitting
    assert ("fsdp", 8, 1) in fitting
    assert reasons[0].startswith("dp 8×1 does not fit: needs ")


def test_splits_are_divisible_by_the_data_axis() -> None:
    assert [case[3:] for case in planned_check().splits("dp", 2, 1)] == [
        (1, 8, False),
        (2, 4, False),
        (4, 2, False),
    ]


def test_the_load_balancing_loss_is_only_compared_in_the_runs_own_split() -> None:
    check = planned_check(n_experts=4, experts_per_token=2)
    for case in check.splits("dp", 2, 1):
        assert case.balanced == (case[3:5] == (2, 4))
        assert check.config_of(case).train.load_balancing_weight == 0.01 * case.balanced
    assert check.reference(balanced=False) == ParallelCase("dp", 1, 1, 2, 4, False)


def case_result(
    losses: tuple[float, ...], gradient: float, expert_tokens: tuple[int, ...]
) -> CaseResult:
    tokens = np.array([[expert_tokens]] * len(losses))
    parts = {"large": np.array([3.0, 4.0]), "small": np.array([gradient])}
    return CaseResult(np.array(losses), parts, parts, tokens, 0)


def test_differences_are_relative_to_all_parameters() -> None:
    found = compare(case_result((2.0, 4.04), 0.5, (9, 7)), case_result((2.0, 4.0), 0.0, (8, 8)))
    assert found == (pytest.approx(0.01), pytest.approx(0.1), pytest.approx(0.1), "small", 1)


@pytest.mark.parametrize(
    ("loss", "gradient", "update", "rerouted", "exceeds"),
    [
        (1e-6, 1e-6, 1e-6, 0, (False, False, False)),
        (1e-4, 1e-6, 1e-4, 0, (True, False, True)),
        (math.nan, math.nan, math.nan, 0, (True, True, True)),
        (1e-4, 1e-3, 1e-6, 1, (False, False, False)),
        (1e-4, 1e-1, 1e-4, 1, (False, True, True)),
        (1e-4, 1e-3, 1e-6, 100, (True, True, False)),
    ],
)
def test_tolerances(
    loss: float, gradient: float, update: float, rerouted: int, exceeds: tuple[bool, bool, bool]
) -> None:
    assert Difference(loss, gradient, update, "", rerouted).exceeds == exceeds


class OneBatch:
    """Data with four sequences of eight tokens per step; only the last token is a target."""

    total_steps = 1

    def batch(self, step: int) -> Batch:
        inputs_ABS = np.arange(32, dtype=np.int32).reshape(2, 2, 8) + step
        return Batch(inputs_ABS, np.where(inputs_ABS % 8 == 7, 1, IGNORED))


def test_steps_are_cut_to_their_first_sequences_and_tokens() -> None:
    config = RunConfig(
        model_config(),
        train_config(
            microbatch_size=2,
            gradient_accumulation_steps=2,
            compute_dtype="bfloat16",
            optimizer="lion",
        ),
    )
    data = cast(TrainingData, OneBatch())
    cut = ParallelCheck.of(ShortRun.of_data(config, data, Limits(5, 3, 8)))
    assert [batch.inputs_ABS[0, :, 0].tolist() for batch in cut.batches] == [[0, 8, 16]]
    assert cut.reference() == ParallelCase("dp", 1, 1, 1, 3, False)
    assert cut.config.train.compute_dtype == "float32"
    assert cut.config.train.optimizer == "lion"
    with pytest.raises(UserError, match="no target among the first 7 tokens"):
        ShortRun.of_data(config, data, Limits(1, 4, 7))
