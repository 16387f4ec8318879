"""Tiny runs whose completions have turns: the model ends a turn with `=`, and the environment says
how often it has been asked."""

from pathlib import Path
from typing import Any

from rungs.run.folder import RunFolder
from tests.support.tiny_reinforcement import make_reinforcement_run

ENVIRONMENT = """
class Environment:
    def reset(self, item, seed):
        self.parity, self.turns, self.bit = item["answer"], 0, seed % 2
    def step(self, text):
        self.turns += 1
        said = {"length": len(text) / 10, "correct": float(self.parity in text)}
        return f"{self.bit}:", said, self.turns == 3
"""
UNREPEATABLE = "import random\nchance = random.SystemRandom()\n" + ENVIRONMENT.replace(
    "len(text) / 10", "chance.random()"
).replace('f"{self.bit}:"', "'0' * chance.randrange(3)")


def make_run_with_turns(
    folder: Path, start: Path, code: str = ENVIRONMENT, **keys: Any
) -> RunFolder:
    """Write a run folder of a task with an environment; `keys` are of `reinforce.json`."""
    task = {"source": "items.jsonl", "environment": "environment.py", "validation_items": 2}
    tasks = [task | {"turn_end": "=", "max_turns": 4}]
    reinforce = {"tasks": tasks, "max_new_tokens": 10, "steps": 3, "checkpoint_interval": 2}
    run = make_reinforcement_run(folder, start, **reinforce | keys)
    (run.path / "environment.py").write_text(code)
    return run
