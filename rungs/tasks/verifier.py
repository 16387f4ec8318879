"""Opens the verifier of a task: a built-in one, reasoning-gym's, or the user's Python file."""

import hashlib
from contextlib import AbstractContextManager
from pathlib import Path

from rungs.common import strict_json
from rungs.common.errors import UserError
from rungs.config.reinforce_config import TaskConfig
from rungs.tasks import reasoning_gym
from rungs.tasks.built_in_verifiers import BUILT_IN
from rungs.tasks.reward_process import RewardProcess
from rungs.tasks.task import Item, Task, Verdict

TRUST_FLAG = "--trust-verifier"


class Verifier(AbstractContextManager["Verifier"]):
    """Rewards completions. A context manager, as it may have a process."""

    def __init__(
        self, name: str, process: RewardProcess | None = None, sha256: str | None = None
    ) -> None:
        self.name = name
        """Name of the user's file, or of the built-in verifier for items that don't name one."""
        self.sha256 = sha256
        """Checksum of the user's file, or None."""
        self._process = process

    def __call__(self, item: Item, completion: str) -> Verdict:
        """Return the verdict on a completion of an item's prompt, whose status says if the verifier
        failed."""
        if self._process:
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
    if name in BUILT_IN:
        item = task.train[0]  # stands for generated ones
        if item.verifier is None and (problem := BUILT_IN[name].problem(item)):
            raise UserError(f"verifier: {name} does not fit the items of {task.name}: {problem}")
        return Verifier(name)
    if name == reasoning_gym.VERIFIER:
        return _started(name, reasoning_gym.REWARD, config, None)
    path = run_folder / name
    text = strict_json.read_text(path)
    if not trust_verifier:
        raise UserError(
            f"{path}: is a program that rewards completions; read it, and if you trust it, give"
            f" {TRUST_FLAG}"
        )
    return _started(name, text, config, hashlib.sha256(text.encode()).hexdigest())


def _started(name: str, text: str, config: TaskConfig, sha256: str | None) -> Verifier:
    limits = config.verifier_timeout_seconds, config.verifier_memory_bytes
    process = RewardProcess(name, text, *limits)
    if problem := process.start():
        process.close()
        raise UserError(f"{problem}; correct the file, so that it defines reward()")
    return Verifier(name, process, sha256)
