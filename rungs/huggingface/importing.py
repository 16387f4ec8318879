"""Published models made into run folders: planned and checked whole, then written as a stream."""

import dataclasses
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from rungs.checkpointing.weights_file import Origin, WeightsHeader
from rungs.checkpointing.weights_index import WEIGHTS_FILE
from rungs.common import hub
from rungs.common.atomic_folder import create_folder
from rungs.common.errors import UserError
from rungs.common.paths import checkout, is_file, is_folder, is_there
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import MODEL_FILE
from rungs.data.tokenizer import TOKENIZER_FILE
from rungs.huggingface.config_keys.hf_config import (
    CONFIG_FILE,
    PublishedConfig,
    read_published_config,
)
from rungs.huggingface.families.family import Family
from rungs.huggingface.families.registry import family_of
from rungs.huggingface.import_tokenizer import convert_tokenizer
from rungs.huggingface.tensors.match import Match, match
from rungs.huggingface.tensors.reader import TensorFolder
from rungs.huggingface.tensors.rules import AbstractParameter, Rule, parameters, used
from rungs.huggingface.tensors.writer import TensorWriter
from rungs.run.folder import RUNS, RunFolder

GENERATION_FILE = "generation_config.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
COMPANIONS = (CONFIG_FILE, GENERATION_FILE, *TOKENIZER_FILES)
"""The files that stand beside a published model's weights, and are kept beside them."""


@dataclasses.dataclass(frozen=True)
class PublishedSource:
    """Where a published model lies."""

    name: str
    """Hub id, or the folder's name."""
    folder: Path
    revision: str | None = None
    """The hub's commit."""


def find_source(place: str, revision: str | None = None) -> PublishedSource:
    """The model in a folder or, where there is no such folder, of that id on the hub.

    Raises:
        UserError: neither is there.
    """
    folder = Path(place)
    if is_folder(folder):
        if revision is not None:
            raise UserError(f"{place}: a folder has no revisions; leave out --revision")
        return PublishedSource(folder.resolve().name, folder)
    if place.count("/") > 1 or place.startswith((".", "/", "~")):
        raise UserError(f"{place}: no such folder, and not an id on the Hugging Face hub")
    folder, commit = hub.download_model(place, revision)
    return PublishedSource(place, folder, commit)


@dataclasses.dataclass(frozen=True)
class Import:
    """A published model, checked: nothing but the disk can be in the way of writing it."""

    source: PublishedSource
    published: PublishedConfig
    family: Family
    model: ModelConfig
    tensors: TensorFolder
    rules: list[Rule]
    parameters: dict[str, AbstractParameter]
    match: Match

    @classmethod
    def of(cls, source: PublishedSource, ignored_keys: tuple[str, ...] = ()) -> "Import":
        """Check all of it but the values of its tensors.

        Args:
            ignored_keys: of its config.json, taken to be without effect.

        Raises:
            UserError: with a line for each mistake found.
        """
        published = read_published_config(source.folder)
        published.ignore(ignored_keys)
        family = family_of(published)
        model = family.read(published)
        tensors, ours = TensorFolder(source.folder), parameters(model)
        rules = used(family.tensors, ours)
        matched = match(source.folder, tensors, family, rules, ours)
        return cls(source, published, family, model, tensors, rules, ours, matched)

    @property
    def origin(self) -> Origin:
        """What the weights' header says of where they are from."""
        types = self.match.types
        [(most, _)] = Counter(self._dtypes()).most_common(1)
        others = {name: kind.dtype for name, kind in types.items() if kind.dtype != most}
        return Origin(
            source=self.source.name,
            revision=self.source.revision,
            model_type=self.published.model_type,
            dtype=most,
            other_dtypes=others,
        )

    def summary(self) -> str:
        """One line on what it is."""
        size = sum(kind.bytes for kind in self.match.types.values())
        dtypes = ", ".join(f"{count} of {name}" for name, count in Counter(self._dtypes()).items())
        name, kind = self.source.name, self.published.model_type
        return f"{name}: {kind}, {size / 1e9:.2f} GB in tensors: {dtypes}"

    def write_weights(self, path: Path) -> None:
        """Write our `model.safetensors`, with one tensor of theirs in memory at a time."""
        tokenizer = self.source.name if self.source.revision else ""
        header = WeightsHeader(self.model, None, tokenizer, self.origin)
        with TensorWriter(path, self.match.types, header.as_metadata()) as writer:
            progress = tqdm(total=len(self._dtypes()), unit=" tensors", disable=None)
            for rule in self.rules:
                ours = [self.parameters[name] for name in rule.ours]
                for index, theirs in rule.names(ours[0]):
                    tensor = self.tensors.bits(self.match.names[theirs])
                    for name, part in zip(rule.ours, rule.split(tensor, ours), strict=True):
                        writer.write(name, part, index)
                    progress.update()
            progress.close()

    def _dtypes(self) -> list[str]:
        return [self.tensors.types[name].dtype for name in self.match.names.values()]


def target_folder(name: str) -> Path:
    """The run folder to make: a path, or a name under `runs/`.

    Raises:
        UserError: something is there already.
    """
    target = Path(name) if len(Path(name).parts) > 1 else RUNS / name
    if is_there(target):
        raise UserError(f"{target}: there already; choose another name, or move it away")
    return target


def _fill(found: Import, run: RunFolder, target: Path) -> list[str]:
    """Write `model.json` and `checkpoints/imported/` into an empty folder, to become `target`."""
    run.imported.mkdir(parents=True)
    keys = found.model.model_dump(mode="json", exclude_defaults=True)
    root = checkout()
    if root and target.resolve().is_relative_to(root):
        schema = os.path.relpath(root / "schemas" / "model.schema.json", target.resolve())
        keys = {"$schema": Path(schema).as_posix()} | keys
    (run.path / MODEL_FILE).write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    for name in COMPANIONS:
        if is_file(found.source.folder / name):
            shutil.copyfile(found.source.folder / name, run.imported / name)
    notes = convert_tokenizer(run.imported)
    found.write_weights(run.imported / WEIGHTS_FILE)
    return notes


def import_model(
    found: Import, target: Path, check: Callable[[RunFolder], None] = lambda _: None
) -> list[str]:
    """Make a run folder of a published model: all of it, or nothing.

    Args:
        check: called with the folder when it is filled; what it raises undoes the import.

    Returns:
        Lines on what it lacks, and on what was made anew.

    Raises:
        UserError: the folder cannot be written.
    """
    with create_folder(target) as folder:
        run = RunFolder(folder)
        notes = _fill(found, run, target)
        check(run)
        return notes
