"""A process that answers: its environment, its end, and starting it again."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rungs.common.helper_process import AnsweringProcess

ECHO = "import os, sys\nfor line in sys.stdin: print(line.strip(), dict(os.environ), flush=True)"
WITH_A_CHILD = """
import os, time
child = os.fork()
while not child: time.sleep(1)
print(child, flush=True)
time.sleep(600)
"""
Make = Callable[..., AnsweringProcess]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made = []

    def make(code: str, **environment: str) -> AnsweringProcess:
        (tmp_path / "program.py").write_text(code)
        made.append(AnsweringProcess(tmp_path / "program.py", environment))
        made[-1].start()
        return made[-1]

    yield make
    for process in made:
        process.end()


def ask(process: AnsweringProcess, line: str) -> str:
    requests, answers = process.pipes
    requests.write(f"{line}\n".encode())
    requests.flush()
    return answers.readline().decode()


def is_running(process: int) -> bool:
    """Whether a process has not ended; one that has may still be listed as a zombie."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_it_answers_with_an_environment_of_its_own_and_again_after_its_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    process = make(ECHO, NAME="value")
    answer = ask(process, "hello")
    assert answer.startswith("hello {")
    assert "'NAME': 'value'" in answer
    assert "secret" not in answer
    process.end()
    process.end()
    assert not process.is_started
    process.start()
    assert ask(process, "again").startswith("again")


def test_the_exit_code_is_told(make: Make) -> None:
    assert make("raise SystemExit(3)").exit_code(60) == 3
    assert make(ECHO).exit_code(0) is None


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_what_it_started_ends_with_it(make: Make) -> None:
    process = make(WITH_A_CHILD)
    child = int(process.pipes[1].readline())
    os.kill(child, 0)
    process.end()
    deadline = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)
