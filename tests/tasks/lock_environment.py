"""An environment of OpenEnv whose actions have two fields: open a lock."""

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State


class LockAction(Action):
    dial: int
    digit: int


class LockObservation(Observation):
    clicks: int
    label: float = 0.0


class LockEnvironment(Environment):
    def __init__(self, secret: int, keeps_seed: bool = True) -> None:
        super().__init__()
        self._secret, self._keeps_seed = secret, keeps_seed

    def reset(self, seed: int | None = None, **_: Any) -> LockObservation:
        label = random.Random(seed if self._keeps_seed else None).random()
        return LockObservation(clicks=0, label=label)

    def step(self, action: LockAction, **_: Any) -> LockObservation:
        is_open = action.digit == self._secret
        return LockObservation(clicks=action.dial, reward=is_open or None, done=is_open)

    @property
    def state(self) -> State:
        return State()
