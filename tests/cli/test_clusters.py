"""Which processes train together: the options' mistakes, and the launchers' signs."""

from pathlib import Path

import pytest

from rungs.cli import start_command
from rungs.cli.start_command import Cluster, find_cluster
from rungs.common.errors import UserError

NOTHING = (None, None, None)


def test_without_launcher_variables_a_process_is_alone() -> None:
    assert find_cluster(*NOTHING, environment={}) is None


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, Cluster(None, 4)),
        # in a batch script, or after salloc, a command that srun did not start is one task
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, Cluster(None, 2)),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOBSET_NAME": "climb"}, Cluster()),
        ({"TPU_WORKER_HOSTNAMES": "t0,t1"}, Cluster()),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "t0"}, Cluster()),
    ],
)
def test_launchers_are_detected_by_their_variables(
    environment: dict[str, str], found: Cluster | None
) -> None:
    assert find_cluster(*NOTHING, environment=environment) == found


def test_a_tpu_virtual_machine_is_part_of_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = tmp_path / "accel0"
    monkeypatch.setattr(start_command, "_TPU_CHIPS", (str(chip),))
    monkeypatch.setattr(start_command.importlib.util, "find_spec", lambda name: name)
    assert find_cluster(*NOTHING, environment={}) is None
    chip.touch()
    assert find_cluster(*NOTHING, environment={}) == Cluster()


def test_options_override_launcher_variables() -> None:
    signs = {"SLURM_STEP_NUM_TASKS": "4"}
    assert find_cluster("host:1234", 2, 1, signs) == Cluster("host:1234", 2, 1)
    assert find_cluster("host:1234", 1, 0, signs) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("host:1234", 2, None), "--coordinator, --processes and --process: give all three"),
        ((None, None, 0), "--coordinator, --processes and --process: give all three"),
        (("host", 2, 0), "--coordinator host: give host:port"),
        (("host:port", 2, 0), "--coordinator host:port: give host:port"),
        (("host:0", 2, 0), "--coordinator host:0: give host:port"),
        (("host:65536", 2, 0), "--coordinator host:65536: give host:port"),
        (("host:1234", 0, 0), "--processes 0: must be at least 1"),
        (("host:1234", 2, 2), "--process 2: must be from 0 to 1"),
        (("host:1234", 2, -1), "--process -1: must be from 0 to 1"),
    ],
)
def test_invalid_options_are_refused(
    options: tuple[str | None, int | None, int | None], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        find_cluster(*options, environment={})
