"""The manifest of a checkpoint: `meta.json` and its checksums. It is written last: a folder without
it is not a checkpoint.

20261121Z101500-step-000375/
  model.safetensors   weights by dotted name, maybe in shards; headers have configs, tokenizer id
  tokenizer.json      if the dataset has one
  published/          files that an imported model was published with besides its weights
  optimizer/          optimizer state, written by Orbax
  ema/                with ema_decay: averaged weights, with the same files beside them
  meta.json           step, losses, configs, dataset checksums, versions, checksums of all files"""

import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from rungs.checkpointing import optimizer_state, weights_file
from rungs.checkpointing.optimizer_state import OPTIMIZER_FOLDER
from rungs.checkpointing.weights_file import WEIGHTS_FILE, Weights
from rungs.common import disk, paths
from rungs.common.errors import UserError
from rungs.common.paths import file_checksum
from rungs.common.strict_json import StrictModel, json_checksum, read_text
from rungs.config.model_config import ModelConfig
from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.run_config import AnyRunConfig, RunConfig, parse_train
from rungs.config.sharding_config import ShardingConfig
from rungs.data.provenance import describe_validation
from rungs.data.tokenizer import TOKENIZER_FILE

META_FILE = "meta.json"
PUBLISHED_FOLDER, EMA_FOLDER = "published", "ema"
PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "safetensors", "numpy")


def _inside(checksums: dict[str, str]) -> dict[str, str]:
    if not all(map(paths.is_inside, checksums)):
        raise ValueError("must name files inside the checkpoint")
    return checksums


Count = Annotated[int, Field(ge=0, le=2**62)]


class CheckpointMeta(StrictModel):
    """The content of `meta.json`."""

    global_step: Count
    """The last step taken, counted from 0."""
    total_steps: Count
    """Steps of the complete run, as planned when this was saved."""
    tokens_seen: Count
    train_loss: float | None
    validation_loss: float | None
    selection_loss: float | None
    """The loss that picks the best checkpoint: the validation loss, or the training loss if the
    run has no validation; in reinforcement learning 1 − pass@1. None, and so never the best, if
    that loss was not finite or a signal saved this checkpoint outside the interval."""
    stopped_after: Count | None = None
    """If stop_after ended the run here: the number of validations without a better loss."""
    model: dict[str, Any]
    train: dict[str, Any]
    datasets: dict[str, dict[str, str]]
    """For each dataset, the sha256 of each split's file."""
    tokenizer: str
    sharding: ShardingConfig
    """The mesh and sharding mode it was trained on."""
    created: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    environment: dict[str, str] | None = None
    """Settings outside the run's files that affect its results; see `parallel.numerics`. None in
    checkpoints of earlier versions."""
    checksums: Annotated[dict[str, str], AfterValidator(_inside)]
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
        is_policy = isinstance(self.run_config().train, ReinforceConfig)
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
        return json_checksum(self.as_json(exclude={"own_checksum"}))

    def as_json(self, exclude: Collection[str] = ()) -> dict[str, Any]:
        """Return the content, without keys that are absent unless set."""
        unset = {key for key in ("environment", "stopped_after") if getattr(self, key) is None}
        return self.model_dump(mode="json", exclude=unset | set(exclude))


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
        file = weights_file.file_or_index(self.folder / EMA_FOLDER / WEIGHTS_FILE)
        return Weights(file) if paths.is_file(file) else None

    def damage(self, of: Callable[[str], bool] = lambda _: True) -> list[str]:
        """Return the names of files that are missing or changed, or were added and would be read,
        and why the optimizer state cannot be opened. `of` selects files by name."""
        saved = self.meta.checksums
        wrong = [n for n in saved if of(n) and file_checksum(self.folder / n) != saved[n]]
        wrong += [name for name in self.extra_files() if of(name) and _would_be_read(name)]
        if of(OPTIMIZER_FOLDER) and not any(name.startswith(OPTIMIZER_FOLDER) for name in wrong):
            wrong += filter(None, [optimizer_state.damage(self.folder)])
        return wrong

    def missing(self) -> list[str]:
        """Return the names of saved files that are gone, without hashing any."""
        return [name for name in self.meta.checksums if not paths.is_file(self.folder / name)]

    def extra_files(self) -> list[str]:
        """Return the names of files that were added to the checkpoint later."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        names = {path.relative_to(self.folder).as_posix() for path in files}
        return sorted(names - {META_FILE} - self.meta.checksums.keys())


def _would_be_read(name: str) -> bool:
    """Return whether loading the checkpoint would read a file of this name."""
    first, _, rest = name.partition("/")
    if first == OPTIMIZER_FOLDER:
        return not Path(rest).name.startswith(".")
    if first in (PUBLISHED_FOLDER, EMA_FOLDER):
        return True
    return name == TOKENIZER_FILE or name.startswith(Path(WEIGHTS_FILE).stem)


class CheckpointError(UserError):
    """A checkpoint cannot be used; `state` says why in a word."""

    def __init__(self, message: str, state: Literal["damaged", "other version", "unreadable"]):
        super().__init__(message)
        self.state = state


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder. Raises CheckpointError if `meta.json` is missing, damaged,
    of another version, or unreadable."""
    path = folder / META_FILE
    try:
        content = paths.read_bytes(path)
    except UserError as error:
        raise CheckpointError(str(error), "damaged") from None
    except OSError as error:
        if error.errno in paths.NO_FILE:
            raise CheckpointError(f"{path}: no such file", "damaged") from None
        raise CheckpointError(str(paths.cannot_be_read(path, error)), "unreadable") from None
    try:
        meta: CheckpointMeta | None = CheckpointMeta.model_validate_json(content)
    except ValidationError as error:
        if _is_of_another_version(content, error):
            raise CheckpointError(
                f"{path}: saved by another version of Rungs; use that version, or a newer one",
                "other version",
            ) from None
        meta = None
    if meta is None or not meta.is_intact():
        raise CheckpointError(f"{path}: damaged; not usable", "damaged")
    return Checkpoint(folder, meta)


def _is_of_another_version(content: bytes, error: ValidationError) -> bool:
    """Return whether unreadable content was written by another version: its own checksum is right,
    or it only has extra keys."""
    if all(one["type"] == "extra_forbidden" for one in error.errors(include_input=False)):
        return True
    try:
        saved = json.loads(content)
        return bool(saved.pop("own_checksum") == json_checksum(saved))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def refuse_damaged(weights: Path, only: str | None = None) -> None:
    """Raise UserError, which names the files, if weights or their tokenizer differ from the
    checksums in their folder. Weights without `meta.json` or `SHA256SUMS`, such as those imported
    by an earlier version, cannot be checked. `weights` is a `model.safetensors` or its shard index;
    `only` is the one file to check, instead of all but the optimizer state."""
    folder = weights.parent

    def is_read(name: str) -> bool:
        return name == only if only else not name.startswith(OPTIMIZER_FOLDER)

    if (folder / META_FILE).exists():
        damage, remedy = read_checkpoint(folder).damage(is_read), "choose another checkpoint"
    elif (folder / CHECKSUMS_FILE).exists():
        damage = changed_files(folder, is_read)
        remedy = f"import it again, or delete {CHECKSUMS_FILE} if you changed them on purpose"
    else:
        return
    if damage:
        raise UserError(f"{folder}: damaged ({', '.join(damage)}); {remedy}")


def write_manifest(folder: Path, meta: CheckpointMeta, needed: Collection[str] = ()) -> None:
    """Write `meta.json` with the checksums of all files (those in `meta` are ignored), and sync
    everything to disk. Raises FileNotFoundError if a file in `needed` has been removed."""
    for name in needed:
        (folder / name).stat()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    checksums = {path.relative_to(folder).as_posix(): file_checksum(path) or "" for path in files}
    content = meta.model_copy(update={"checksums": checksums}).with_own_checksum()
    meta_path = folder / META_FILE
    meta_path.write_text(json.dumps(content.as_json(), indent=2) + "\n", "utf-8")
    for path in [*files, meta_path, *(p for p in folder.rglob("*") if p.is_dir()), folder]:
        disk.sync_to_disk(path)


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that affect numerics and file formats."""
    return {package: importlib.metadata.version(package) for package in PACKAGES}


CHECKSUMS_FILE = "SHA256SUMS"


def write_checksums(folder: Path) -> None:
    """Write the checksums of a folder's files into its `SHA256SUMS`."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    lines = [f"{file_checksum(folder / name)}  {name}\n" for name in names]
    (folder / CHECKSUMS_FILE).write_bytes("".join(lines).encode())


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums in a folder's `SHA256SUMS`, by file name. Raises UserError if that is
    missing or unreadable."""
    lines = read_text(folder / CHECKSUMS_FILE).replace("\r\n", "\n").split("\n")
    pairs = (line.split("  ", 1)[::-1] for line in lines if "  " in line)
    return {name: checksum for name, checksum in pairs if paths.is_plain_name(name)}


def changed_files(folder: Path, of: Callable[[str], bool] = lambda _: True) -> list[str]:
    """Return the names of files that are missing or differ from their checksum in `SHA256SUMS`.
    `of` selects files by name."""
    saved = read_checksums(folder)
    return [name for name in saved if of(name) and file_checksum(folder / name) != saved[name]]
