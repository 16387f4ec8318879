"""Opens the verifier of a task: a built-in one, reasoning-gym's, or the user's Python file, whose
`reward` function runs in another process."""

import hashlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rungs.common import strict_json
from rungs.common.errors import UserError, readable_line
from rungs.config.reinforce_config import TRUST_FLAG, TaskConfig
from rungs.tasks import math_verifier, reasoning_gym
from rungs.tasks.built_in_verifiers import BUILT_IN
from rungs.tasks.code_process import Answer, Code, CodeProcess
from rungs.tasks.task import Item, Task, Verdict

MOST_REWARD = 1e12
"""Squares of larger ones would overflow in sums of float32."""


class Verifier(AbstractContextManager["Verifier"]):
    """Rewards completions. A context manager, as it may have a process."""

    def __init__(
        self, name: str, process: "RewardProcess | None" = None, sha256: str | None = None
    ) -> None:
        self.name = name
        """Name of the user's file, or of the built-in verifiers."""
        self.sha256 = sha256
        """Checksum of the user's file, or None."""
        self._process = process

    def __call__(self, item: Item, completion: str) -> Verdict:
        """Return the verdict on a completion of an item's prompt, whose status says if the verifier
        failed."""
        if self._process and (item.verifier or self.name) not in BUILT_IN:
            return self._process.reward(item.prompt, completion, item.answer, item.info)
        return Verdict.of(BUILT_IN[item.verifier or self.name].is_correct(item, completion))

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.close()


def open_verifier(
    config: TaskConfig, task: Task, run_folder: Path, *, trust_verifier: bool
) -> Verifier:
    """Return the verifier of a config, or the task's own. Raises UserError if it is an untrusted
    Python file of the run folder, cannot be read or loaded, or the items lack its inputs."""
    name = config.verifier or task.verifier
    named = _named_by_items(task)
    if math_verifier.NAME in {name, *named}:
        return _started(" and ".join(named) or name, math_verifier.REWARD, config, None)
    if name in BUILT_IN:
        item = task.train[0]  # stands for generated ones
        if item.verifier is None and (problem := BUILT_IN[name].problem(item)):
            raise UserError(f"verifier: {name} does not fit the items of {task.name}: {problem}")
        return Verifier(" and ".join(named) or name)
    if name == reasoning_gym.VERIFIER:
        return _started(name, reasoning_gym.REWARD, config, None)
    text = trusted_text(run_folder / name, "rewards completions", trust_verifier)
    return _started(name, text, config, hashlib.sha256(text.encode()).hexdigest())


def trusted_text(path: Path, does: str, is_trusted: bool) -> str:
    """Return a program. Raises UserError if it cannot be read or isn't trusted."""
    text = strict_json.read_text(path)
    if not is_trusted:
        raise UserError(
            f"{path}: is a program that {does}; read it, and if you trust it, give {TRUST_FLAG}"
        )
    return text


def _named_by_items(task: Task) -> list[str]:
    """Return the verifiers that the items of a file name."""
    items = task.train if isinstance(task.train, list) else []
    return sorted({item.verifier for item in [*items, *task.validation] if item.verifier})


def _started(name: str, text: str, config: TaskConfig, sha256: str | None) -> Verifier:
    limits = config.verifier_timeout_seconds, config.verifier_memory_bytes
    process = RewardProcess(Code(name, text, "reward", *limits))
    if problem := process.start().message:
        process.close()
        raise UserError(f"{problem}; correct the file, so that it defines reward()")
    return Verifier(name, process, sha256)


class RewardProcess(CodeProcess):
    """Calls a `reward` function in another process, one completion per call."""

    def reward(self, prompt: str, completion: str, answer: str, info: dict[str, Any]) -> Verdict:
        """Return the verdict on a completion, in time whatever the function does."""
        call = {"prompt": prompt, "completion": completion, "answer": answer, "info": info}
        return verdict_of(self.call("reward", call), self._code.file)


def verdict_of(answer: Answer, file: str) -> Verdict:
    """Return the verdict whose rewards, a number or numbers by name, are an answer's value."""
    value, error = answer.value, ""
    if answer.status != "ok":
        return Verdict(status=answer.status, message=answer.message)
    rewards = value if isinstance(value, dict) else {"reward": value}
    if not rewards:
        error = "returned {}, without any reward"
    for name, reward in rewards.items():
        if not isinstance(reward, float) or not abs(reward) <= MOST_REWARD:
            allowed = f"a finite number from {-MOST_REWARD:g} to {MOST_REWARD:g}"
            error = f"returned {reward} for {name}; a reward must be {allowed}"
    if error:
        return Verdict(status="error", message=readable_line(f"{file}: {error}"))
    return Verdict(rewards)
