"""All parts of the device check, in order."""

import datetime
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from rungs.common.errors import UserError, readable_line, reason
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.diagnostics.device_check import checkpoint, kernels, peaks, step, versions
from rungs.diagnostics.device_check.report import Figure, Report, as_rows
from rungs.diagnostics.device_check.step import RunningStep, StepTime
from rungs.optim.precision import resolve_compute_dtype
from rungs.parallel import jax_setup
from rungs.parallel.devices import create_run_mesh, recorded_sharding
from rungs.planning.hardware import device_of_kind
from rungs.planning.oom_advice import report_out_of_memory
from rungs.step.state import copy_bytes


def run_check(path: Path, config: RunConfig, folder: Path) -> Report:
    """Check the devices that a run would use. Prints each figure as soon as it is known.

    Args:
        path: of the run, which is not written to.
        folder: where checkpoints are written for a moment.

    Raises:
        UserError: the run does not fit the devices.
    """
    jax_setup.prepare(config.train, partial(copy_bytes, config))
    mesh = _create_mesh(path, config)
    jax_setup.settle(mesh.devices.flat[0].platform)
    begin, figures = time.perf_counter(), []
    for figure, row in as_rows(_figures(on_mesh(config, mesh), mesh, folder)):
        print(row, flush=True)
        figures.append(figure)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Report(str(path), created, time.perf_counter() - begin, figures)


def on_mesh(config: RunConfig, mesh: Mesh) -> RunConfig:
    """Fill in the compute dtype and the sizes of the sharding."""
    train = resolve_compute_dtype(config.train)
    sharding: ShardingConfig = recorded_sharding(train, mesh)
    return config._replace(train=train.model_copy(update={"sharding": sharding}))


def _create_mesh(path: Path, config: RunConfig) -> Mesh:
    try:
        return create_run_mesh(config.train, config.model, None)
    except ValueError as error:
        raise UserError.at(path, str(error)) from None


def _figures(config: RunConfig, mesh: Mesh, folder: Path) -> Iterator[Figure]:
    """Yield the figures of all parts. The step comes first, as devices count the most memory ever
    used."""
    yield from _or_failure(versions.PART, lambda: versions.figures(mesh))
    timed: list[StepTime] = []
    yield from _or_failure(step.PART, lambda: _of_step(config, mesh, folder, timed))
    repeated = partial(step.determinism, config, mesh)
    yield from _or_failure(step.REPEATED_PART, repeated)
    yield from _or_failure(peaks.PART, lambda: _of_peaks(config, mesh, timed))
    yield from _or_failure(kernels.PART, lambda: kernels.figures(step.dtypes(config)))


def _of_step(
    config: RunConfig, mesh: Mesh, folder: Path, timed: list[StepTime]
) -> Iterator[Figure]:
    """Yield the figures of the step and its checkpoint."""
    with report_out_of_memory(config, mesh):
        running = RunningStep.create(config, mesh)
        timed.append(StepTime(running))
    yield from timed[0].figures(running)
    yield from step.memory(running)
    yield from _or_failure(checkpoint.PART, lambda: checkpoint.figures(running, folder))
    step.release(running)


def _of_peaks(config: RunConfig, mesh: Mesh, timed: list[StepTime]) -> Iterator[Figure]:
    """Yield the peaks, and how much of them the step uses."""
    dtypes, hardware = step.dtypes(config), device_of_kind(mesh.devices.flat[0].device_kind)
    found = {}
    for figure in peaks.figures(mesh, dtypes, hardware):
        found[figure.name] = float(figure.value)
        yield figure
    if timed:
        share = timed[0].model_flops / found[f"matmul {dtypes[-1]}"]
        note = f"model FLOPs utilization (MFU) of matmul {dtypes[-1]}"
        yield Figure(peaks.PART, "share of peak in a step", share, "share", note=note)


def _or_failure(part: str, figures: Callable[[], Iterator[Figure]]) -> Iterator[Figure]:
    """Yield figures, and one that says why if they end with an error, so that the others follow."""
    try:
        yield from figures()
    except Exception as error:  # whatever a compiler, a driver or a disk raises
        yield Figure(part, "failed", "", problem=readable_line(reason(error)))
