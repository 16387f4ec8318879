"""Measuring the layers fits where the step fits: it needs no memory that the plan doesn't count."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from rungs.config.run_config import RunConfig
from rungs.inspect.watch import make_measurement
from rungs.objectives.table import objective_without_teacher
from rungs.parallel.sharding import Layout
from rungs.planning.compiled_step import needed_bytes
from rungs.step.state import AbstractState
from tests.support.configs import mesh_of
from tests.support.plan_cases import UNOPTIMIZED, PlanCase, compiled_sizes

FEW_TOKENS = {"microbatch_size": 2, "sequence_length": 32}
"""Weights and moments are most of the memory."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "changes"),
    [
        (PlanCase("llama", "dots", "dp", 4, "bfloat16"), {}),
        (PlanCase("recipe", "full", "dp", 2, "float32"), FEW_TOKENS),
    ],
    ids=str,
)
def test_a_measurement_needs_as_much_memory_as_the_step(
    case: PlanCase, changes: dict[str, Any]
) -> None:
    run, mesh = case.run(**changes), mesh_of(case.data)
    measured = needed_bytes(lower_measurement(run, mesh).compile(UNOPTIMIZED), "cpu")
    assert measured <= 1.01 * compiled_sizes(run)[1]


def lower_measurement(config: RunConfig, mesh: Mesh) -> Any:
    """Return the measurement of a run's step, traced without arrays, as `lower_step` does."""
    train = config.train
    state = AbstractState(config, 1, mesh)
    model = state.fill(state.weights, state.optimizer)  # type: ignore[arg-type]
    graph, arrays = nnx.split(model)
    measure = make_measurement(objective_without_teacher(train), train, mesh)
    shape = train.microbatches_per_step, train.microbatch_size, config.sequence_length
    batch = jax.ShapeDtypeStruct(
        shape, jnp.int32, sharding=NamedSharding(mesh, Layout(mesh).batch_spec(3))
    )
    return jax.jit(lambda arrays, *batch: measure(*nnx.merge(graph, arrays), *batch)).lower(
        arrays, batch, batch
    )
