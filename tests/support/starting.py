"""Start runs in this process: trained, refused or crashed."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.config import run_config
from rungs.run.folder import RunFolder, StartOptions
from rungs.training import start as start_module
from rungs.training.dataset_learner import DatasetLearner, on_datasets
from rungs.training.start import launch


class Killed(BaseException):
    """Stands for the end of the process."""


def go(run: RunFolder, datasets_dir: Path, **start: Any) -> int:
    return launch(
        run, run_config.load_run(run.path), StartOptions(**start), on_datasets(datasets_dir)
    )


def files(folder: Path) -> dict[str, bytes]:
    paths = [p for p in folder.rglob("*") if p.is_file() and p.suffix not in {".lock", ".log"}]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def refusal(run: RunFolder, datasets_dir: Path, **start: Any) -> str:
    """Return the message of a refused start; the run folder must not change."""
    before = files(run.path)
    with pytest.raises(UserError) as raised:
        go(run, datasets_dir, **start)
    assert files(run.path) == before
    return str(raised.value)


def die_before(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise Killed instead of taking the step."""
    take = DatasetLearner.take

    def take_or_die(self: DatasetLearner, number: int, *rest: Any) -> Any:
        if number == step:
            raise Killed
        return take(self, number, *rest)

    monkeypatch.setattr(DatasetLearner, "take", take_or_die)


def overflow(token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with an embedding of the token whose square is infinite."""
    create = start_module.create_model_and_optimizer

    def with_large_row(*args: Any) -> Any:
        model, optimizer = create(*args)
        table = model.token_embedding.embedding
        rows = np.array(table[...])
        rows[token] = 1e38
        table.set_value(jax.device_put(rows, table[...].sharding))
        return model, optimizer

    monkeypatch.setattr(start_module, "create_model_and_optimizer", with_large_row)
