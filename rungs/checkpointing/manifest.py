"""The manifest of a checkpoint: `meta.json` and its checksums. It is written last: a folder without
it is not a checkpoint.

20261121Z101500-step-000375/
  model.safetensors   weights by dotted name, maybe in shards; headers have configs, tokenizer id
  tokenizer.json      if the dataset has one
  published/          files that an imported model was published with besides its weights
  optimizer/          optimizer state, written by Orbax
  ema/                with ema_decay: averaged weights, with the same files beside them
  meta.json           step, losses, configs, dataset checksums, versions, checksums of all files

A new kind of file is written in `saver`; `meta.json` lists it without a change here."""

import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from rungs.checkpointing.weights_file import WEIGHTS_FILE, Weights, file_or_index
from rungs.common import disk, paths
from rungs.common.errors import UserError
from rungs.common.paths import file_checksum
from rungs.common.strict_json import StrictModel, json_checksum, read_text
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import AnyRunConfig, RunConfig, parse_train
from rungs.config.sharding_config import ShardingConfig
from rungs.data.provenance import describe_validation

META_FILE, CHECKSUMS_FILE = "meta.json", "SHA256SUMS"
OPTIMIZER_FOLDER, PUBLISHED_FOLDER, EMA_FOLDER = "optimizer", "published", "ema"
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "safetensors", "numpy")


def _inside(checksums: dict[str, str]) -> dict[str, str]:
    if not all(map(paths.is_inside, checksums)):
        raise ValueError("must name files inside the checkpoint")
    return checksums


Count = Annotated[int, Field(ge=0, le=2**62)]
_LOSSES = "min_train_loss", "max_train_loss", "avg_train_loss"
_ADDED_KEYS = (*_LOSSES, "learning_rate", "is_best", "stopped_after")
"""Keys that older checkpoints lack."""


class CheckpointMeta(StrictModel):
    """The content of `meta.json`; the trainer and `saver.describe_checkpoint` fill it."""

    global_step: Count
    """The last step taken, counted from 0."""
    total_steps: Count
    """Steps of the complete run, as planned when this was saved."""
    tokens_seen: Count = 0
    train_loss: float | None = None
    min_train_loss: float | None = None
    """Of the steps since the last checkpoint at the interval, up to this one: the smallest, largest
    and mean loss. None if none was finite."""
    max_train_loss: float | None = None
    avg_train_loss: float | None = None
    learning_rate: float | None = None
    """That of the last step."""
    validation_loss: float | None = None
    selection_loss: float | None = None
    """The loss that picks the best checkpoint: the validation loss, or the training loss if the
    run has no validation; in reinforcement learning 1 − pass@1. None, and so never the best, if
    that loss was not finite or a signal saved this checkpoint outside the interval."""
    is_best: bool | None = None
    """Whether `best` pointed here once this was saved; a later checkpoint may have become the best,
    which has no effect on this file."""
    stopped_after: Count | None = None
    """If stop_after ended the run here: the number of validations without a better loss."""
    model: dict[str, Any]
    train: dict[str, Any]
    datasets: dict[str, dict[str, str]] = Field(default_factory=dict)
    """For each dataset, the sha256 of each split's file."""
    tokenizer: str
    sharding: ShardingConfig
    """The mesh and sharding mode it was trained on."""
    created: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    environment: dict[str, str] = Field(default_factory=dict)
    """Settings outside the run's files that affect its results; see `parallel.jax_setup`."""
    checksums: Annotated[dict[str, str], AfterValidator(_inside)] = Field(default_factory=dict)
    """sha256 of each other file, by path relative to the checkpoint."""
    own_checksum: str = ""
    """sha256 of this file's content without this key."""

    @property
    def validation_data(self) -> str | None:
        """Identifier of the data behind `validation_loss`, None if the run has no validation."""
        train = {"validation_tokens": 0, "start_val_token": 0} | self.train
        return describe_validation(
            self.datasets, train["validation_tokens"], train["start_val_token"]
        )

    @property
    def pass_at_1(self) -> float | None:
        """In reinforcement learning, the share of right completions of held-out items."""
        is_policy = "tasks" in self.train
        return 1 - self.selection_loss if is_policy and self.selection_loss is not None else None

    def run_config(self) -> AnyRunConfig:
        """Return the run's configs. Raises UserError if this version cannot read them."""
        return run_config(self.model, self.train)

    def with_own_checksum(self) -> "CheckpointMeta":
        """Return a copy with `own_checksum` set."""
        return self.model_copy(update={"own_checksum": self._digest()})

    def is_intact(self) -> bool:
        """Return whether `own_checksum` matches the content."""
        return self.own_checksum == self._digest()

    def _digest(self) -> str:
        return json_checksum(self.as_json(exclude=("own_checksum",)))

    def as_json(self, exclude: Collection[str] = ()) -> dict[str, Any]:
        """Return the content, without keys that older versions lack unless they are set."""
        unset = (key for key in _ADDED_KEYS if getattr(self, key) is None)
        return self.model_dump(mode="json", exclude={*unset, *exclude})


def run_config(model: dict[str, Any], train: dict[str, Any]) -> AnyRunConfig:
    """Return both configs from saved JSON. Raises UserError if this version cannot read them."""
    try:
        return RunConfig(ModelConfig.model_validate(model), parse_train(train))
    except ValidationError as error:
        key = error.errors()[0]["loc"]
        raise UserError(f"saved by another version of Rungs: {key} is not known here") from None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder and its parsed `meta.json`."""

    folder: Path
    meta: CheckpointMeta

    @property
    def step(self) -> int:
        return self.meta.global_step

    @property
    def order(self) -> tuple[int, str]:
        """Sort key: by step, then by time of saving."""
        return self.step, self.folder.name

    @property
    def weights(self) -> Weights:
        """The weights file, with only its header read."""
        return Weights(self.folder / WEIGHTS_FILE)

    @property
    def averaged_weights(self) -> Weights | None:
        """Likewise the averaged weights; None if it was saved without."""
        file = file_or_index(self.folder / EMA_FOLDER / WEIGHTS_FILE)
        return Weights(file) if f"{EMA_FOLDER}/{file.name}" in self.meta.checksums else None

    def damage(self, of: Callable[[str], bool] = lambda _: True) -> list[str]:
        """Return the names of files that are missing or changed. `of` selects files by name."""
        return _changed(self.folder, self.meta.checksums, of)

    def missing(self) -> list[str]:
        """Return the names of saved files that are gone, without hashing any."""
        return [name for name in self.meta.checksums if not (self.folder / name).is_file()]


class CheckpointError(UserError):
    """A checkpoint's `meta.json` is missing, damaged or of another version."""


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder. Raises CheckpointError if it cannot be used."""
    path = folder / META_FILE
    try:
        meta = CheckpointMeta.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: no such file") from None
    except ValidationError:
        raise CheckpointError(f"{path}: damaged, or of another version of Rungs") from None
    if not meta.is_intact():
        raise CheckpointError(f"{path}: damaged")
    return Checkpoint(folder, meta)


def refuse_damaged(weights: Path, only: str | None = None) -> None:
    """Raise UserError, which names the files, if weights or their tokenizer differ from the
    checksums in their folder; weights without `meta.json` or `SHA256SUMS` cannot be checked.
    `weights` is a `model.safetensors` or its shard index; `only` is the one file to check, instead
    of all but the optimizer state. Likewise for the base of an adapter, by its checksum."""
    folder = weights.parent

    def is_read(name: str) -> bool:
        return name == only if only else not name.startswith(OPTIMIZER_FOLDER)

    if (folder / META_FILE).exists():
        damage, remedy = read_checkpoint(folder).damage(is_read), "choose another checkpoint"
    elif (folder / CHECKSUMS_FILE).exists():
        damage = changed_files(folder, is_read)
        remedy = f"import it again, or delete {CHECKSUMS_FILE} if you changed them on purpose"
    else:
        damage, remedy = [], ""
    if damage:
        raise UserError(f"{folder}: damaged ({', '.join(damage)}); {remedy}")
    if only is None:
        Weights(weights).refuse_changed_base()


def write_manifest(folder: Path, meta: CheckpointMeta) -> None:
    """Write `meta.json` with the checksums of all files (those in `meta` are ignored), and sync
    everything to disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    checksums = {path.relative_to(folder).as_posix(): file_checksum(path) or "" for path in files}
    content = meta.model_copy(update={"checksums": checksums}).with_own_checksum()
    (folder / META_FILE).write_text(json.dumps(content.as_json(), indent=2) + "\n", "utf-8")
    disk.sync_folder(folder)
    disk.sync_to_disk(folder)


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that affect numerics and file formats."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}


def write_checksums(folder: Path) -> None:
    """Write the checksums of a folder's files into its `SHA256SUMS`."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    lines = [f"{file_checksum(folder / name)}  {name}\n" for name in names]
    (folder / CHECKSUMS_FILE).write_bytes("".join(lines).encode())


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums in a folder's `SHA256SUMS`, by file name."""
    checksums = {}
    for line in read_text(folder / CHECKSUMS_FILE).splitlines():
        checksum, _, name = line.partition("  ")
        if paths.is_plain_name(name):
            checksums[name] = checksum
    return checksums


def changed_files(folder: Path, of: Callable[[str], bool] = lambda _: True) -> list[str]:
    """Return the names of files that are missing or differ from their checksum in `SHA256SUMS`.
    `of` selects files by name."""
    return _changed(folder, read_checksums(folder), of)


def _changed(folder: Path, saved: dict[str, str], of: Callable[[str], bool]) -> list[str]:
    return [name for name in saved if of(name) and file_checksum(folder / name) != saved[name]]
