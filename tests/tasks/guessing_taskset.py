"""A taskset of verifiers with a conversation: guess a number."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["GuessingEnv", "GuessingTaskset"]


class GuessingConfig(vf.TasksetConfig):
    highest: int = 7


class GuessingData(vf.TaskData):
    answer: str


class GuessingTask(vf.Task[GuessingData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def quick(self, trace: vf.Trace) -> float:
        return 1 / trace.num_turns


class GuessingTaskset(vf.Taskset[GuessingTask, GuessingConfig]):
    def load(self) -> Iterator[GuessingTask]:
        prompt = f"A number from 0 to {self.config.highest}:"
        for number in range(self.config.highest + 1):
            data = GuessingData(system_prompt="Guess.", prompt=prompt, answer=str(number))
            yield GuessingTask(data, self.config.task)


class GuessingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def run(self, task: GuessingTask, agents: Any) -> None:
        async with agents.player.interaction(task) as conversation:
            said = await conversation.turn()
            while said.last_reply != task.data.answer:
                is_low = int(said.last_reply) < int(task.data.answer)
                said = await conversation.turn("higher" if is_low else "lower")
