"""Reads, checks and compares `model.json` and `train.json` of a run folder."""

from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rungs.common import strict_json
from rungs.common.errors import UserError
from rungs.common.strict_json import StrictModel
from rungs.config.base import Config
from rungs.config.cross_checks import problems
from rungs.config.model_config import ModelConfig, MupConfig, RopeScaling
from rungs.config.train_config import LoraConfig, ShardingConfig, TrainConfig


class RunConfig(NamedTuple):
    """The configs of a run: both files, checked."""

    model: ModelConfig
    train: TrainConfig

    @property
    def sequence_length(self) -> int:
        """Tokens in a sequence, in training and in validation."""
        return self.train.sequence_length or self.model.context_length

    @property
    def tokens_per_step(self) -> int:
        """Input tokens of one global step, the padding of pairs included."""
        return self.train.sequences_per_step * self.sequence_length


MODEL_FILE, TRAIN_FILE = "model.json", "train.json"
FILE_TYPES: dict[str, type[Config]] = {MODEL_FILE: ModelConfig, TRAIN_FILE: TrainConfig}
NESTED: dict[str, dict[str, type[StrictModel]]] = {
    MODEL_FILE: {"rope_scaling": RopeScaling, "mup": MupConfig},
    TRAIN_FILE: {"sharding": ShardingConfig, "lora": LoraConfig},
}
"""The keys of each file that hold an object."""


def load_run(run_folder: Path | str) -> RunConfig:
    """Read and check `model.json` and `train.json` of a run folder.

    Raises:
        UserError: one line for each error in either file or in the two together.
    """
    return _check(run_folder, dict.fromkeys(FILE_TYPES))


def check_texts(run_folder: Path | str, model_text: str, train_text: str) -> RunConfig:
    """Check the texts of both files before they are written to a folder; see `load_run`."""
    return _check(run_folder, {MODEL_FILE: model_text, TRAIN_FILE: train_text})


def _check(run_folder: Path | str, texts: dict[str, str | None]) -> RunConfig:
    configs: dict[str, Any] = {}
    errors: list[str] = []
    for name, text in texts.items():
        path = Path(run_folder) / name
        try:
            text = strict_json.read_text(path) if text is None else text
            configs[name] = strict_json.parse(text, path, FILE_TYPES[name], FILE_TYPES)
        except UserError as error:
            errors.append(str(error))
    if not errors:
        found = RunConfig(configs[MODEL_FILE], configs[TRAIN_FILE])
        errors = [f"{Path(run_folder) / TRAIN_FILE}: {line}" for line in problems(*found)]
    if errors:
        raise UserError("\n".join(errors))
    return found


C = TypeVar("C", bound=Config)


def differences(old: C, new: C) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two configs differ, each with its old and new value."""
    before, after = old.as_json(), new.as_json()
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}
