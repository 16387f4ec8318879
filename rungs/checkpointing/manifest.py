"""One checkpoint: a folder whose last-written file, `meta.json`, makes it whole.

20261121Z101500-step-000375/
  model.safetensors   weights by dotted name; the header holds both configs and the tokenizer id;
                      large ones in shards with an index, each shard with that header
  tokenizer.json      where the dataset has one
  optimizer/          Orbax: the optimizer's state
  meta.json           step, losses, configs, dataset checksums, versions, checksums of all files
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from rungs.checkpointing.weights_file import Weights
from rungs.checkpointing.weights_index import WEIGHTS_FILE
from rungs.common.disk import sync_to_disk
from rungs.common.errors import UserError
from rungs.common.paths import is_file, is_inside, require_regular
from rungs.common.strict_json import StrictModel, read_text
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import ShardingConfig, TrainConfig
from rungs.data.tokenizer import TOKENIZER_FILE

META_FILE = "meta.json"
OPTIMIZER_FOLDER = "optimizer"
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "safetensors", "numpy")


def _inside(checksums: dict[str, str]) -> dict[str, str]:
    if not all(map(is_inside, checksums)):
        raise ValueError("must be of files in the checkpoint")
    return checksums


Count = Annotated[int, Field(ge=0, le=2**62)]


class CheckpointMeta(StrictModel):
    """What `meta.json` says of its checkpoint."""

    global_step: Count
    """The last step taken, counted from 0."""
    total_steps: Count
    """Steps of the whole run, as planned when this was saved."""
    tokens_seen: Count
    train_loss: float | None
    validation_loss: float | None
    selection_loss: float | None
    """What the best checkpoint is lowest in: the validation loss, or the training loss where
    there is no validation. null, and never the best, where that was not finite, and where a
    signal saved this outside the interval."""
    model: dict[str, Any]
    train: dict[str, Any]
    datasets: dict[str, dict[str, str]]
    """For each dataset, the sha256 of each split's file."""
    tokenizer: str
    sharding: ShardingConfig
    """How devices shared the work."""
    created: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    checksums: Annotated[dict[str, str], AfterValidator(_inside)]
    """sha256 of each other file, by path relative to the checkpoint."""
    own_checksum: str = ""
    """sha256 of this file's content without this key."""

    def run_config(self) -> RunConfig:
        """The configs it was trained with; raises UserError where this version cannot read them."""
        return run_config(self.model, self.train)

    def sealed(self) -> "CheckpointMeta":
        """With its own checksum."""
        return self.model_copy(update={"own_checksum": self._digest()})

    def is_intact(self) -> bool:
        """Whether its own checksum is right."""
        return self.own_checksum == self._digest()

    def _digest(self) -> str:
        content = self.model_dump(mode="json", exclude={"own_checksum"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def run_config(model: dict[str, Any], train: dict[str, Any]) -> RunConfig:
    """Both configs as they were saved; raises UserError where this version cannot read them."""
    try:
        return RunConfig(ModelConfig.model_validate(model), TrainConfig.model_validate(train))
    except ValidationError as error:
        key = error.errors()[0]["loc"]
        raise UserError(f"saved by another version of Rungs: {key} is not known here") from None


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has its `meta.json`."""

    folder: Path
    meta: CheckpointMeta

    @property
    def step(self) -> int:
        return self.meta.global_step

    @property
    def order(self) -> tuple[int, str]:
        """Sorts checkpoints by step, and saves of the same step by time."""
        return self.step, self.folder.name

    @property
    def weights(self) -> Weights:
        """Its weights, of which nothing but the headers are read yet."""
        return Weights(self.folder / WEIGHTS_FILE)

    def damage(self, of: Callable[[str], bool] = lambda _: True) -> list[str]:
        """The files that are missing, not as they were saved, or not saved but would be read.

        Args:
            of: which files are looked at, by their names.
        """
        saved = self.meta.checksums
        wrong = [n for n in saved if of(n) and file_checksum(self.folder / n) != saved[n]]
        return wrong + [name for name in self.strays() if of(name) and _would_be_read(name)]

    def missing(self) -> list[str]:
        """Return the saved files that are gone; nothing is hashed."""
        return [name for name in self.meta.checksums if not is_file(self.folder / name)]

    def strays(self) -> list[str]:
        """The files in it that were not saved with it."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        names = {path.relative_to(self.folder).as_posix() for path in files}
        return sorted(names - {META_FILE} - self.meta.checksums.keys())


def _would_be_read(name: str) -> bool:
    """Whether a file of this name would be taken for a part of its checkpoint."""
    first, _, rest = name.partition("/")
    if first == OPTIMIZER_FOLDER:
        return not Path(rest).name.startswith(".")
    return name == TOKENIZER_FILE or name.startswith(Path(WEIGHTS_FILE).stem)


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder; raises UserError where `meta.json` is missing or damaged."""
    path = folder / META_FILE
    try:
        meta = CheckpointMeta.model_validate_json(read_text(path))
    except ValidationError:
        raise UserError(f"{path}: damaged, or of another version of Rungs; not usable") from None
    if not meta.is_intact():
        raise UserError(f"{path}: damaged; not usable")
    return Checkpoint(folder, meta)


def refuse_damaged(weights: Path, only: str | None = None) -> None:
    """Refuse weights that are not as they were saved, or whose tokenizer is not. Where there is no
    `meta.json` beside them, as with imported ones, nothing says how they were.

    Args:
        weights: a `model.safetensors`, or the index of its shards.
        only: name of the one file beside them that is looked at.

    Raises:
        UserError: naming each damaged file.
    """
    folder = weights.parent
    if not (folder / META_FILE).exists():
        return

    def is_read(name: str) -> bool:
        return name == only if only else not name.startswith(OPTIMIZER_FOLDER)

    if damage := read_checkpoint(folder).damage(is_read):
        raise UserError(f"{folder}: damaged ({', '.join(damage)}); name another checkpoint")


def file_checksum(path: Path) -> str | None:
    """sha256 of a file, or None where it cannot be read."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def seal(folder: Path, meta: CheckpointMeta, needed: Collection[str] = ()) -> None:
    """Write `meta.json` with the checksums of all files, and see all of it onto the disk.

    Raises:
        FileNotFoundError: one of the files that are needed has been removed meanwhile.
    """
    for name in needed:
        (folder / name).stat()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    checksums = {path.relative_to(folder).as_posix(): file_checksum(path) or "" for path in files}
    sealed = meta.model_copy(update={"checksums": checksums}).sealed()
    meta_path = folder / META_FILE
    meta_path.write_text(json.dumps(sealed.model_dump(mode="json"), indent=2) + "\n")
    for path in [*files, meta_path, *(p for p in folder.rglob("*") if p.is_dir()), folder]:
        sync_to_disk(path)


@functools.cache
def installed_versions() -> dict[str, str]:
    """Versions of the packages that a run depends on."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}
