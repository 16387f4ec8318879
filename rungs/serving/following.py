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
            click.echo(f"{name}: {reason(error)}; {model.step} goes on", err=True)
            return
        if generator is not None:
            self._engine.replace(name, generator)
            click.echo(f"{name}: now {model.step}", err=True)
