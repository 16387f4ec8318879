"""Environments of the library OpenEnv (openenv-core 0.3, the extra `openenv`): classes of installed
packages, `module:Class`, in a process of ours instead of on a server. An item is a seed, and its
prompt the observation after `reset(seed)`. Observations are told as JSON."""

import functools
import importlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

from openenv.core.env_server import Action, CallToolAction, ListToolsAction
from openenv.core.env_server.serialization import serialize_observation
from pydantic import ValidationError

from rungs.common.errors import UserError
from rungs.tasks.task import Item


def items(place: str, settings: dict[str, Any]) -> Iterator[Item]:
    """Yield seeds without end. Raises UserError if the environment can't be used here."""
    game = opened(place, settings)()
    for seed in itertools.count():
        yield Item(game.begun(seed), "", {"seed": seed})


def opened(place: str, settings: dict[str, Any]) -> Callable[[], "Game"]:
    """Return what makes an environment. Raises UserError if it can't be used here."""
    if "//" in place:
        raise UserError("is a server, which can't be used here; name a class, as module:Class")
    module, _, name = place.partition(":")
    kind = getattr(importlib.import_module(module), name)
    action = get_type_hints(kind.step)["action"]
    if action in (Action, CallToolAction, ListToolsAction):
        raise UserError("can't be used here, as its actions are calls of tools (MCP)")
    return functools.partial(Game, kind, settings, action)


class Game:
    """Answers the model, which says an action in JSON, or the one field that an action needs."""

    def __init__(self, kind: Any, settings: dict[str, Any], action: type[Action]) -> None:
        self._environment, self._action = kind(**settings), action
        self._needed = [key for key, one in action.model_fields.items() if one.is_required()]
        taken = inspect.signature(self._environment.reset).parameters.values()
        self._has_seed = any(one.name == "seed" or one.kind is one.VAR_KEYWORD for one in taken)

    def begun(self, seed: int) -> str:
        """Return the first observation."""
        seeds = {"seed": seed} if self._has_seed else {}
        return _told(self._environment.reset(**seeds))

    def reset(self, item: dict[str, Any], seed: int) -> None:  # noqa: ARG002 — the item has one
        """Begin as when the prompt was made."""
        if self.begun(item["info"]["seed"]) != item["prompt"]:
            raise UserError("its first observation is not the prompt, though the seed is the same")

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the observation after an action, and its reward."""
        given = json.dumps({self._needed[0]: text}) if len(self._needed) == 1 else text
        try:
            action = self._action.model_validate_json(given)
        except ValidationError:
            return "error: not an action", 0.0, False
        seen = self._environment.step(action)
        return _told(seen), float(seen.reward or 0), bool(seen.done)


def _told(observation: Any) -> str:
    seen = serialize_observation(observation)["observation"]
    return json.dumps(seen, ensure_ascii=False, default=str)
