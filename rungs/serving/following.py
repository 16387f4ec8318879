"""The thread that loads each new checkpoint of the runs that are served."""

import threading
from collections.abc import Mapping

import click

from rungs.common.errors import UserError, reason
from rungs.serving.engine import Engine
from rungs.serving.served import Served

SECONDS_BETWEEN_LOOKS = 2.0


class Follower(threading.Thread):
    """Gives an engine the newest weights of its models until the process ends."""

    def __init__(self, engine: Engine, models: Mapping[str, Served]) -> None:
        super().__init__(name="follower", daemon=True)
        self._engine, self._models = engine, models
        self._pause = threading.Event()
        self._problems: dict[str, str] = {}

    def run(self) -> None:
        """Look again and again."""
        while not self._pause.wait(SECONDS_BETWEEN_LOOKS):
            for name in self._models:
                self._look(name)

    def _look(self, name: str) -> None:
        model = self._models[name]
        try:
            generator = model.newer()
        except (UserError, OSError) as error:
            if self._problems.get(name) != (problem := reason(error)):
                click.echo(f"{name}: {problem}; {model.step} goes on", err=True)
            self._problems[name] = problem
            return
        self._problems.pop(name, None)
        if generator is not None:
            self._engine.replace(name, generator)
            click.echo(f"{name}: now {model.step}", err=True)
