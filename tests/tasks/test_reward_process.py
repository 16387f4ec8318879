"""A user's reward function that misbehaves in every way: one line each, and the next call works."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rungs.tasks.code_process import Code
from rungs.tasks.task import Verdict
from rungs.tasks.verifier import RewardProcess

MEMORY_BYTES = 2**29
GOOD = "def reward(prompt, completion, answer, info):\n    "
Start = Callable[..., RewardProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    processes = []

    def start(body: str, seconds: float = 10, before: str = "") -> RewardProcess:
        text = before + GOOD + body.replace("\n", "\n    ")
        code = Code("reward.py", text, "reward", seconds, MEMORY_BYTES)
        processes.append(RewardProcess(code))
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
        ("return 0.5", {"reward": 0.5}, False),
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
    "raises": ("error", "1 / 0", "line 4: ZeroDivisionError: division"),
    "none": ("error", "return None", "returned NoneType, not a number"),
    "nan": ("error", "return float('nan')", "returned nan for reward"),
    "large": ("error", "return {'x': 1e308}", "from -1e+12 to 1e+12"),
    "empty": ("error", "return {}", "without any reward"),
    "exits": ("error", "raise SystemExit(3)", "SystemExit: 3"),
    "dies": ("error", "os._exit(3)", "exit code 3"),
    "crashes": ("error", "os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
    "closes": ("error", "os.closerange(0, 99); time.sleep(99)", "closed the pipe"),
    "hangs": ("timeout", "while True: pass", "took longer than 1 s"),
    "eats memory": (
        "out_of_memory",
        "kept = [bytearray(2**24) for _ in range(999)]",
        "more than verifier_memory_bytes",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_gets_one_line_and_the_next_one_works(start: Start, name: str) -> None:
    status, body, message = BAD[name]
    body = f"if completion == 'bad':\n    {body}\nreturn 1"
    process = start(body, 1 if status == "timeout" else 10, "import os, time\n")
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


def test_what_it_starts_dies_with_a_call_that_hangs(start: Start, tmp_path: Path) -> None:
    body = f"child = os.fork()\nif child: open({str(tmp_path / 'pid')!r}, 'w').write(str(child))"
    process = start(f"{body}\nwhile 1: pass", 1, "import os\n")
    assert call(process).status == "timeout"
    with contextlib.suppress(ProcessLookupError):
        while True:  # until it is reaped
            os.kill(int((tmp_path / "pid").read_text()), 0)


def test_no_secrets_and_an_empty_folder_of_its_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    body = (
        "import os, sys\nassert os.listdir() == []\nassert 'secret' not in str(os.environ)\n"
        "assert 'PYTHONPATH' not in os.environ\nassert os.getcwd() == os.environ['HOME']\n"
        "assert not any('rungs/tasks' in p or p in ('', 'elsewhere') for p in sys.path)\nreturn 1"
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
        ("import no_such_module", "reward.py: line 1: ModuleNotFoundError"),
        ("import os; os._exit(0)", "its process ended with exit code 0"),
        ("x = bytearray(2**40)", "more than verifier_memory_bytes"),
    ],
)
def test_code_that_cannot_be_loaded(code: str, message: str) -> None:
    process = RewardProcess(Code("reward.py", code, "reward", 10, MEMORY_BYTES))
    try:
        assert message in process.start().message
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
    assert len({call(start(body)).total for _ in range(3)}) == 1
