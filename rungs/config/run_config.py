"""`model.json` and `train.json` of a run folder: read, checked, compared."""

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
    """Both files of a run folder, checked."""

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
"""The objects that keys of a file hold."""


def load_run(run_folder: Path | str) -> RunConfig:
    """Read and check `model.json` and `train.json` of a run folder.

    Raises:
        UserError: with one line for each mistake in either file, or in the two together.
    """
    return _check(run_folder, dict.fromkeys(FILE_TYPES))


def check_texts(run_folder: Path | str, model_text: str, train_text: str) -> RunConfig:
    """As `load_run`, for texts that do not stand in the folder yet."""
    return _check(run_folder, {MODEL_FILE: model_text, TRAIN_FILE: train_text})


def _check(run_folder: Path | str, texts: dict[str, str | None]) -> RunConfig:
    configs: dict[str, Any] = {}
    mistakes: list[str] = []
    for name, text in texts.items():
        path = Path(run_folder) / name
        try:
            text = strict_json.read_text(path) if text is None else text
            configs[name] = strict_json.parse(text, path, FILE_TYPES[name], FILE_TYPES)
        except UserError as error:
            mistakes.append(str(error))
    if not mistakes:
        found = RunConfig(configs[MODEL_FILE], configs[TRAIN_FILE])
        mistakes = [f"{Path(run_folder) / TRAIN_FILE}: {line}" for line in problems(*found)]
    if mistakes:
        raise UserError("\n".join(mistakes))
    return found


C = TypeVar("C", bound=Config)


def differences(old: C, new: C) -> dict[str, tuple[Any, Any]]:
    """The keys in which two configs differ, each with its old and its new value."""
    before, after = old.as_json(), new.as_json()
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}
