"""What a checkpoint records about a run's data: checksums and the tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

from rungs.common.errors import UserError
from rungs.common.shown_text import command_line, quoted
from rungs.config.train_config import TrainConfig
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.data.tokens.dataset import VALIDATION, Dataset

_SHOWN_DIGITS = 16
"""Digits of a sha256 that are enough to distinguish files."""


class Provenance(NamedTuple):
    """Checksums and tokenizer of a run's data, which checkpoints record."""

    datasets: dict[str, dict[str, str]]
    """sha256 of each split's file, by dataset; of each part of a task."""
    tokenizer: str
    """Name of the dataset that has the tokenizer, or the hub id in train.json. A dataset with a
    chat template is preferred, so that the model gets it."""
    tokenizer_file: Path | None

    @classmethod
    def of(cls, train: TrainConfig, datasets: dict[str, Dataset]) -> Self:
        """Return the provenance of a run. Raises UserError if the datasets' tokenizers differ."""
        check_same_tokenizer(datasets, train.tokenizer)
        checksums = {name: dataset.description.checksums for name, dataset in datasets.items()}
        with_template = [name for name in datasets if datasets[name].description.source.chats]
        name = next(iter([*with_template, *datasets]))
        tokenizer_file = datasets[name].tokenizer_file
        return cls(checksums, name if tokenizer_file else train.tokenizer, tokenizer_file)

    @property
    def tokenizer_place(self) -> Path | str:
        """Argument of `load_tokenizer` for this tokenizer."""
        return self.tokenizer_file or self.tokenizer

    def validation_data(self, train: TrainConfig) -> str | None:
        """Identify the run's validation data; see `describe_validation`."""
        return describe_validation(self.datasets, train.validation_tokens, train.start_val_token)

    def check_same_tokens(self, before: dict[str, dict[str, str]]) -> None:
        """Raise UserError if the training tokens differ from a checkpoint's `datasets`. A branch of
        another run may have other datasets."""
        for name, checksums in self.datasets.items():
            was = before[name].get("train") if name in before else checksums["train"]
            if was != checksums["train"]:
                raise UserError(
                    f"dataset {name}: its training tokens are not those this run was started with"
                    f" (sha256 {was}, now {checksums['train']}); copy the dataset's folder"
                    " from where it started (each version of Python has another python-stdlib), or"
                    " start over with --fresh"
                )


def describe_validation(
    datasets: dict[str, dict[str, str]], tokens: int, start_token: int
) -> str | None:
    """Return an identifier of validation data: at most `tokens` tokens from `start_token` on of
    these datasets, given by the sha256 of each split; None if none has a validation split. Losses
    are comparable if identifiers are equal."""
    files = ", ".join(
        f"{name} (sha256 {checksums[VALIDATION][:_SHOWN_DIGITS]})"
        for name, checksums in datasets.items()
        if VALIDATION in checksums
    )
    return f"up to {tokens} tokens from token {start_token} of {files}" if files else None


def check_same_tokenizer(
    datasets: dict[str, Dataset], hub_id: str, model: Path | str | None = None
) -> None:
    """Check that token ids mean the same in all datasets and, if given, to a model. `model` is its
    `tokenizer.json` or a tokenizer's name (a dataset or hub id); `hub_id` is the tokenizer of
    datasets without one. Raises UserError, with all datasets and tokenizers, if two differ."""
    places: dict[str, Path | str] = {
        name: dataset.tokenizer_file or hub_id for name, dataset in datasets.items()
    }
    model = places.get(str(model), model)
    tokenizers = {*places.values(), *([model] if model else [])}
    contents = {place.read_bytes() if isinstance(place, Path) else place for place in tokenizers}
    if len(contents) > 1 and len(set(map(_definition, tokenizers))) > 1:
        pairs = ", ".join(f"{name} ({place})" for name, place in places.items())
        problem = "not the model's tokenizer" if model else "their tokenizers differ"
        has_pairs = any(dataset.holds_pairs for dataset in datasets.values())
        tokenizer = model or next(iter(places.values()))
        raise UserError(
            f"dataset {pairs}: {problem}, so a token id means different things; build another one:"
            f" {_how_to_build(has_pairs, tokenizer)}"
        )


def notes_on_beginnings(datasets: Mapping[str, Dataset], tokenizer: Tokenizer) -> list[str]:
    """Return notes on the tokens that begin sequences of text datasets, with advice for those that
    lack the tokenizer's begin tokens. Pairs and chats always have them."""
    begin = tokenizer.names(tokenizer.begin)
    return [
        f"{name}: each sequence begins with {tokenizer.names(dataset.begin)}, as its texts do"
        if dataset.begin
        else f"{name}: built without {begin}, with which the tokenizer begins texts; a model that"
        f" expects it is worse without: build it again: {_how_to_build(False, dataset.folder)}"
        for name, dataset in datasets.items()
        if not dataset.holds_pairs and (dataset.begin or tokenizer.begin)
    ]


def _how_to_build(has_pairs: bool, tokenizer: Path | str) -> str:
    kind = "--pairs" if has_pairs else "--text"
    build = command_line("download_dataset")
    return f"{build} {kind} FILE --name NAME --tokenizer {quoted(tokenizer)}"


def _definition(place: Path | str) -> str:
    """Return the definition of a tokenizer; one that can't be loaded equals no other."""
    try:
        return load_tokenizer(place).definition
    except UserError:
        return str(place)
