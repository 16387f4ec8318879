"""Two processes over loopback that train one run together."""

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

PATIENCE_SECONDS = 900
"""No promise: for a machine with much else to do."""
FAULTY_TRAIN = str(ROOT / "tests" / "faults" / "faulty_train.py")


class Together:
    """Two processes of a run, with what they print.

    Args:
        faults: put into each from outside, where there are some.
    """

    def __init__(self, run: RunFolder, datasets_dir: Path, faults: tuple[str, ...] = ()) -> None:
        self._run = run
        port = free_port()
        self._outputs = [run.path.with_name(f"{run.path.name}-{n}.txt").open("w+") for n in (0, 1)]
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
            for number, output in enumerate(self._outputs)
        ]

    def wait_for_step(self, step: int) -> None:
        """Until the metrics have the step."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (self._run.metrics.exists() and len(metrics.read(self._run.metrics)) > step):
            assert time.monotonic() < deadline, self.said()
            assert all(process.poll() is None for process in self.processes), self.said()
            time.sleep(0.05)

    def exit_codes(self, seconds: float = PATIENCE_SECONDS) -> list[int]:
        """Of both, once they have ended."""
        return [process.wait(seconds) for process in self.processes]

    def said(self) -> list[str]:
        """What each printed."""
        for output in self._outputs:
            output.seek(0)
        return [output.read() for output in self._outputs]


@contextlib.contextmanager
def together(
    run: RunFolder, datasets_dir: Path, faults: tuple[str, ...] = ()
) -> Iterator[Together]:
    both = Together(run, datasets_dir, faults)
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


def finish(run: RunFolder, datasets_dir: Path) -> None:
    with together(run, datasets_dir) as both:
        assert both.exit_codes() == [0, 0], both.said()
