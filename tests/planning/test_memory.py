"""The planned memory of a step, against the compiler's analysis of the compiled step."""

import math
from typing import Any, get_args

import jax
import pytest
from jax.sharding import Mesh

from rungs.config.optimization_config import Remat
from rungs.config.run_config import RunConfig
from rungs.model import remat
from rungs.parallel.sharding import TOKEN_AXES, size_along
from rungs.parallel.target_device import Target, trace_for
from rungs.planning import memory
from rungs.planning.compiled.step import lower_step
from rungs.planning.memory import MemoryEstimates, advice, edits, memory_of
from rungs.step.state import shapes_of
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.plan_cases import FAMILIES, UNOPTIMIZED, PlanCase, cases, compiled_bytes

MODEL = model_config(vocab_size=800, context_length=64, emb_dim=64, n_layers=4, n_heads=4)
WIDER = MODEL.model_copy(update={"emb_dim": 256})
"""So large that what the compiler allocates beside the arrays is small."""


def run_of(mesh: Mesh, mode: str = "dp", **train: Any) -> RunConfig:
    sharding = {"mode": mode, **mesh.shape}
    split = {"microbatch_size": 16, "gradient_accumulation_steps": 2, "scan_unroll": 1}
    return RunConfig(MODEL, train_config(sharding=sharding, **{**split, **train}))


def compiled(config: RunConfig, mesh: Mesh) -> tuple[int, int]:
    """Return the bytes on each device of the arguments without the batch, and of temporaries."""
    analysis = lower_step(config, mesh).compile(UNOPTIMIZED).compiled.memory_analysis()
    batch_bytes = 2 * 4 * 2 * 16 * 64 // size_along(mesh, *TOKEN_AXES)
    return analysis.argument_size_in_bytes - batch_bytes, analysis.temp_size_in_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "data", "last", "remat"),
    [
        ("fsdp_tp", 4, 2, "full"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                *(("dp", 1, 1, remat) for remat in get_args(Remat)),
                ("fsdp", 8, 1, "none"),
                ("tp", 1, 4, "none"),
                *(("cp", 2, 4, remat) for remat in get_args(Remat)),
            )
        ),
    ],
)
def test_memory_matches_the_compiler(mode: str, data: int, last: int, remat: str) -> None:
    mesh = mesh_of(data, last, mode)
    config = run_of(mesh, mode, remat=remat)._replace(model=WIDER)
    memory = memory_of(config, mesh)
    state, temporary = compiled(config, mesh)
    assert memory.weights + memory.moments == pytest.approx(state, rel=0.01)
    counted = memory.total - memory.weights - memory.moments - memory.batch
    assert counted + state == pytest.approx(temporary + state, rel=0.1)
    assert memory.accumulator == memory.weights


QUICK = [PlanCase("llama", "dots", "dp", 4, "bfloat16")]
REST = [case for family in FAMILIES for case in cases(family) if case not in QUICK]


@pytest.mark.long
@pytest.mark.parametrize(
    "case", QUICK + [pytest.param(case, marks=pytest.mark.long) for case in REST], ids=str
)
def test_total_is_within_a_tenth_of_the_compiled_step(case: PlanCase) -> None:
    run = case.run()
    total = memory_of(run, mesh_of(case.data)).total
    assert total == pytest.approx(compiled_bytes(run), rel=0.1)


UNROLLED = [case for family in FAMILIES for case in cases(family) if case.remat == "none"]


@pytest.mark.long
@pytest.mark.parametrize("case", UNROLLED, ids=str)
def test_total_of_unrolled_layers_is_within_the_stated_error(
    case: PlanCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remat, "memory_bytes", lambda: math.inf)
    run = case.run(scan_unroll="auto", sharding={"mode": "dp", "data": 1})
    memory = memory_of(run, mesh_of(1))
    assert memory.error == (0.2 if run.model.n_layers else 0.1)
    assert memory.total == pytest.approx(compiled_bytes(run), rel=memory.error)


def test_estimates_of_other_microbatches_match_new_ones() -> None:
    mesh = mesh_of(1)
    estimates = MemoryEstimates(run_of(mesh), mesh, ["none"])
    halved = run_of(mesh, microbatch_size=8, gradient_accumulation_steps=4)
    assert estimates.of(halved) == memory_of(halved, mesh)


def test_on_accelerators_each_device_of_dp_has_a_part_of_moments_and_of_one_gradient() -> None:
    mesh = mesh_of(8)
    several = run_of(mesh)
    single = run_of(mesh, microbatch_size=32, gradient_accumulation_steps=1)
    with trace_for(Target("gpu")):
        estimates = MemoryEstimates(several, mesh, ["none"])
        whole, sharded = estimates.of(several), memory_of(single, mesh)
        assert estimates.of(single) == sharded
    weights = memory_of(several, mesh).weights
    assert whole.weights == sharded.weights == whole.accumulator == weights
    layers = sum(math.prod(shape) for name, shape in shapes_of(MODEL).items() if "blocks" in name)
    assert (whole.gradients, sharded.gradients) == (4 * layers, 4 * layers // 8)
    assert whole.moments == sharded.moments == pytest.approx(2 * weights / 8, rel=0.01)
    assert sharded.accumulator == 0


def test_only_logits_and_gradients_grow_with_the_vocabulary() -> None:
    mesh = mesh_of(1)
    config = run_of(mesh)
    wider = RunConfig(config.model.model_copy(update={"vocab_size": 1600}), config.train)
    one, other = memory_of(config, mesh), memory_of(wider, mesh)
    more, tokens, width = 800, 16 * 64, 64
    # logits and exponentials, the head's gradient in the loss, gradients of embedding and head
    assert other.logits - one.logits == more * (2 * tokens + 3 * width) * 4
    # gradients of embedding and head, and copies of them
    assert other.layer - one.layer == more * 4 * width * 4
    assert one.logits >= 2 * tokens * 800 * 4
    assert other.activations == pytest.approx(one.activations, rel=0.01)


@pytest.mark.long
def test_each_edit_fits_and_keeps_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of(4)
    config = run_of(mesh, remat="none")
    needed = memory_of(config, mesh).total
    limit = needed * 11 // 20
    found = list(edits(config, mesh, limit))
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
    monkeypatch.setattr(memory, "device_bytes", lambda _: limit)
    lines = advice(config, mesh)
    assert lines[0].startswith("a step needs about ")
    assert "on each of 4 devices with " in lines[0]
    assert "these edits of train.json would fit, with the same global batch:" in lines
    monkeypatch.setattr(memory, "device_bytes", lambda _: 1_000_000)
    assert "no combination of microbatch_size and remat fits" in advice(config, mesh)[-1]


@pytest.mark.long
@pytest.mark.parametrize(("target", "is_short"), [("cpu", False), ("cpu", True), ("gpu", False)])
def test_each_edit_names_the_loop_that_the_device_would_not_choose(
    target: str, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start has the concrete values of "auto", but `train.json` does not."""
    mesh = mesh_of(1)
    asked = run_of(mesh, scan_unroll="auto")
    if is_short:  # too little memory to unroll layers, unless the microbatch is halved
        kept = remat._kept_bytes(asked.train, MODEL)
        monkeypatch.setattr(remat, "memory_bytes", lambda: 1.5 * kept)
    with trace_for(Target(target, "9.0")):
        chosen = remat.layer_loop(asked.train, MODEL)
        assert chosen.unroll == (1 if is_short else 4)
        started = asked.train.model_copy(update=chosen.as_keys())
        config = RunConfig(MODEL, started)
        found = list(edits(config, mesh, memory_of(config, mesh).total * 0.8))
        assert found
        for edit in found:
            changed = type(started).model_validate({**asked.train.as_json(), **edit.keys})
            assert memory_of(RunConfig(MODEL, changed), mesh) == edit.memory
            assert target == "cpu" or "scan_unroll" not in edit.keys


@pytest.mark.long
def test_no_edit_suggests_a_mode_whose_mesh_does_not_divide_the_model() -> None:
    mesh = mesh_of(4)
    for width, is_offered in ((64, True), (66, False)):
        model = MODEL.model_copy(update={"emb_dim": width, "n_heads": 2})
        config = RunConfig(model, run_of(mesh, remat="none").train)
        found = list(edits(config, mesh, memory_of(config, mesh).total * 2 // 5))
        assert found
        assert any("sharding" in edit.keys for edit in found) == is_offered
    # a microbatch of fewer sequences than devices is not offered either
    assert not list(edits(config, mesh, memory_of(config, mesh).total * 3 // 10))


def test_other_errors_are_not_reported_as_out_of_memory() -> None:
    mesh = mesh_of(1)
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="something else"),
        memory.report_out_of_memory(run_of(mesh), mesh),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
