"""Find the processes that train a run together, from the command line or the cluster's launcher;
without JAX, so that wrong options are reported at once."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rungs.common.errors import UserError

_TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Variables of Slurm's srun and Open MPI's mpirun with the number of processes."""
_MOST_PROCESSES = 1_000_000
_MULTI_PROCESS = ("JOBSET_NAME", "MEGASCALE_COORDINATOR_ADDRESS")
"""Set in pods of a Kubernetes JobSet as in docs/clusters.md, and with several TPU slices."""
_TPU_HOSTS = "TPU_WORKER_HOSTNAMES"
_TPU_CHIPS = ("/dev/accel0", "/dev/vfio/0")


class Cluster(NamedTuple):
    """The processes of a run, one or more per host. JAX detects values that are None."""

    coordinator: str | None = None
    """host:port of process 0."""
    processes: int | None = None
    process: int | None = None
    """Index of this process, from 0."""


def find_cluster(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    environment: Mapping[str, str] = os.environ,
) -> Cluster | None:
    """Return the processes that this one trains with, from the three options or the variables of
    Slurm, Open MPI, Kubernetes and TPUs; None for one process. Raises UserError for wrong
    options."""
    given = (coordinator, processes, process)
    if coordinator is None or processes is None or process is None:
        if any(value is not None for value in given):
            raise UserError("--coordinator, --processes and --process: give all three, or none")
        return _detect(environment)
    host, _, port = coordinator.rpartition(":")
    if not host or port not in map(str, range(1, 2**16)):
        raise UserError(f"--coordinator {coordinator}: give host:port of process 0")
    if not 1 <= processes <= _MOST_PROCESSES:
        raise UserError(f"--processes {processes}: must be from 1 to {_MOST_PROCESSES}")
    if not 0 <= process < processes:
        raise UserError(f"--process {process}: must be from 0 to {processes - 1}")
    return Cluster(coordinator, processes, process) if processes > 1 else None


def _detect(environment: Mapping[str, str]) -> Cluster | None:
    """Return the processes that a launcher started, including this one."""
    for variable in _TASK_COUNTS:
        if (count := environment.get(variable, "")).isdecimal():
            return Cluster(processes=int(count)) if int(count) > 1 else None
    is_multi_process = any(variable in environment for variable in _MULTI_PROCESS)
    if _TPU_HOSTS in environment:
        has_hosts = "," in environment[_TPU_HOSTS]
    else:
        has_library = importlib.util.find_spec("libtpu") is not None
        has_hosts = has_library and any(Path(chip).exists() for chip in _TPU_CHIPS)
    return Cluster() if is_multi_process or has_hosts else None
