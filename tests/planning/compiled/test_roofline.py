"""The least time of a step, from programs whose FLOPs and bytes are known."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

from rungs.common.errors import UserError
from rungs.planning import flops, rows
from rungs.planning.compiled import roofline as roofline_module
from rungs.planning.compiled.report import roofline_section
from rungs.planning.compiled.roofline import (
    COLLECTIVES,
    PARTS,
    Roofline,
    StepFlops,
    Work,
    roofline,
    step_roofline,
)
from rungs.planning.compiled.step import CompiledStep
from rungs.planning.hardware import Hardware
from tests.planning.compiled.test_targets import NEEDS_CUDA, NEEDS_TPU, plan
from tests.support.plan_cases import PlanCase, lowered

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
DEVICE = Hardware("toy", "gpu", 2e12, 1e12, 1e9, 1e9)
"""In float32, 1,000 FLOPs in the time of a byte; in 16 bits, 2,000."""
UNKNOWN = StepFlops(model=1.0, planned=1.0, attention=0.0, dtype=FLOAT32)
LAYERS, ROWS, WIDTH = 5, 64, 128


def layers(weights: Array, x: Array) -> Array:
    """A scan of matmuls, each followed by a tanh."""

    def layer(x: Array, weight: Array) -> tuple[Array, None]:
        with jax.named_scope("feed_forward"):
            y = x @ weight
        with jax.named_scope("norm"):
            return jnp.tanh(y), None

    return lax.scan(layer, x, weights)[0]


def test_a_loop_counts_as_often_as_it_runs() -> None:
    shapes = (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = roofline(jax.jit(layers).lower(*arguments).compile(), DEVICE, UNKNOWN)
    weight, x = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH
    by_hand = {
        "feed-forward": (2 * LAYERS * ROWS * WIDTH * WIDTH, LAYERS * (2 * x + weight)),
        "norms and the rest": (0, LAYERS * 2 * x),
        "copies": (0, LAYERS * 2 * weight + 2 * x),  # each layer's slice, and the first x
    }
    assert list(found.parts) == list(by_hand)
    for part, (flops_by_hand, bytes_by_hand) in by_hand.items():
        work = found.parts[part]
        assert work.flops == flops_by_hand
        # the rest are the loop's counters
        assert bytes_by_hand <= work.moved_bytes <= bytes_by_hand + 40 * LAYERS
        assert work.compute_seconds == pytest.approx(flops_by_hand / 1e12)
        assert work.memory_seconds == pytest.approx(bytes_by_hand / 1e9, rel=0.01)


KERNELS = """
ENTRY %main {
  %x = bf16[1000,1000]{1,0} parameter(0)
  %dot = bf16[1000,1000]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/feed_forward/dot"}
  %exp = bf16[1000,1000]{1,0} exponential(%dot), metadata={op_name="jit(step)/feed_forward/exp"}
  %kernel = bf16[1000,1000]{1,0} custom-call(%exp), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(step)/attention/kernel"}
  ROOT %tanh = bf16[1000,1000]{1,0} tanh(%kernel), metadata={op_name="jit(step)/optimizer/tanh"}
}
"""  # noqa: E501 — as XLA writes it


def kernels() -> Roofline:
    known = StepFlops(model=6e9, planned=10e9, attention=8e9, dtype=BFLOAT16)
    return roofline(KERNELS, DEVICE, known)


def test_the_longer_of_computing_and_moving_is_the_bound_of_a_part_and_of_a_kernel() -> None:
    found, matrix = kernels(), 2e6 / 1e9
    # 2 GFLOP take 1 ms; the matmul reads and writes two matrices, 4 ms, and so does the exponential
    assert found.parts["feed-forward"] == pytest.approx(
        Work(2e9, 8e6, 1e-3, 4 * matrix, 4 * matrix)
    )
    assert found.parts["feed-forward"].limit == "memory"
    # what the kernel computes is known from the configs
    assert found.parts["attention kernel"] == pytest.approx(Work(8e9, 4e6, 4e-3, 4e-3, 4e-3))
    assert found.parts["attention kernel"].limit == "FLOPs"
    assert found.overlapped_seconds == pytest.approx(8e-3 + 4e-3 + 4e-3)
    assert found.utilization(found.overlapped_seconds) == pytest.approx(3 / 16)
    assert found.flops_ratio == 1


def test_kernels_in_turn_take_longer_than_if_they_overlap() -> None:
    compute, memory = Work(4e9, 0, 2.0, 0, 2.0), Work(0, 1e9, 0, 3.0, 3.0)
    both = Work(*map(sum, zip(compute, memory, strict=True)))
    assert (both.overlapped_seconds, both.serial_seconds) == (3.0, 5.0)
    transfer = memory._replace(kernel_seconds=0)
    beside = Work(*map(sum, zip(compute, transfer, strict=True)))
    assert beside.serial_seconds == 3.0


def test_the_goal_says_what_the_rest_may_take() -> None:
    found = kernels()
    goal = found.goal(utilization=0.25)
    assert goal == pytest.approx((12e-3, 5e-3, 11e-3))
    assert goal.room == pytest.approx(7e-3)
    assert not goal.is_possible
    easier = found.goal(utilization=0.15)
    assert easier.is_possible
    assert easier.matmul_share == pytest.approx(5 / (20 - 11))


def test_the_report_has_the_same_figures() -> None:
    found = kernels()
    lines = [" ".join(line.split()) for line in rows.lines(roofline_section(found))]
    assert "feed-forward 0.002 0.008 1 8 8 50% memory 8" in lines
    assert "model FLOPs utilization: at most 18.8%; in turn, 18.8%" in lines
    assert "55% of the peak is a step of 5.45 ms; matmuls take at least 5" in lines
    assert "all else must shrink to 4%" in lines
    content = json.loads(json.dumps(rows.content(roofline_section(found))["roofline"]))
    assert content["parts"]["attention kernel"]["flops"] == 8e9
    assert content["parts"]["optimizer"]["limit"] == "memory"
    assert content["goal"]["seconds_for_the_rest"] == pytest.approx(0.4545e-3, rel=1e-3)


def test_a_loop_of_unknown_length_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
%body (b: f32[]) -> f32[] {
  ROOT %b = f32[] parameter(0)
}
%condition (c: f32[]) -> pred[] {
  %c = f32[] parameter(0)
  ROOT %less = pred[] compare(%c, %c), direction=LT
}
ENTRY %main {
  %x = f32[] parameter(0)
  ROOT %loop = f32[] while(%x), condition=%condition, body=%body
}
"""
    monkeypatch.setattr(roofline_module, "step_flops", lambda _: UNKNOWN)
    forecast: Any = SimpleNamespace(hardware=DEVICE)
    result: Any = SimpleNamespace(program=text)
    with pytest.raises(UserError, match=r"^--roofline: loop \(\): XLA does not know how many"):
        step_roofline(forecast, CompiledStep(1.0, {}, result))
    assert step_roofline(forecast, CompiledStep(1.0, {}, "Ran out of memory")) is None


@pytest.mark.parametrize("family", ["gpt2", pytest.param("mixtral", marks=pytest.mark.long)])
def test_a_steps_matmuls_have_the_flops_that_the_configs_give(family: str) -> None:
    run = PlanCase(family, "dots", "dp", 4, "float32").run()
    tokens = 4 * run.train.microbatch_size * run.model.context_length
    planned = tokens * flops.hardware_flops_per_token(run).total
    known = StepFlops(planned, planned, 0.0, FLOAT32)
    found = roofline(lowered(run).compile(), DEVICE, known)
    assert found.flops_ratio == pytest.approx(1, rel=0.02)
    network = "experts" if family == "mixtral" else "feed-forward"
    absent = {COLLECTIVES, "experts", "feed-forward"} - {network}
    assert set(found.parts) == {*PARTS} - absent


@pytest.mark.long
@pytest.mark.parametrize(
    "device",
    [pytest.param("h100", marks=NEEDS_CUDA), pytest.param("tpu-v5e", marks=NEEDS_TPU)],
)
def test_a_step_for_an_accelerator_has_the_flops_that_the_configs_give(device: str) -> None:
    arguments = "runs/layers", "--device", device, "--sharding", "dp:1", "--compile", "--roofline"
    result = plan(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    content = json.loads(result.stdout)["roofline"]
    assert content["flops_ratio"] == pytest.approx(1, rel=0.02)
    seconds = [part["seconds"] for part in content["parts"].values()]
    assert content["seconds"] == pytest.approx(sum(seconds))
    assert 0 < content["seconds"] <= content["seconds_in_turn"]


def test_the_roofline_needs_a_compiled_step() -> None:
    result = plan(str(Path("runs/layers")), "--device", "h100", "--roofline")
    assert result.returncode == 2
    assert result.stderr == "error: --roofline needs --compile\n"
