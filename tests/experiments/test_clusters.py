"""Experiments on a real Slurm of one machine, whose job is put back into the queue, and on a Ray
cluster of two nodes, of which one is lost: no run is lost, none is trained twice."""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rungs.common.errors import UserError
from rungs.experiments.clusters import Ray, Slurm, make_engine
from rungs.experiments.folder import ExperimentFolder
from rungs.run import metrics
from tests.support.simulated_runs import conduct, make_experiment

CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd.pid
SlurmdSpoolDir={state}/spool
StateSaveLocation={state}/state
SlurmUser=root
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
STEPS = 10


@pytest.fixture
def experiment(tmp_path: Path) -> ExperimentFolder:
    slow = {"slow": {"learning_rate": 0.0001}}
    changes = {"drop_rate": 0.0, "checkpoint_interval": 2}
    return make_experiment(
        tmp_path, variants=slow, seeds=2, budget={"steps": STEPS}, changes=changes
    )


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[None]:
    if not shutil.which("slurmctld"):
        pytest.skip("needs Debian's slurm-wlm and munge, and root")
    pytest.importorskip("submitit", reason="needs `uv run --extra slurm`")
    for folder in ("spool", "state"):
        (tmp_path / "slurm" / folder).mkdir(parents=True)
    config = CONFIG.format(host=socket.gethostname(), state=tmp_path / "slurm")
    Path("/etc/slurm/slurm.conf").write_text(config)
    subprocess.run(["mkdir", "-p", "/run/munge"], check=True)
    subprocess.run(["chown", "munge:", "/run/munge"], check=True)
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "munged --force"], check=True)
    daemons = [subprocess.Popen([name, "-D"]) for name in ("slurmctld", "slurmd")]
    yield
    for daemon in daemons:
        daemon.terminate()
        daemon.wait()


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def wait_for_steps(experiment: ExperimentFolder) -> None:
    while not any(path.stat().st_size for path in experiment.runs.glob("*/metrics.jsonl")):
        time.sleep(0.1)


def check(experiment: ExperimentFolder) -> None:
    for run in experiment.runs.iterdir():
        steps = [one.global_step for one in metrics.read(run / "metrics.jsonl")]
        assert steps == list(range(STEPS)), run
    assert len(experiment.ledger.read_text().splitlines()) == 5


@pytest.mark.usefixtures("slurm")
def test_a_job_that_slurm_queues_again_goes_on(experiment: ExperimentFolder) -> None:
    def requeue() -> None:
        wait_for_steps(experiment)
        running = ["squeue", "--noheader", "--states=R", "--format=%i"]
        jobs = subprocess.run(running, capture_output=True, text=True).stdout.split()
        subprocess.run(["scontrol", "requeue", jobs[0]])

    in_background(requeue)
    engine = Slurm(experiment.path / "jobs", {"timeout_min": 20, "cpus_per_task": 1})
    assert conduct(experiment, engine)[0] == 0
    check(experiment)


def test_runs_of_a_lost_node_are_trained_on_another(experiment: ExperimentFolder) -> None:
    ray = pytest.importorskip("ray", reason="needs `uv run --extra ray`")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    other = cluster.add_node(num_cpus=1)

    def lose() -> None:
        wait_for_steps(experiment)
        cluster.remove_node(other)

    in_background(lose)
    assert conduct(experiment, Ray(cluster.address, {"num_cpus": 1}))[0] == 0
    check(experiment)
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize(
    ("name", "workers", "options", "line"),
    [
        ("slurm", 2, {}, "--engine slurm decides how many runs"),
        ("local", 2, {"num_gpus": 1}, "--engine-option: needs --engine"),
    ],
)
def test_options_of_other_engines_are_refused(
    name: str, workers: int, options: dict[str, int], line: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=line):
        make_engine(name, workers, options, ExperimentFolder(tmp_path))
