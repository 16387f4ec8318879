"""The log-probabilities of answers under the reference, the weights that a run starts from. They
are computed once and stored in the dataset's folder, a file for each reference and split:

datasets/NAME/reference-train-0123456789abcdef.safetensors

with a float32 tensor `log_probs`, one number per answer. The name and the metadata have checksums
of the weights, the tokenizer and the answers, so every run with the same ones reuses the file."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from rungs.checkpointing.load import find_starting_weights, load_frozen
from rungs.checkpointing.manifest import file_checksum
from rungs.checkpointing.weights_file import Weights
from rungs.common import disk
from rungs.common.errors import UserError
from rungs.common.shown_text import counted
from rungs.config.run_config import RunConfig
from rungs.data.dataset import Dataset, Split
from rungs.data.loader import ValidationData
from rungs.parallel import processes
from rungs.step.eval_step import make_evaluation_step, sequence_losses
from rungs.training.learner import Start

log = logging.getLogger("rungs")

RECORD = "(reference)"
"""Key of the checksum of the reference among those of datasets in a checkpoint's manifest."""
_LOG_PROBS = "log_probs"
_ALL_TOKENS = 2**62


class Stored(NamedTuple):
    """The place of stored log-probabilities, and what they depend on."""

    path: Path
    key: dict[str, str]

    @classmethod
    def of(cls, dataset: Dataset, split: Split, weights: str, config: RunConfig) -> "Stored":
        file = dataset.tokenizer_file
        key = {
            "weights": weights,
            "tokenizer": file_checksum(file) or "" if file else config.train.tokenizer,
            "answers": dataset.description.splits[split].sha256,
            "compute_dtype": config.train.compute_dtype,
        }
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return cls(dataset.folder / f"reference-{split}-{name}.safetensors", key)

    def read(self) -> np.ndarray | None:
        """Return the numbers, None if they are missing or damaged."""
        try:
            with safe_open(self.path, framework="np") as file:
                found: np.ndarray = file.get_tensor(_LOG_PROBS)
                metadata = file.metadata()
        except (OSError, SafetensorError):
            return None
        return found if metadata == self._metadata(found) else None

    def write(self, log_probs: np.ndarray) -> None:
        """Store the numbers, if the folder can be written."""
        content = safetensors.numpy.save({_LOG_PROBS: log_probs}, self._metadata(log_probs))
        try:
            disk.replace_file(self.path, content)
        except OSError as error:
            log.warning("%s: not stored, so computed anew each start: %s", self.path, error)

    def _metadata(self, log_probs: np.ndarray) -> dict[str, str]:
        return self.key | {_LOG_PROBS: hashlib.sha256(log_probs.tobytes()).hexdigest()}


@dataclasses.dataclass
class Reference:
    """The reference of a run."""

    start: Start
    mesh: Mesh

    def __post_init__(self) -> None:
        saved = self.start.saved
        self._recorded = saved.meta.datasets.get(RECORD, {}).get("weights") if saved else None
        self.checksum = self._recorded or self._find_weights().sha256()

    def _find_weights(self) -> Weights:
        weights = find_starting_weights(self.start.run, self.start.config)
        assert weights is not None  # start_from is required
        return weights

    def log_probs(self, datasets: Mapping[str, Dataset], split: Split) -> dict[str, np.ndarray]:
        """Return the log-probability of each answer of the datasets that have the split, from its
        file or computed. Raises UserError if the weights were replaced since the run started."""
        here = {name: one for name, one in datasets.items() if split in one.description.splits}
        config: RunConfig = self.start.config
        stored = {name: Stored.of(one, split, self.checksum, config) for name, one in here.items()}
        found = {
            name: log_probs
            for name, place in stored.items()
            if (log_probs := place.read()) is not None
        }
        if not processes.AnyProcess(self.mesh)(len(found) < len(here)):
            return found
        computed = self._compute(here, split)
        if processes.is_first_process():
            for name, log_probs in computed.items():
                stored[name].write(log_probs)
        return computed

    def _compute(self, datasets: Mapping[str, Dataset], split: Split) -> dict[str, np.ndarray]:
        weights, config = self._find_weights(), self.start.config
        if self._recorded and weights.sha256() != self._recorded:
            raise UserError(
                f"{self.start.run.path / config.train_file}: start_from: {weights.path} is not"
                " what this run was started with, and the reference's log-probabilities are no"
                " longer stored; restore one of the two, or start over with --fresh"
            )
        model = load_frozen(weights, config, self.mesh)
        step, found = make_evaluation_step(config.train, self.mesh), {}
        for name, dataset in datasets.items():
            changes = {"dataset": name, "validation_tokens": _ALL_TOKENS}
            own = config._replace(train=config.train.model_copy(update=changes))
            data = ValidationData(own, {name: dataset}, split)
            log.info("reference: %s of %s (%s)", counted(data.sequences, "answer"), name, split)
            losses_N, _ = sequence_losses(model, step, data, self.mesh)
            found[name] = (-losses_N).astype(np.float32)
        return found
