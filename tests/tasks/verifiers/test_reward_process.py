"""A user's reward function that misbehaves in every way: one line each, and the next call works."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rungs.tasks.verifiers.reward_process import RewardProcess
from rungs.tasks.verifiers.verdict import Verdict

MEMORY_BYTES = 2**29
GOOD = "def reward(prompt, completion, answer, info):\n    "
LANDLOCK_CREATE_RULESET, VERSION = 444, 1
Start = Callable[..., RewardProcess]


def has_landlock() -> bool:
    """Return whether the kernel has Landlock with scoped signals (ABI 6)."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, VERSION) >= 6


@pytest.fixture
def start() -> Iterator[Start]:
    processes = []

    def start(body: str, seconds: float = 10, before: str = "") -> RewardProcess:
        text = before + GOOD + body.replace("\n", "\n    ")
        processes.append(RewardProcess("reward.py", text, seconds, MEMORY_BYTES))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def call(process: RewardProcess, completion: str = "c", **info: Any) -> Verdict:
    return process.reward("p", completion, "a", info)


@pytest.mark.parametrize(
    ("body", "rewards", "correct"),
    [
        ("return 1", {"reward": 1}, True),
        ("return True", {"reward": 1}, True),
        ("return 0.5", {"reward": 0.5}, False),
        ("return -2.5", {"reward": -2.5}, False),
        ('return {"format": 0.1, "answer": 1}', {"format": 0.1, "answer": 1}, True),
        ('return {"correct": 0, "style": 3}', {"correct": 0, "style": 3}, False),
        ("import numpy\nreturn numpy.float32(0.5)", {"reward": 0.5}, False),
        ("import numpy\nreturn {'x': numpy.array(2)}", {"x": 2}, True),
        ("return (prompt, completion, answer, info) == ('p', 'c', 'a', {})", {"reward": 1}, True),
    ],
)
def test_rewards(start: Start, body: str, rewards: dict[str, float], correct: bool) -> None:
    verdict = call(start(body))
    assert verdict == Verdict({name: float(reward) for name, reward in rewards.items()})
    assert verdict.correct is correct
    assert verdict.total == pytest.approx(sum(rewards.values()))


def test_texts_arrive_as_they_are(start: Start) -> None:
    text = "é\n\u2028\x00\ud800 𝄞" + "x" * 1_000_000  # more than a pipe holds
    process = start("return [ord(c) for c in completion] == info['codes']")
    assert call(process, text, codes=list(map(ord, text))).correct


BAD: dict[str, tuple[str, str, str]] = {
    "raises": ("error", "return 1 / (completion != 'bad')", "line 2: ZeroDivisionError: division"),
    "none": (
        "error",
        "return None if completion == 'bad' else 1",
        "returned NoneType, not a number",
    ),
    "text": ("error", "return 'x' if completion == 'bad' else 1", "returned str, not a number"),
    "list": ("error", "return [1] if completion == 'bad' else 1", "returned list, not a number"),
    "nan": (
        "error",
        "return float('nan') if completion == 'bad' else 1",
        "returned nan for reward",
    ),
    "infinity": ("error", "return {'x': 1e999 if completion == 'bad' else 1}", "inf for x"),
    "large": ("error", "return {'x': 1e308 if completion == 'bad' else 1}", "from -1e+12 to 1e+12"),
    "unnamed": (
        "error",
        "return {'\\ud800': 1} if completion == 'bad' else 1",
        "name can't be shown: '\\ud800'",
    ),
    "empty": ("error", "return {} if completion == 'bad' else 1", "without any reward"),
    "nested": ("error", "return {'x': {'y': 1} if completion == 'bad' else 1}", "for x"),
    "huge": ("error", "return 10**400 if completion == 'bad' else 1", "OverflowError"),
    "exits": (
        "error",
        "import sys\nif completion == 'bad': sys.exit(3)\nreturn 1",
        "SystemExit: 3",
    ),
    "dies": ("error", "import os\nif completion == 'bad': os._exit(3)\nreturn 1", "exit code 3"),
    "crashes": (
        "error",
        "import os\nif completion == 'bad': os.kill(os.getpid(), 11)\nreturn 1",
        "ended by SIGSEGV",
    ),
    "closes": (
        "error",
        "import os, time\nif completion == 'bad': os.closerange(0, 99); time.sleep(99)\nreturn 1",
        "closed the pipe",
    ),
    "floods": (
        "error",
        "import os\nif completion == 'bad':\n    for d in range(3, 9):\n"
        "        try: os.write(d, bytes(1 << 22))\n        except OSError: pass\nreturn 1",
        "answered more than",
    ),
    "recursion": (
        "error",
        "return 1 if completion != 'bad' else reward(prompt, completion, answer, info)",
        "RecursionError",
    ),
    "hangs": ("timeout", "while completion == 'bad': pass\nreturn 1", "took longer than 1 s"),
    "sleeps": (
        "timeout",
        "import time\nif completion == 'bad': time.sleep(99)\nreturn 1",
        "took longer",
    ),
    "holds the lock": ("timeout", "return 1 if completion != 'bad' else 9**9**9", "took longer"),
    "eats memory": (
        "out_of_memory",
        "kept = []\nwhile completion == 'bad': kept.append(bytearray(2**24))\nreturn 1",
        "more than verifier_memory_bytes",
    ),
    "forks": ("error", "import os\nif completion == 'bad': os.fork()\nreturn 1", "PermissionError"),
    "commands": (
        "error",
        "import subprocess\nif completion == 'bad': subprocess.run(['true'])\nreturn 1",
        "may not start processes",
    ),
    "pools": (
        "error",
        "import multiprocessing as m\n"
        "if completion == 'bad': m.get_context('spawn').Process(target=print).start()\nreturn 1",
        "may not start processes",
    ),
    "network": (
        "error",
        "import socket\n"
        "if completion == 'bad': socket.create_connection(('127.0.0.1', 9))\nreturn 1",
        "or use the network",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_gets_one_line_and_the_next_one_works(start: Start, name: str) -> None:
    status, body, message = BAD[name]
    process = start(body, seconds=1 if status == "timeout" else 10)
    assert call(process).correct
    bad = call(process, "bad")
    assert (bad.status, bad.rewards, bad.total, bad.correct) == (status, {}, 0, False)
    assert bad.message.startswith("reward.py: ")
    assert message in bad.message
    assert "\n" not in bad.message
    assert call(process).correct


def test_what_it_prints_and_reads_is_nothing_to_the_protocol(start: Start) -> None:
    process = start(
        "import os, sys\nprint('out' * 99999)\nsys.stderr.write('err' * 99999)\n"
        "os.write(1, b'{}\\n')\nreturn float(sys.stdin.read() == '')"
    )
    assert [call(process) for _ in range(3)] == [Verdict({"reward": 1})] * 3


@pytest.mark.parametrize("forged", [b"nonsense", b'{"value": 9.0}\n', b'\n0 {"value": 9.0}\n' * 2])
def test_what_it_writes_to_the_pipe_is_no_answer(start: Start, forged: bytes) -> None:
    process = start(
        "import os\nfor d in range(3, 9):\n    if completion == 'bad':\n"
        f"        try: os.write(d, {forged!r})\n        except OSError: pass\n"
        "return float(completion == 'bad')"
    )
    rewards = [call(process, completion).total for completion in ("bad", "c", "bad", "c", "c")]
    assert rewards == [1, 0, 1, 0, 0]


@pytest.mark.skipif(not has_landlock(), reason="needs Linux with Landlock")
def test_other_processes_are_out_of_reach(start: Start) -> None:
    for name in ("environ", "mem", "maps", "fd/0", "cwd"):
        body = f"with open('/proc/{os.getpid()}/{name}', 'rb') as file: file.read(1)\nreturn 1"
        assert "PermissionError" in call(start(body)).message, name
    kill = start(f"import os\nos.kill({os.getpid()}, 0)\nreturn 1")
    assert "PermissionError" in call(kill).message
    assert call(start("open('/proc/self/environ').read()\nreturn 1")).correct


def test_closing_the_standard_streams_is_harmless(start: Start) -> None:
    process = start("import os\nif info: os.close(0); os.close(1); os.close(2)\nreturn 1")
    assert call(process, closes=True).correct
    assert call(process).correct


def test_a_process_group_dies_with_a_call_that_hangs(start: Start, tmp_path: Path) -> None:
    process = start(
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nwhile 1: pass",
        1,
        "import os\n",
    )
    assert call(process).status == "timeout"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.long
def test_a_process_that_nobody_kills_ends_itself(start: Start) -> None:
    process = start("while 1: pass", seconds=0.5)
    process.start()
    requests, _ = process._process.pipes
    requests.write(b'{"prompt": "", "completion": "", "answer": "", "info": {}}\n')
    requests.flush()
    assert process._process.exit_code(60) == -signal.SIGALRM


def test_no_secrets_and_an_empty_folder_of_its_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    body = (
        "import os, sys\nassert os.listdir() == []\nassert 'secret' not in str(os.environ)\n"
        "assert 'PYTHONPATH' not in os.environ\nassert os.getcwd() == os.environ['HOME']\n"
        "assert not any('verifiers' in p or p in ('', 'elsewhere') for p in sys.path)\nreturn 1"
    )
    process = start(body)
    assert call(process) == Verdict({"reward": 1})
    folder = Path(process._folder.name)
    assert folder.is_dir()
    process.close()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def reward(:", "reward.py: SyntaxError"),
        ("x = 1", "reward.py: TypeError: has no function reward"),
        ("reward = 1", "has no function reward"),
        ("import no_such_module", "reward.py: line 1: ModuleNotFoundError"),
        ("raise SystemExit", "reward.py: line 1: SystemExit"),
        ("import os; os._exit(0)", "ended its process with exit code 0"),
        ("x = bytearray(2**40)", "more than verifier_memory_bytes"),
    ],
)
def test_code_that_cannot_be_loaded(code: str, message: str) -> None:
    process = RewardProcess("reward.py", code, 10, MEMORY_BYTES)
    try:
        assert message in process.start()
        assert call(process).status != "ok"
    finally:
        process.close()


@pytest.mark.parametrize(("failure", "next_call"), [("assert False", 3), ("while 1: pass", 1)])
def test_a_call_that_raises_does_not_cost_a_restart(
    start: Start, failure: str, next_call: int
) -> None:
    body = f"calls.append(completion)\nif completion == 'bad':\n    {failure}\nreturn len(calls)"
    process = start(body, 1, "calls = []\n")
    assert call(process).total == 1
    assert call(process, "bad").status != "ok"
    assert call(process).total == next_call


def test_sets_have_the_same_order_in_every_process(start: Start) -> None:
    body = "return list({'alpha', 'beta', 'gamma', 'delta', 'epsilon'}).index('alpha')"
    assert len({call(start(body)).total for _ in range(5)}) == 1


def test_a_process_that_does_not_start_is_told(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    verdict = call(start("return 1"))
    assert verdict.status == "error"
    assert verdict.message == "reward.py: its process did not start: No such file or directory"
