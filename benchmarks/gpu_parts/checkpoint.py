"""How long a checkpoint of GPT-2 holds up training."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_parts.check_figures import converted
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.gpu_parts.step_variants import config_of
from rungs.checks.device import on_mesh
from rungs.checks.device_step import RunningStep, checkpoint
from rungs.parallel import jax_setup
from rungs.parallel.sharding import one_device


def figures(setting: Setting) -> Iterator[Figure]:
    run = config_of({}, setting)
    jax_setup.prepare(run.train, lambda: 0)
    mesh = one_device()
    jax_setup.settle(mesh.devices.flat[0].platform)
    step = RunningStep.create(on_mesh(run, mesh), mesh)
    step.run(1)
    with tempfile.TemporaryDirectory() as folder:
        yield from converted(checkpoint(step, Path(folder)))
