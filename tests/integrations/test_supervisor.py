"""Starting again after a crash."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rungs.common import helper_process
from rungs.integrations.supervisor import supervise
from rungs.run import records
from rungs.run.folder import RunFolder
from rungs.run.records import Event

COUNT = """
import os, sys, pathlib
log = pathlib.Path(sys.argv[1]); log.open("a").write(" ".join(sys.argv[2:]) + "\\n")
number = len(log.read_text().splitlines())
code = [{codes}][min(number, {length}) - 1]
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_process, "FIRST_DELAY", 0.01)


def program(folder: Path, *codes: int) -> tuple[list[str], Path]:
    """Return a command that ends with each of these codes in turn, and the file in which it notes
    its arguments."""
    path, log = folder / "program.py", folder / "log"
    path.write_text(COUNT.format(codes=", ".join(map(str, codes)), length=len(codes)))
    return [str(path), str(log)], log


@pytest.mark.parametrize(
    ("codes", "starts", "expected"),
    [
        ((0,), 1, 0),
        ((2,), 1, 2),
        ((130,), 1, 130),
        ((1, -signal.SIGKILL, -signal.SIGSEGV, 0), 4, 0),
        ((1, 1, 1, 1, 1), 4, 1),
        ((-signal.SIGKILL,), 4, 137),
    ],
)
def test_only_crashes_are_started_again(
    codes: tuple[int, ...], starts: int, expected: int, tmp_path: Path
) -> None:
    arguments, log = program(tmp_path, *codes)
    assert supervise(arguments, RunFolder(tmp_path), (), 3) == expected
    assert len(log.read_text().splitlines()) == starts
    killed = [
        event for event in records.read(RunFolder(tmp_path), Event) if "killed by" in event.text
    ]
    assert len(killed) == sum(code < 0 for code in (codes * 4)[:starts])


def test_a_run_starts_over_until_a_start_has_changed_it_and_only_once(tmp_path: Path) -> None:
    """A start that was killed before it moved anything aside did not start over."""
    arguments, log = program(tmp_path, 1, 1, 0)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "20260101Z000000-step-000009").mkdir(parents=True)
    new = checkpoints / "20260102Z000000-step-000000"
    saving = f"if number == 2: pathlib.Path({str(new)!r}).mkdir()"
    script = Path(arguments[0])
    script.write_text(script.read_text().replace("code =", f"{saving}\ncode ="))
    options = ["--fresh", "--supervise", "--max-restarts", "3", "--from=best", "--quiet"]
    supervise([*arguments, *options], RunFolder(tmp_path), (), 3)
    first = "--fresh --from=best --quiet"
    assert log.read_text().splitlines() == [first, first, "--quiet"]


def test_a_new_checkpoint_starts_the_count_anew(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        "import pathlib, sys\nfolder = pathlib.Path(sys.argv[1])\n"
        "number = len(list(folder.iterdir()))\n"
        "(folder / f'20260101Z000000-step-{number:06d}').mkdir()\n"
        "sys.exit(0 if number == 6 else 1)\n"
    )
    run = RunFolder(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    assert supervise([str(path), str(run.checkpoints)], run, (), 1) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_handed_on(number: signal.Signals, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    (tmp_path / "program.py").write_text(
        "import pathlib, signal, sys, time\n"
        f"signal.signal({number:d}, lambda *_: sys.exit(128 + {number:d}))\n"
        f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)\n"
    )
    (tmp_path / "supervise.py").write_text(
        "import sys\nfrom rungs.integrations.supervisor import supervise\n"
        "from rungs.run.folder import RunFolder\nfrom pathlib import Path\n"
        "sys.exit(supervise(sys.argv[1:], RunFolder(Path()), (), 3))\n"
    )
    process = subprocess.Popen(
        [sys.executable, tmp_path / "supervise.py", tmp_path / "program.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.DEVNULL,
    )
    while not ready.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
