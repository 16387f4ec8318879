"""Loading each new checkpoint of the runs that are served."""

import time
from collections.abc import Mapping
from typing import NoReturn

import click

from rungs.common.errors import UserError, reason
from rungs.serving.engine import Engine
from rungs.serving.served import Served

SECONDS_BETWEEN_LOOKS = 2.0


def follow(engine: Engine, models: Mapping[str, Served]) -> NoReturn:
    """Give an engine the newest weights of its models, again and again. A problem with those of a
    model is printed once, and the earlier ones go on."""
    problems: dict[str, str] = {}
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        for name, model in models.items():
            try:
                newer = model.newer()
            except (UserError, OSError) as error:
                if problems.get(name) != (problem := reason(error)):
                    click.echo(f"{name}: {problem}; {model.step} goes on", err=True)
                problems[name] = problem
                continue
            problems.pop(name, None)
            if newer is not None:
                engine.replace(name, newer)
                click.echo(f"{name}: now {model.step}", err=True)
