"""Where the time of a run's steps goes: `train.py --profile`. Takes steps as training does, the
last ones under JAX's profiler, and keeps only its trace and a table."""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import click
import jax
from jax.profiler import ProfileData, ProfileOptions, StepTraceAnnotation
from jax.sharding import Mesh

from rungs.checkpointing.load import Start
from rungs.common import disk
from rungs.common.errors import RunFailure, UserError
from rungs.common.shown_text import align_columns, counted
from rungs.planning import profile
from rungs.planning.program import Module
from rungs.training.learner import DATA, NEVER, Inputs
from rungs.training.run_length import RunLength

_WARM_UP = 3
"""Steps before those that are profiled; the first one is compiled."""
TABLE_FILE = "parts.txt"
_TRACE = "*.xplane.pb"

log = logging.getLogger("rungs")


def check(start: Start, total_steps: int) -> None:
    """Raise UserError if too few steps are left to profile."""
    steps, left = start.options.profile, max(total_steps - start.first_step, 0)
    if steps is not None and left < _WARM_UP + steps:
        raise UserError(
            f"--profile {steps}: needs {_WARM_UP + steps} steps, and the run has"
            f" {left} left; --fresh profiles its first ones, and also changes nothing"
        )


def profile_steps(start: Start, inputs: Inputs[Any], mesh: Mesh, length: RunLength) -> None:
    """Create or restore model and optimizer and take steps. Write a trace of the last ones into the
    run folder, and print and write the table of their parts."""
    steps, folder = start.options.profile, start.run.profile
    assert steps is not None
    learner: Any = inputs.learner(start, mesh, ())  # a DatasetLearner, which has a program
    learner.log_start(start, mesh)
    first = start.first_step + _WARM_UP
    _take(learner, length, range(start.first_step, first))
    module = Module.parse(learner.program(first, length.learning_rate(first)))
    tracing = ProfileOptions()
    tracing.python_tracer_level = 0  # tracing every call would slow the host down
    with disk.writing(folder, "the trace"):
        earlier = set(folder.rglob(_TRACE))
        with jax.profiler.trace(str(folder), profiler_options=tracing):
            begin = time.perf_counter()
            _take(learner, length, range(first, first + steps))
            clock = time.perf_counter() - begin
        (file,) = set(folder.rglob(_TRACE)) - earlier
        trace = ProfileData.from_file(str(file))
        kernels = profile.kernels_in(trace, module)
        if not kernels:
            raise RunFailure(f"{file.parent}: has a trace, in which no kernel of the step is named")
        data = profile.host_seconds(trace, DATA)
        parts = profile.seconds_by_part(kernels, profile.part_by_name(module))
        table = _table(parts, steps, data, clock)
        disk.replace_file(folder / TABLE_FILE, table + "\n")
    click.echo(table)
    log.info(
        "%s profiled; nothing but %s was written. Open the .trace.json.gz in %s at"
        " https://ui.perfetto.dev, or %s with XProf",
        *(counted(steps, "step"), folder, file.parent, folder),
    )


def _table(parts: Mapping[str, float], steps: int, data: float, clock: float) -> str:
    """Return the milliseconds in a step of each part, of the data, which the host prepares beside
    the devices, and of the step. Arguments are seconds of all steps."""

    def row(name: str, seconds: float, share: str = "") -> tuple[str, str, str]:
        return name, f"{1e3 * seconds / steps:,.2f}", share

    total = sum(parts.values())
    rows = [("part", "ms a step", "share")]
    rows += [row(part, each, f"{each / total:.1%}") for part, each in parts.items()]
    rows += [
        row("sum of kernels", total),
        row("data, on the host", data),
        row("a step, by the clock", clock),
    ]
    return align_columns(rows)


def _take(learner: Any, length: RunLength, steps: Iterable[int]) -> None:
    """Take steps; read each while the next one runs, as training does."""
    unread: tuple[int, Any] | None = None
    for step in steps:
        with StepTraceAnnotation("train", step_num=step):
            taken = learner.take(step, NEVER, length.learning_rate(step))
            if unread is not None:
                learner.read(*unread)
            unread = step, taken
    if unread is not None:
        learner.read(*unread)
