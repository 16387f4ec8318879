"""Compile the steps of `scaling.py` for many virtual devices: `compile_programs.py DEVICES A`.

Prints a line of JSON for each case: what the program of A microbatches sends, the seconds to
compile it, and the most memory that this process has had.
"""

import json
import resource
import socket
import sys
import time

import jax

from benchmarks.device_scaling.cases import ScalingCase, cases
from rungs.parallel.sharding import create_mesh
from rungs.planning.compiled_step import lower_step
from rungs.planning.program import collectives, summary

DTYPE = "float16"
"""XLA's CPU compiler sends bfloat16 as float32, but leaves float16, which is as wide."""
COMPILER_OPTIONS: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
"""Quick to compile; the programs are never run, and their collectives are the same."""


def main() -> None:
    devices, microbatches = map(int, sys.argv[1:])
    create_devices(devices)
    for case in cases(devices):
        if case.layout.problems(case.run(microbatches).model):
            continue
        begin = time.perf_counter()
        sent = sent_by_program(case, microbatches)
        seconds = time.perf_counter() - begin
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        line = {"case": vars(case), "sent": sent, "seconds": seconds, "memory_gigabytes": memory}
        print(json.dumps(line), flush=True)


def create_devices(count: int) -> None:
    """Create virtual CPU devices. XLA compiles for 4,096 of them only in a process that has joined
    a cluster, even one of a single process; for 2,048 in any."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=1, process_id=0)


def sent_by_program(case: ScalingCase, microbatches: int) -> list[tuple[str, tuple[str, ...], int]]:
    """Return kind, mesh axes and bytes of the collectives in a compiled step."""
    mesh = create_mesh((case.data, case.tensor))
    compiled = lower_step(case.run(microbatches, DTYPE), mesh).compile(COMPILER_OPTIONS)
    return [(one.kind, one.axes, one.moved_bytes) for one in summary(collectives(compiled), mesh)]


if __name__ == "__main__":
    main()
