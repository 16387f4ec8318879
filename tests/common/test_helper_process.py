"""Programs that run beside training: priority, session, start and end."""

import errno
import os
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from rungs.common import helper_process
from rungs.common.helper_process import (
    ENDED,
    KILLED,
    LOWEST,
    HelperProcess,
    process_executor,
    receive,
    restore_priority,
    start_python,
)
from rungs.common.signals import StopSignal

AUTOGROUP = Path("/proc/self/autogroup")
SHOW = "import os, pathlib, sys; sys.stdin.readline(); {what}; print(text, file=sys.stderr)"


def shown(what: str) -> str:
    """Return what a program prints, which waits until it is started and has its priority."""
    process = start_python(["-c", SHOW.format(what=what)], {"OWN": "here"})
    _, text = process.communicate("\n")
    return text.strip()


def test_it_has_the_lowest_priority_and_this_process_keeps_its_own() -> None:
    before = os.nice(0)
    assert shown("text = os.nice(0)") == f"{LOWEST}"
    assert os.nice(0) == before


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no autogroups")
def test_its_session_has_the_lowest_priority_too() -> None:
    before = AUTOGROUP.read_text()
    assert shown(f"text = pathlib.Path('{AUTOGROUP}').read_text()").endswith(f"nice {LOWEST}")
    assert AUTOGROUP.read_text() == before


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel has no autogroups")
@pytest.mark.parametrize(
    ("own", "expected"),
    [("/autogroup-801 nice 3\n", "3"), ("", "0")],
    ids=["niceness 3", "first session"],
)
def test_its_session_can_get_the_priority_of_this_one_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, expected: str
) -> None:
    what = f"text = pathlib.Path('{AUTOGROUP}').read_text()"
    process = start_python(["-c", SHOW.format(what=what)], {})
    autogroup = tmp_path / "self" / "autogroup"
    autogroup.parent.mkdir()
    autogroup.write_text(own)
    (tmp_path / f"{process.pid}").symlink_to(f"/proc/{process.pid}")
    monkeypatch.setattr(helper_process, "_AUTOGROUP", f"{tmp_path}/{{}}/autogroup")
    restore_priority(process)
    _, text = process.communicate("\n")
    assert text.split()[-1] == expected


def test_another_change_of_priority_just_before_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Linux refuses what comes too soon, except from root."""
    refusals = [BlockingIOError(errno.EAGAIN, "too soon")] * 2
    autogroup, write = tmp_path / "autogroup", Path.write_text

    def write_or_refuse(path: Path, text: str, encoding: str) -> int:
        if refusals:
            raise refusals.pop()
        return write(path, text, encoding)

    monkeypatch.setattr(Path, "write_text", write_or_refuse)
    helper_process._set_group_priority(autogroup, LOWEST)
    assert autogroup.read_text() == f"{LOWEST}"


def test_it_has_a_session_of_its_own_and_this_environment() -> None:
    assert int(shown("text = os.getsid(0)")) != os.getsid(0)
    assert shown("text = os.environ['OWN']") == "here"
    assert shown("import rungs; text = sys.executable") == sys.executable


@pytest.mark.parametrize(("sent", "last"), [(["new\n", ENDED], ENDED), (["new\n"], KILLED)])
def test_the_last_line_says_whether_training_ended_or_was_killed(
    sent: list[str], last: str
) -> None:
    received = receive(sent)
    assert [received.get(timeout=60), received.get(timeout=60)] == ["new\n", last]


def test_a_process_starts_with_the_first_line() -> None:
    process = HelperProcess("test", "json.tool")  # which reads its input
    assert process.finish(StopSignal(), "nothing")
    process.kill()
    assert not process.is_started
    process.send("line")
    assert process.is_started
    process.kill()
    assert not process.is_started


class _TwoArgumentsError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one}, {two}")


def _raise_what_can_not_be_sent() -> None:
    raise _TwoArgumentsError("one", "two")


def test_a_function_in_its_own_process_ends_with_the_block() -> None:
    def interrupted() -> None:
        with process_executor() as executor:
            executor.submit(os.getpid).result()
            executor.submit(time.sleep, 600)
            raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - begun < 300


def test_a_crash_differs_from_an_error_that_can_not_be_sent() -> None:
    with pytest.raises(BrokenProcessPool) as crash, process_executor() as executor:
        executor.submit(os.abort).result()
    with pytest.raises(BrokenProcessPool) as error, process_executor() as executor:
        executor.submit(_raise_what_can_not_be_sent).result()
    assert (crash.value.__cause__ is None, error.value.__cause__ is None) == (True, False)
