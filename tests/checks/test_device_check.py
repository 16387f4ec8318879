"""The parts of the device check: each finds what it is there to find."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungs.checkpointing.manifest import Checkpoint
from rungs.checks import device, kernels
from rungs.checks import device_step as step
from rungs.checks.check import Check, failures, print_checks
from rungs.checks.device import on_mesh
from rungs.checks.device_step import RunningStep, StepTime
from rungs.config.run_config import RunConfig
from rungs.model.kernels.blockwise_attention import Scoring
from rungs.model.kernels.matmul import matmul
from rungs.parallel import target_device
from rungs.parallel.target_device import Target
from rungs.planning import hardware
from rungs.planning.memory import memory_of
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.long import long_except

CASES = {case.name: case for case in kernels.cases()}
QUICK = [
    *(("matmul", "float32"), ("cross-entropy", "bfloat16"), ("grouped matmul", "bfloat16")),
    *(("layer norm", "float32"), ("RMS norm", "bfloat16")),
]
LONG = [
    *(("attention, odd length", "float32"), ("attention, window", "bfloat16")),
    ("attention, soft cap", "float32"),
]


@pytest.mark.parametrize("kernel", long_except(QUICK, QUICK + LONG), ids=str)
def test_every_kernel_is_as_exact_as_its_plain_form(kernel: tuple[str, str]) -> None:
    name, dtype = kernel
    found = kernels.check(CASES[name], dtype)
    assert found.passed
    assert 0 <= cast(float, found.value) < {"float32": 2e-6, "bfloat16": 7e-3}[dtype]
    assert found.notes[0].startswith("by XLA; plain ")


def without_gradient(x: Any, kernel: Any) -> Any:
    """The right values, and no gradient for the weights."""
    return matmul(x, jax.lax.stop_gradient(kernel))


@pytest.mark.parametrize("name", [case.name for case in kernels.cases() if case.part])
def test_a_kernel_is_called_in_the_scope_that_names_its_part_of_the_model(name: str) -> None:
    case = CASES[name]
    lowered = jax.jit(case.kernel).lower(*kernels._inputs(case, "float32"))
    program = lowered.as_text(debug_info=True)
    assert re.search(rf'"jit\(kernel\)/{case.part}/', program)


@pytest.mark.parametrize(
    ("broken", "dtype"),
    [
        (lambda x, kernel: matmul(x, kernel) * 1.02, "bfloat16"),
        (without_gradient, "bfloat16"),
        (lambda x, kernel: matmul(x, kernel).at[0, 0].set(jnp.nan), "float32"),
    ],
    ids=["values", "gradient", "NaN"],
)
def test_a_broken_kernel_is_found(
    broken: Callable[..., Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "matmul", broken)
    (case,) = (case for case in kernels.cases() if case.name == "matmul")
    found = kernels.check(case, dtype)
    assert found.passed is False
    assert cast(float, found.value) > 0.01


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("attention, window", {"window": 101}),
        pytest.param("attention, wide heads", {"scale": 1 / 17}, marks=pytest.mark.long),
    ],
)
def test_attention_with_a_wrong_setting_is_found_also_in_16_bits(
    name: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = lambda *keys, **more: dataclasses.replace(Scoring(*keys, **more), **change)  # noqa: E731
    monkeypatch.setattr(kernels, "Scoring", wrong)
    (case,) = (case for case in kernels.cases() if case.name == name)
    assert kernels.check(case, "bfloat16").passed is False


def test_a_kernel_that_does_not_compile_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: Any) -> Any:
        raise NotImplementedError("no engine\nfor this shape")

    monkeypatch.setattr(kernels, "matmul", failing)
    (case,) = (case for case in kernels.cases() if case.name == "matmul")
    found = kernels.check(case, "float32")
    assert (found.passed, found.notes) == (False, ("no engine for this shape",))


def test_float32_may_be_rounded_as_accelerators_round_it() -> None:
    assert kernels._tolerance("float32") == 1e-5
    for target, tolerance in ((Target("gpu", "9.0"), 2**-10), (Target("tpu"), 2**-7)):
        with target_device.trace_for(target):
            assert kernels._tolerance("float32") == tolerance
    assert kernels._tolerance("bfloat16") == 2**-7


def test_rounds_change_the_array_of_every_device() -> None:
    mesh = mesh_of(4)
    zeros = device._on_each(mesh, np.zeros(3, np.float32))
    assert np.asarray(device._rounds(mesh, lambda x: x + 1)(5, zeros)).tolist() == [[5] * 3] * 4


def test_speeds_are_work_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of half a second. The array that is sent arrives at the next device."""
    sent: list[np.ndarray] = []

    def half_a_second(program: device.Rounds, *arrays: Any) -> float:
        numbered = arrays[0] + jnp.arange(len(arrays[0]), dtype=arrays[0].dtype).reshape(
            -1, *[1] * (arrays[0].ndim - 1)
        )
        sent.append(np.asarray(program(1, numbered, *arrays[1:])))
        return 0.5

    monkeypatch.setattr(device, "_seconds_per_round", half_a_second)
    monkeypatch.setattr(device, "_SIZES", {"cpu": 64})
    monkeypatch.setattr(device, "_CPU_BYTES", 4096)
    mesh = mesh_of(2)
    assert device.matmul_flops(mesh, "float32") == 2 * 64**3 / 0.5
    assert device.memory_bandwidth(mesh) == 2 * 2048 / 0.5
    assert device.link_bandwidth(mesh) == 512 / 0.5
    assert sent[-1][:, 0].tolist() == [1, 0]


def test_short_rounds_are_repeated_until_they_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def timed(_: Any, rounds: int) -> float:
        taken.append(rounds)
        return rounds * 0.001

    monkeypatch.setattr(device, "_timed", timed)
    assert device._seconds_per_round(lambda: None) == pytest.approx(0.001)
    assert taken[-1] * 0.001 >= device._LEAST_SECONDS
    assert taken[:3] == [1, 1, 10]


def test_a_device_far_below_its_published_figures_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_platform", lambda _: "gpu")
    monkeypatch.setattr(device, "matmul_flops", lambda *_: 300e12)
    monkeypatch.setattr(device, "memory_bandwidth", lambda _: 3e12)
    found = list(device.speeds(mesh_of(1), ["float32"], hardware.device_by_name("h100")))
    assert [(check.name, check.passed) for check in found] == [
        ("matmul float32", True),
        *(("matmul bfloat16", False), ("matmul float16", False), ("memory bandwidth", True)),
    ]
    assert found[1].notes[0] == "is 30%"
    assert device._compared("matmul", 1.0, "FLOP/s", None).passed is None


def tiny(**train: object) -> RunConfig:
    keys = {"microbatch_size": 2, "gradient_accumulation_steps": 2, "compute_dtype": "float32"}
    model = model_config(n_layers=0, n_heads=None)
    return on_mesh(RunConfig(model, train_config(**{**keys, **train})), mesh_of(2))


@pytest.fixture(scope="module")
def running() -> RunningStep:
    return RunningStep.create(tiny(), mesh_of(2))


def test_steps_are_taken_and_timed(running: RunningStep) -> None:
    timed = StepTime(running)
    compilation, one_step, loss = timed.checks(running)
    assert loss.passed
    assert timed.losses[0] == pytest.approx(math.log(32), rel=0.05)
    assert 0 < cast(float, one_step.value) < cast(float, compilation.value)
    assert timed.tokens_per_second == pytest.approx(2 * 2 * 8 / timed.seconds)


@pytest.mark.parametrize("losses", [[3.0, math.nan], [3.0, 3.0], [3.0, 4.0]])
def test_training_that_does_not_work_is_found(losses: list[float], running: RunningStep) -> None:
    timed = StepTime(running)
    timed.losses = losses
    assert [check.passed for check in timed.checks(running)] == [None, None, False]


def test_memory_is_compared_with_the_plan(running: RunningStep) -> None:
    """On a CPU with the compiler's analysis, which counts at least the state; elsewhere also with
    what the devices used."""
    plan, compiler = step.memory(running)
    assert plan.value == memory_of(running.config, running.mesh).total
    assert plan.value == pytest.approx(cast(float, compiler.value), rel=1)
    assert cast(float, compiler.value) > memory_of(running.config, running.mesh).weights * 3


@pytest.mark.parametrize(
    ("size", "passed"), [(1e9, True), (1.2e9, True), (1.3e9, False), (0.2e9, True)]
)
def test_a_step_that_needs_much_more_memory_than_planned_is_found(
    size: float, passed: bool
) -> None:
    assert step._compared("memory, used", int(size), 10**9).passed == passed
    assert step._compared("memory, used", 200_000_000, 10**6).passed


def test_steps_that_do_not_repeat_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng()
    monkeypatch.setattr(step, "_trained", lambda *_: {"a": np.ones(3), "b": rng.random(3)})
    (found,) = step.determinism(tiny(), mesh_of(2))
    assert (found.value, found.passed) == ("different bits", False)
    assert found.notes[1] == "1 arrays differ, such as b"


def test_checkpoints_are_timed_and_removed(running: RunningStep, tmp_path: Path) -> None:
    stall, complete, size = step.checkpoint(running, tmp_path)
    assert 0 < cast(float, stall.value) < cast(float, complete.value)
    state = sum(array.nbytes for array in running.arrays().values())
    assert cast(float, size.value) > state
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_found(
    running: RunningStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "damage", lambda _: ["model.safetensors"])
    *_, size = step.checkpoint(running, tmp_path)
    assert (size.passed, size.notes) == (False, ("damaged on the disk: model.safetensors",))


def test_versions_name_devices_and_libraries() -> None:
    found = {one.name: one for one in device.machine(mesh_of(8))}
    assert found["devices"].value == "8 × cpu"
    assert {"jax", "jaxlib", "Python", "system", "runtime"} <= found.keys()
    assert not failures(found.values())


@pytest.mark.parametrize(
    ("code", "version"), [(0, "550.54.14"), (9, "")], ids=["a GPU", "a driver that fails"]
)
def test_a_gpu_that_is_not_used_is_found(
    code: int, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho 550.54.14\nexit {code}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert device.nvidia_driver() == version
    assert not failures(device.machine(mesh_of(8)))  # the tests ask for the CPU
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert [one.name for one in failures(device.machine(mesh_of(8)))] == ["devices"] * (not code)


def test_a_row_has_one_line_or_one_for_each_detail(capsys: pytest.CaptureFixture[str]) -> None:
    print_checks([Check("loss", 4.2, "less than 4.5", True), Check.skipped("rows", "x" * 80)])
    loss, *rows, _, last = capsys.readouterr().out.splitlines()
    assert " ".join(loss.split()) == "loss ok 4.2 expected: less than 4.5"
    assert [row.split() for row in rows] == [["rows", "skipped"], ["x" * 80]]
    assert last == "2 checks in 0 s; failed: none"
