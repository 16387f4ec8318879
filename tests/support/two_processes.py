"""Two processes that train one run together over the loopback interface."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from rungs.run import metrics
from rungs.run.folder import RunFolder
from tests.support.committed_runs import ROOT
from tests.support.tiny_run import command

TIMEOUT_SECONDS = 900
"""Long enough for a very busy machine."""
FAULTY_TRAIN = str(ROOT / "tests" / "faults" / "faulty_train.py")


class TwoProcesses:
    """The two processes of a run.

    Args:
        faults: a fault to inject into each process; empty for none.
    """

    def __init__(self, run: RunFolder, datasets_dir: Path, faults: tuple[str, ...] = ()) -> None:
        self._run = run
        port = free_port()
        self._output_files = [
            run.path.with_name(f"{run.path.name}-{n}.txt").open("w+") for n in (0, 1)
        ]
        self.processes = [
            subprocess.Popen(
                [
                    *_with(faults[number] if faults else "", command(run, datasets_dir)),
                    *("--coordinator", f"127.0.0.1:{port}"),
                    *("--processes", "2", "--process", str(number)),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
            for number, output in enumerate(self._output_files)
        ]

    def wait_for_step(self, step: int) -> None:
        """Wait until the metrics have the step."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (self._run.metrics.exists() and len(metrics.read(self._run.metrics)) > step):
            assert time.monotonic() < deadline, self.outputs()
            assert all(process.poll() is None for process in self.processes), self.outputs()
            time.sleep(0.05)

    def exit_codes(self, seconds: float = TIMEOUT_SECONDS) -> list[int]:
        """Wait for both processes to end and return their exit codes."""
        return [process.wait(seconds) for process in self.processes]

    def outputs(self) -> list[str]:
        """Return what each process has printed."""
        for output in self._output_files:
            output.seek(0)
        return [output.read() for output in self._output_files]


@contextlib.contextmanager
def two_processes(
    run: RunFolder, datasets_dir: Path, faults: tuple[str, ...] = ()
) -> Iterator[TwoProcesses]:
    both = TwoProcesses(run, datasets_dir, faults)
    try:
        yield both
    finally:
        for process in both.processes:
            process.kill()
            process.wait()


def _with(fault: str, command: list[str]) -> list[str]:
    python, script, *arguments = command
    return [python, FAULTY_TRAIN, fault, *arguments] if fault else [python, script, *arguments]


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


def train_to_end(run: RunFolder, datasets_dir: Path, faults: tuple[str, ...] = ()) -> None:
    with two_processes(run, datasets_dir, faults) as both:
        assert both.exit_codes() == [0, 0], both.outputs()
