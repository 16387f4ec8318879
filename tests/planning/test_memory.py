"""The planned memory of a step, against the compiler's analysis of the compiled step."""

import math
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from rungs.config.run_config import RunConfig
from rungs.model import remat
from rungs.parallel.target_device import Target, trace_for
from rungs.planning import advice
from rungs.planning.memory import MemoryEstimates, memory_of
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.long import long_except
from tests.support.plan_cases import PlanCase, compiled_sizes
from tests.support.sharded_models import HYBRID

MODEL = model_config(vocab_size=800, context_length=64, emb_dim=64, n_layers=4, n_heads=4)


def run_of(mesh: Mesh, mode: str = "dp", **train: Any) -> RunConfig:
    sharding = {"mode": mode, **mesh.shape}
    split = {"microbatch_size": 16, "gradient_accumulation_steps": 2, "scan_unroll": 1}
    return RunConfig(MODEL, train_config(sharding=sharding, **{**split, **train}))


CASES = [
    (PlanCase("llama", "dots", "fsdp", 1, "bfloat16"), False),
    (PlanCase("gpt2", "none", "dp", 1, "float32"), True),
    (PlanCase("mixtral", "full", "fsdp", 4, "float32"), True),
    (PlanCase("gemma", "activations", "dp", 4, "bfloat16"), False),
    (PlanCase("deepseek", "dots", "fsdp", 1, "float32"), False),
    (PlanCase("gpt-oss", "full", "dp", 1, "bfloat16"), False),
    (PlanCase("hybrid", "dots", "fsdp", 1, "bfloat16"), False),
    (PlanCase("recipe", "dots", "fsdp", 4, "bfloat16"), True),
    (PlanCase("multi-token", "dots", "fsdp", 1, "bfloat16"), False),
]
"""Each with whether its loop over layers is unrolled."""


@pytest.mark.parametrize("case", long_except(CASES[:1], CASES), ids=str)
def test_total_is_as_near_the_compiled_step_as_it_says(
    case: tuple[PlanCase, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, is_unrolled = case
    if is_unrolled:
        monkeypatch.setattr(remat, "memory_bytes", lambda: math.inf)
    run = planned.run(scan_unroll="auto" if is_unrolled else 1)
    memory = memory_of(run, mesh_of(planned.data))
    arguments, total = compiled_sizes(run)
    assert memory.weights + memory.moments + memory.batch == pytest.approx(arguments, rel=0.01)
    assert memory.total == pytest.approx(total, rel=memory.error)


def test_a_device_may_have_a_single_sequence() -> None:
    """A loop over sequences of a hybrid keeps other arrays for one than for several."""
    keys = {"scan_unroll": 1, "sharding": {"mode": "fsdp", "data": 2, "tensor": 1}}
    model = model_config(**HYBRID, n_heads=4, feed_forward="swiglu")
    one, two = (
        memory_of(RunConfig(model, train_config(microbatch_size=rows, **keys)), mesh_of(2))
        for rows in (2, 4)
    )
    assert two.activations == 2 * one.activations > 0


def test_on_accelerators_each_device_of_dp_has_a_part_of_moments_and_of_one_gradient() -> None:
    mesh = mesh_of(8)
    several = run_of(mesh)
    single = run_of(mesh, microbatch_size=32, gradient_accumulation_steps=1)
    with trace_for(Target("gpu")):
        estimates = MemoryEstimates(several, mesh)
        whole, sharded = estimates.of(several), memory_of(single, mesh)
        assert estimates.of(single) == sharded
    weights = memory_of(several, mesh).weights
    assert whole.weights == sharded.weights == whole.accumulator == weights
    assert (whole.gradients, sharded.gradients) == (weights, weights // 8)
    assert whole.moments == sharded.moments == pytest.approx(2 * weights / 8, rel=0.01)
    assert sharded.accumulator == 0


@pytest.mark.long
@pytest.mark.usefixtures("shared_traces")
def test_each_edit_fits_and_keeps_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of(4)
    config = run_of(mesh, remat="none")
    needed = memory_of(config, mesh).total
    limit = needed * 11 // 20
    found = list(advice.edits(config, mesh, limit))
    assert [sorted(edit.keys) for edit in found][:2] == [
        ["gradient_accumulation_steps", "microbatch_size"],
        ["gradient_accumulation_steps", "microbatch_size", "remat"],
    ]
    for edit in found:
        keys = {**config.train.as_json(), **edit.keys}
        changed = RunConfig(MODEL, type(config.train).model_validate(keys))
        assert changed.train.sequences_per_step == config.train.sequences_per_step
        assert memory_of(changed, mesh) == edit.memory
        assert edit.memory.total <= limit
    monkeypatch.setattr(advice, "device_bytes", lambda _: limit)
    lines = advice.advice(config, mesh)
    assert lines[0].startswith("a step needs about ")
    assert "on each of 4 devices with " in lines[0]
    assert "these edits of train.json would fit, with the same global batch:" in lines
    least = limit
    while smaller := list(advice.edits(config, mesh, least - 1)):
        least = min(edit.memory.total for edit in smaller)
    monkeypatch.setattr(advice, "device_bytes", lambda _: 1.05 * least)
    assert any("would just fit, if at all" in line for line in advice.advice(config, mesh))
    monkeypatch.setattr(advice, "device_bytes", lambda _: 1_000_000)
    assert "no combination of microbatch_size and remat fits" in advice.advice(config, mesh)[-1]


@pytest.mark.long
def test_no_edit_suggests_a_mode_whose_mesh_does_not_divide_the_model() -> None:
    mesh = mesh_of(4)
    for width, is_offered in ((64, True), (66, False)):
        model = MODEL.model_copy(update={"emb_dim": width, "n_heads": 2})
        config = RunConfig(model, run_of(mesh, remat="none").train)
        found = list(advice.edits(config, mesh, memory_of(config, mesh).total * 2 // 5))
        assert found
        assert any("sharding" in edit.keys for edit in found) == is_offered
    # a microbatch of fewer sequences than devices is not offered either
    assert not list(advice.edits(config, mesh, memory_of(config, mesh).total * 3 // 10))


def test_other_errors_are_not_reported_as_out_of_memory() -> None:
    mesh = mesh_of(1)
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="something else"),
        advice.report_out_of_memory(run_of(mesh), mesh),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
