"""Which processes train a run together, as the command line or the cluster's launcher says it.

JAX is not imported here: a mistake in the options is told before that takes its seconds.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rungs.common.errors import UserError

_TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Set by the launcher of each task, to their number: Slurm's srun, Open MPI's mpirun."""
_SEVERAL = ("JOBSET_NAME", "MEGASCALE_COORDINATOR_ADDRESS")
"""Set in the pods of a Kubernetes JobSet, where its examples in docs/clusters.md do; and where
there are several slices of a TPU."""
_TPU_HOSTS = "TPU_WORKER_HOSTNAMES"
_TPU_CHIPS = ("/dev/accel0", "/dev/vfio/0")


class Cluster(NamedTuple):
    """The processes of a run, one or more on each host; what is None is found by JAX."""

    coordinator: str | None = None
    """Address and port of process 0."""
    processes: int | None = None
    process: int | None = None
    """The number of this one, from 0."""


def find_cluster(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    environment: Mapping[str, str] = os.environ,
) -> Cluster | None:
    """The processes that this one is to train with; None where it is alone.

    Args:
        coordinator, processes, process: as the command line gives them, all or none.
        environment: where the signs of Slurm, Open MPI, Kubernetes and TPUs are looked for.

    Raises:
        UserError: some of the options are missing, or do not go together.
    """
    given = (coordinator, processes, process)
    if coordinator is None or processes is None or process is None:
        if any(value is not None for value in given):
            raise UserError("--coordinator, --processes and --process: give all three, or none")
        return _launched(environment)
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--coordinator {coordinator}: give host:port, of process 0")
    if processes < 1:
        raise UserError(f"--processes {processes}: must be at least 1")
    if not 0 <= process < processes:
        raise UserError(f"--process {process}: must be from 0 to {processes - 1}")
    return Cluster(coordinator, processes, process) if processes > 1 else None


def _launched(environment: Mapping[str, str]) -> Cluster | None:
    """The processes that a launcher started, this one among them."""
    for variable in _TASK_COUNTS:
        if (count := environment.get(variable, "")).isdecimal():
            return Cluster(processes=int(count)) if int(count) > 1 else None
    is_among_others = any(variable in environment for variable in _SEVERAL)
    return Cluster() if is_among_others or _is_tpu_of_several_hosts(environment) else None


def _is_tpu_of_several_hosts(environment: Mapping[str, str]) -> bool:
    if _TPU_HOSTS in environment:
        return "," in environment[_TPU_HOSTS]
    has_library = importlib.util.find_spec("libtpu") is not None
    return has_library and any(Path(chip).exists() for chip in _TPU_CHIPS)
