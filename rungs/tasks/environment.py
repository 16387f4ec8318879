"""What answers a model's turns and rewards them: a verifier, after one turn; tools, until an answer
without a call, which a verifier rewards; or the `Environment` of a user's file or a library, each
completion's in a process of its own."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rungs.common.errors import UserError
from rungs.config.reinforce_config import TOOLS, TRUST_FLAG, TaskConfig
from rungs.tasks import library
from rungs.tasks.code_process import Answer, Code, Fork, ForkingProcess
from rungs.tasks.task import Item, Task, Verdict
from rungs.tasks.tools import CALCULATOR, PYTHON, Tools
from rungs.tasks.verifier import Verifier, open_verifier, trusted_text, verdict_of

CallsOf = Callable[[str], Sequence[tuple[str, dict[str, Any]]]]
"""Returns the calls of tools in a turn, each a name and arguments."""


class Reply(NamedTuple):
    """What an environment replies to a turn."""

    texts: Sequence[str] = ()
    """One, or the results of several calls."""
    verdict: Verdict = Verdict()
    over: bool = False
    """Whether the completion ends here."""


class Episode:
    """One completion's turns, answered by tools until one without a call, which is rewarded."""

    def __init__(self, verifier: Verifier, item: Item, tools: Tools) -> None:
        self._verifier, self._item, self._tools = verifier, item, tools

    def step(self, text: str, calls_of: CallsOf) -> Reply:
        """Return the reply to what the model wrote in a turn."""
        results = [self._tools.result(*call) for call in calls_of(text)]
        if not results:
            return Reply(verdict=self._verifier(self._item, text), over=True)
        warning = next((result.warning for result in results if result.warning), "")
        return Reply([result.text for result in results], Verdict(message=warning))

    def close(self) -> None:
        """End what the episode has started."""
        self._tools.close()


class OwnEpisode:
    """One completion's turns, answered by the environment of a user's file or a library."""

    def __init__(self, process: ForkingProcess, file: str, item: Item, seed: int) -> None:
        self._file, self._fork = file, process.fork()
        about = {"prompt": item.prompt, "answer": item.answer, "info": item.info}
        self._begun = (
            self._fork.call("reset", {"item": about, "seed": seed})
            if isinstance(self._fork, Fork)
            else self._fork
        )

    def step(self, text: str, _: CallsOf) -> Reply:
        """Return the reply to what the model wrote in a turn."""
        answer = self._begun
        if isinstance(self._fork, Fork) and answer.status == "ok":
            answer = self._fork.call("step", {"text": text})
        if answer.status != "ok":
            return Reply(verdict=verdict_of(answer, self._file), over=True)
        said, reward, over = answer.value
        return Reply([said], verdict_of(Answer(reward), self._file), over)

    def close(self) -> None:
        """End the environment."""
        if isinstance(self._fork, Fork):
            self._fork.close()


class Environment(AbstractContextManager["Environment"]):
    """Begins the episodes of a task. Raises UserError if a file isn't trusted, or can't be loaded.

    Attributes:
        verifier: rewards answers; None if the environment itself does.
        tools: descriptions of the tools that the model may call, as in OpenAI's API.
        sha256: checksums of the user's files by name."""

    def __init__(self, config: TaskConfig, task: Task, run_folder: Path, *, trusts: bool) -> None:
        self._config, self._folder, self._trusts = config, run_folder, trusts
        self._processes, self._stack = dict[str, ForkingProcess](), ExitStack()
        self.sha256 = dict[str, str]()
        self.verifier: Verifier | None = None
        self.tools: list[dict[str, Any]] = []
        with ExitStack() as opened:
            opened.push(self._stack)  # closes what is open if something is wrong
            self._open(task)
            opened.pop_all()

    def _open(self, task: Task) -> None:
        if self._config.library:
            self._start(self._config.source, library.code_of(self._config))
            return
        if self._config.environment:
            self._load(self._config.environment)
            return
        opened = open_verifier(self._config, task, self._folder, trust_verifier=self._trusts)
        self.verifier = self._stack.enter_context(opened)
        if self.verifier.sha256 is not None:
            self.sha256[self.verifier.name] = self.verifier.sha256
        for name in self._config.tools:
            if name == CALCULATOR["name"]:
                self.tools.append(CALCULATOR)
            else:
                self._load(name)

    def _load(self, name: str) -> None:
        """Start the process of a file or of the tool that runs Python."""
        if name not in TOOLS:
            text = trusted_text(self._folder / name, "answers the model", self._trusts)
            self.sha256[name] = hashlib.sha256(text.encode()).hexdigest()
        elif self._trusts:
            text = PYTHON
        else:
            raise UserError(
                f"tools: {name} runs what the model writes, with limits but without a sandbox; if"
                f" you accept that, give {TRUST_FLAG}"
            )
        self._start(name, text)

    def _start(self, name: str, text: str) -> None:
        """Start the process of a program."""
        limits = self._config.verifier_timeout_seconds, self._config.verifier_memory_bytes
        is_tool = name in self._config.tools
        code = Code(name, text, "TOOLS" if is_tool else "Environment", *limits)
        process = ForkingProcess(code)
        self._stack.callback(process.close)
        if problem := (loaded := process.start()).message:
            raise UserError(problem if self._config.library else f"{problem}; correct the file")
        self.tools += loaded.value or []
        self._processes |= {one["name"]: process for one in loaded.value or [{"name": name}]}

    def begin(self, item: Item, seed: int) -> Episode | OwnEpisode:
        """Return an episode. `seed` is the same for all completions of a group."""
        if self.verifier is not None:
            return Episode(self.verifier, item, Tools(self._processes))
        return OwnEpisode(self._processes[self.name], self.name, item, seed)

    @property
    def name(self) -> str:
        """Name for messages: of the environment's file or source, or the verifier."""
        own = self._config.environment or self._config.source
        return self.verifier.name if self.verifier else own

    def __exit__(self, *_: object) -> None:
        self._stack.close()
