"""Steps of several variants in one process, that take turns: `variants_side.py SETTING`.

Reads lines of JSON from stdin: ["start", variant] compiles a variant's step and answers what it is,
or why it failed;
["run", variant, steps] takes steps and answers with the last one's loss.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.setting import ROOT, Setting
from benchmarks.gpu_parts.step_variants import Changes, compiler_options, parse_variant
from rungs.common.errors import readable_line


def main() -> None:
    setting = Setting.from_json(sys.argv[1])
    steps: dict[str, Any] = {}
    for line in sys.stdin:
        request, variant, *count = json.loads(line)
        if request == "start":
            try:
                steps[variant] = compiled(*parse_variant(variant), setting)
                answer = described(steps[variant])
            except Exception as error:  # whatever a compiler or a driver raises
                answer = {"failed": readable_line(f"{type(error).__name__}: {error}")}
            print(json.dumps(answer), flush=True)
        else:
            print(json.dumps(steps[variant].run(*count)[-1]), flush=True)


def _first(*names: str) -> Any:
    """Import the first of these modules that the checkout has; earlier versions had other names."""
    for name in names:
        if importlib.util.find_spec(name.rpartition(".")[0]) and importlib.util.find_spec(name):
            return importlib.import_module(name)
    raise ImportError(f"none of {', '.join(names)}")


def compiled(checkout: Path, changes: Changes, setting: Setting) -> Any:
    """Compile a variant's step, with the code of a checkout."""
    with code_of(checkout):
        jax_setup = importlib.import_module("rungs.parallel.jax_setup")
        check = _first("rungs.checks.device", "rungs.smoke_tests.device_check.check")
        step = _first("rungs.checks.device_step", "rungs.smoke_tests.device_check.step")
        flags = _first("rungs.parallel.gpu_settings", "rungs.parallel.compiler_flags")
        one_device = importlib.import_module("rungs.parallel.sharding").one_device
        variants = importlib.reload(importlib.import_module("benchmarks.gpu_parts.step_variants"))
        run = variants.config_of(changes, setting, checkout)
        options = flags.gpu_options(run.train.microbatches_per_step)
        jax_setup.prepare(run.train, lambda: 0)
        mesh = one_device()
        if mesh.devices.flat[0].platform != "gpu":
            options = {}
        run = check.on_mesh(run, mesh)
        return step.RunningStep.create(run, mesh, **options | compiler_options(changes))


@contextmanager
def code_of(checkout: Path) -> Iterator[None]:
    """Import Rungs from a checkout within the context."""
    if checkout == ROOT:
        yield
        return
    own = {name: sys.modules.pop(name) for name in list(sys.modules) if is_of_rungs(name)}
    sys.path.insert(0, str(checkout))
    try:
        yield
    finally:
        sys.path.remove(str(checkout))
        for name in filter(is_of_rungs, list(sys.modules)):
            del sys.modules[name]
        sys.modules.update(own)


def is_of_rungs(module: str) -> bool:
    return module.partition(".")[0] == "rungs"


def described(step: Any) -> dict[str, Any]:
    """Return what a step costs, and what the device could do."""
    from rungs.planning.flops import model_flops_per_token
    from rungs.planning.hardware import device_of_kind
    from rungs.step.state import shapes_of

    run, device = step.config, step.mesh.devices.flat[0]
    hardware = device_of_kind(device.device_kind)
    shapes = shapes_of(run.model)
    return {
        "bytes": step.compiled_bytes(),
        "tokens": run.tokens_per_step,
        "microbatch": run.train.microbatch_size,
        "flops_per_token": model_flops_per_token(shapes, run.model, run.sequence_length),
        "published_peak": hardware.flops if hardware else None,
    }


if __name__ == "__main__":
    main()
