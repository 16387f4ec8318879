"""Where a run's tokens come from: what its checkpoints record of the data, and bring along."""

import dataclasses
from pathlib import Path
from typing import Self

from rungs.common.errors import UserError
from rungs.config.train_config import TrainConfig
from rungs.data.dataset import Dataset
from rungs.data.tokenizer_files import load_tokenizer


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The data of a run, by checksum and tokenizer."""

    datasets: dict[str, dict[str, str]]
    """For each dataset, the sha256 of each split's file."""
    tokenizer: str
    """The dataset that brings its tokenizer along, else the hub id in train.json."""
    tokenizer_file: Path | None

    @classmethod
    def of(cls, train: TrainConfig, datasets: dict[str, Dataset]) -> Self:
        """Raises UserError where the datasets' tokenizers differ."""
        refuse_other_tokenizers(datasets, train.tokenizer)
        checksums: dict[str, dict[str, str]] = {
            name: {split: dataset.description.splits[split].sha256 for split in dataset.splits}
            for name, dataset in datasets.items()
        }
        name, first = next(iter(datasets.items()))
        tokenizer = name if first.tokenizer_file else train.tokenizer
        return cls(checksums, tokenizer, first.tokenizer_file)

    def refuse_other_than(self, before: dict[str, dict[str, str]]) -> None:
        """Raises UserError where the training tokens are not those of `before`, as `datasets`."""
        for name, checksums in self.datasets.items():
            if before[name]["train"] != checksums["train"]:
                raise UserError(
                    f"dataset {name}: its training tokens are not those this run was started with"
                    f" (sha256 {before[name]['train']}, now {checksums['train']}); bring those"
                    " back, or start over with --fresh"
                )


def refuse_other_tokenizers(
    datasets: dict[str, Dataset], hub_id: str, model: Path | str | None = None
) -> None:
    """Refuse datasets whose token ids mean different things, to each other or to a model.

    Args:
        hub_id: tokenizer of datasets that come without one.
        model: a model's `tokenizer.json`, or its tokenizer's name: a dataset's, or a hub id.

    Raises:
        UserError: naming each dataset with its tokenizer.
    """
    places: dict[str, Path | str] = {
        name: dataset.tokenizer_file or hub_id for name, dataset in datasets.items()
    }
    model = places.get(str(model), model)
    every = {*places.values(), *([model] if model else [])}
    contents = {place.read_bytes() if isinstance(place, Path) else place for place in every}
    if len(contents) > 1 and len(set(map(_definition, every))) > 1:
        shown = ", ".join(f"{name} ({place})" for name, place in places.items())
        kind = "not the model's tokenizer" if model else "tokenizers that differ"
        raise UserError(
            f"dataset {shown}: {kind}, so a token id means different things; make it anew with"
            f" download_dataset.py … --tokenizer {model or next(iter(places.values()))}"
        )


def _definition(place: Path | str) -> str:
    """What the tokenizer there is; one that cannot be had is like no other."""
    try:
        return load_tokenizer(place).definition
    except UserError:
        return str(place)
