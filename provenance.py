"""Where a run's tokens come from: what its checkpoints record of the data, and bring along."""

import dataclasses
from pathlib import Path
from typing import Self

from config import TrainConfig
from dataset_folder import Dataset
from errors import UserError


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
        files = {name: d.tokenizer_file for name, d in datasets.items() if d.tokenizer_file}
        if len({path.read_bytes() for path in files.values()}) > 1:
            raise UserError(
                f"dataset {', '.join(files)}: made with different tokenizers, so a token id means"
                " different things in them; make them with one (download_dataset.py --tokenizer)"
            )
        checksums: dict[str, dict[str, str]] = {
            name: {split: dataset.description.splits[split].sha256 for split in dataset.splits}
            for name, dataset in datasets.items()
        }
        tokenizer, tokenizer_file = next(iter(files.items()), (train.tokenizer, None))
        return cls(checksums, tokenizer, tokenizer_file)

    def refuse_other_than(self, before: dict[str, dict[str, str]]) -> None:
        """Raises UserError where the training tokens are not those of `before`, as `datasets`."""
        for name, checksums in self.datasets.items():
            if before[name]["train"] != checksums["train"]:
                raise UserError(
                    f"dataset {name}: its training tokens are not those this run was started with"
                    f" (sha256 {before[name]['train']}, now {checksums['train']}); bring those"
                    " back, or start over with --fresh"
                )
