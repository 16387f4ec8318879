"""A taskset of verifiers that needs all that Rungs doesn't have."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["DemandingEnv", "DemandingTaskset"]


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, left: int, right: int) -> int:
        return left + right


class DemandingTask(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER = True

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:  # noqa: ARG003
        return [Calculator(vf.ToolsetConfig())]

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None: ...

    @vf.reward
    async def tests_pass(self, runtime: vf.Runtime) -> float:
        return float(await runtime.read("result"))

    @vf.stop
    async def is_done(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 2


class DemandingTaskset(vf.Taskset[DemandingTask, vf.TasksetConfig]):
    def load(self) -> Iterator[DemandingTask]:
        yield DemandingTask(vf.TaskData(prompt="Do it."), self.config.task)


class DemandingEnvConfig(vf.EnvConfig):
    worker: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class DemandingEnv(vf.Env[DemandingEnvConfig]):
    async def run(self, task: DemandingTask, agents: Any) -> None:
        await agents.worker.run(task)
