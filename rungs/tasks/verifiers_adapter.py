"""Environments of the library verifiers 0.4 (the extra `verifiers`): a taskset's tasks are items,
and its `Env`, or else a question and an answer, is the conversation. In it the model that learns
stands in for the only agent, and chats: without a harness, a sandbox or servers."""

import asyncio
import functools
import inspect
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated, invoke

from rungs.common.errors import UserError
from rungs.tasks.task import Item


def items(name: str, settings: dict[str, Any]) -> Iterator[Item]:
    """Yield a taskset's tasks. Raises UserError if one needs what can't be done here."""
    for task in _environment(name, settings).taskset:
        answer = str(getattr(task.data, "answer", ""))
        yield Item(_prompt(task), answer, task.data.model_dump(mode="json"))


def opened(name: str, settings: dict[str, Any]) -> Callable[[], "Conversation"]:
    """Return what makes an environment."""
    return functools.partial(Conversation, _environment(name, settings))


def _environment(name: str, settings: dict[str, Any]) -> vf.Env:
    """Return an environment that has loaded its first task. Raises UserError if it needs more than
    a model that chats."""
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": name, **settings}}))
    taskset, task = env.taskset, next(iter(env.taskset))
    tools = type(taskset).toolsets(taskset.config) + type(task).toolsets(taskset.config.task)
    hooks = [*task.hooks("metric"), *task.hooks("reward"), task.setup, task.finalize]
    own = [hook for hook in hooks if hook.__module__ != vf.Task.__module__]
    sandboxed = [hook for hook in own if "runtime" in inspect.signature(hook).parameters]
    changing = task.hooks("stop") + discover_decorated(task, "intercept")
    needs = {
        "agents besides the model": list(agent_config_fields(env.config))[1:],
        "judges (models)": [judge.id for judge in taskset.config.task.judges],
        "toolsets (servers)": [type(one).__name__ for one in tools],
        "a runtime (sandbox)": [hook.__name__ for hook in sandboxed],
        "a container": [name] if task.NEEDS_CONTAINER or task.data.image else [],
        "stops or interceptors": [hook.__name__ for hook in changing],
    }
    if found := [f"{need}: {', '.join(names)}" for need, names in needs.items() if names]:
        raise UserError(f"can't be used here, as it needs {'; '.join(found)}")
    return env


def _prompt(task: vf.Task) -> str:
    """Return a task's prompt, after its system prompt. Raises UserError unless it is a text."""
    if not isinstance(task.data.prompt, str):
        raise UserError("can't be used here, as the prompt of a task is no text")
    return "\n\n".join(filter(None, (task.data.system_prompt, task.data.prompt)))


class Conversation:
    """The conversation about an item, which runs until the model must say something, and is paid at
    its end."""

    def __init__(self, env: vf.Env) -> None:
        self._env, self._loop = env, asyncio.new_event_loop()
        self._asked, self._said = asyncio.Queue[str](), asyncio.Queue[str]()

    def reset(self, item: dict[str, Any], seed: int) -> None:
        """Begin."""
        random.seed(seed)
        kind, config = self._env.taskset.task_type(), self._env.taskset.config.task
        task = kind(kind.data_type().model_validate(item["info"]), config)
        self._reward = self._loop.create_task(self._play(task))
        if self._question() is None:
            raise UserError(f"ended before the model's turn, paying {self._reward.result()}")

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the reply, or the reward at the end."""
        self._said.put_nowait(text)
        question = self._question()
        return ("", self._reward.result(), True) if question is None else (question, 0.0, False)

    def _question(self) -> str | None:
        """Return what the model is told next, None at the end."""
        asked = self._loop.create_task(self._asked.get())
        first = asyncio.wait({asked, self._reward}, return_when=asyncio.FIRST_COMPLETED)
        self._loop.run_until_complete(first)
        return asked.result() if asked.done() else None

    async def _play(self, task: vf.Task) -> float:
        """Return the reward of the whole conversation."""
        [(name, config)] = agent_config_fields(self._env.config).items()
        player = _Player(task, config, self._asked, self._said)
        agents = SimpleNamespace(**{name: player})
        await self._env.setup(agents)
        await self._env.run(task, agents)
        episode = vf.Episode(task=player.trace.task, traces=[player.trace])
        await self._env.finalize(task, episode)
        return player.trace.reward


class _Player:
    """Stands in for an agent and its interaction."""

    def __init__(self, task: vf.Task, config: Any, *queues: asyncio.Queue[str]) -> None:
        self._task, (self._asked, self._said) = task, queues
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        state, agent = state_cls(type(task))(), vf.AgentInfo(config=config)
        self.trace = vf.Trace(task=about, state=state, agent=agent)

    async def run(self, task: vf.Task) -> vf.Trace:
        """Return the trace of one answer."""
        async with self.interaction(task):
            await self.turn()
        return self.trace

    @asynccontextmanager
    async def interaction(self, task: vf.Task) -> AsyncIterator["_Player"]:
        """Yield a conversation, which is scored at its end."""
        if self.trace.nodes or _prompt(task) != _prompt(self._task):
            raise UserError("begins another conversation than the item's")
        await invoke(task.setup, {"trace": self.trace, "runtime": None})
        if task.data.system_prompt:
            self._add(vf.SystemMessage(content=task.data.system_prompt))
        self._add(vf.UserMessage(content=task.data.prompt))
        yield self
        await invoke(task.finalize, {"trace": self.trace, "runtime": None})
        await task.score(self.trace)

    async def turn(self, message: str = "") -> vf.Segment:
        """Return what the model says to a message, or first to the prompt."""
        if message:
            self._add(vf.UserMessage(content=message))
        self._asked.put_nowait(message)
        self._add(vf.AssistantMessage(content=await self._said.get()))
        return vf.Segment(messages=[self.trace.last_message])

    def _add(self, message: vf.Message) -> None:
        nodes, is_reply = self.trace.nodes, message.role == "assistant"
        parent = len(nodes) - 1 if nodes else None
        nodes.append(vf.MessageNode(parent=parent, message=message, sampled=is_reply))
