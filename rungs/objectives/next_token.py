"""Next-token training: cross-entropy of the targets, plus load balancing. Objectives of other runs
on datasets are subclasses."""

from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from rungs.checkpointing.load import Start
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import Batch, TrainingData, ValidationData, ValidationSets
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.model.layers import Dropout
from rungs.step.eval_step import Sums
from rungs.step.objective import Aux, Microbatch, Objective, mean_over_targets

PlacedBatch = tuple[jax.Array | None, ...]


class RunData(NamedTuple):
    """The opened data of a run."""

    train: TrainingData
    validation: ValidationSets
    others: dict[str, Dataset]
    """The datasets of `validation_datasets`."""


class NextToken(Objective):
    """The mean over counted targets of cross-entropy and load-balancing loss. Arrays: inputs_BS,
    targets_BS, and optionally starts_BS as for `GPT.forward`."""

    array_names: ClassVar[tuple[str, ...]] = Batch._fields
    """Names of a batch's arrays, in the order of `Microbatch.arrays`."""
    validates_cross_entropy: ClassVar = True
    """Whether the validation loss is in nats per target."""

    def __init__(self, train: TrainConfig) -> None:
        self.train = train

    def loss(self, model: GPT, compute: Compute, microbatch: Microbatch) -> tuple[Array, Aux]:
        tokens_BS, targets_BS, weights_BS = self.given(model, microbatch)
        how = self.dropout(microbatch), compute, self.starts(*microbatch.arrays)
        total, routing = model.summed_loss(tokens_BS, targets_BS, *how, weights_BS)
        targets_BS = microbatch.arrays[1]
        return mean_over_targets(total, targets_BS, routing, self.train.load_balancing_weight)

    def of_logits(self, logits_BSV: Array, *arrays: Any) -> Array:
        return target_losses(logits_BSV, arrays[0]).mean()

    def starts(self, *arrays: Any) -> Array | None:
        return arrays[2] if len(arrays) > 2 else None

    def dropout(self, microbatch: Microbatch) -> Dropout:
        """Return the dropout of a microbatch."""
        return Dropout.of(self.train.drop_rate, microbatch.key, microbatch.sequences_B)

    def open(self, start: Start, data: TrainingData, datasets_dir: Path) -> None:
        """Open and check what the batches need besides `data`, before devices are known. Raises
        UserError."""

    def prepare(self, start: Start, mesh: Mesh, data: RunData) -> None:
        """Compute, on the devices of a run, what its batches need. Raises UserError."""

    def prepare_on_host(self, config: RunConfig, data: TrainingData) -> None:
        """Complete the batches of `data` on one device, for checks."""

    @property
    def record(self) -> dict[str, dict[str, str]]:
        """Checksums of what was opened, for the manifest of checkpoints."""
        return {}

    @property
    def adds_arrays(self) -> bool:
        """Whether `arrays` computes some."""
        return False

    def arrays(self, batch: PlacedBatch) -> PlacedBatch:
        """Return a batch with what is computed beside a step."""
        return batch

    def figures(self, _outputs_ABS: Any, _finite_A: np.ndarray) -> dict[str, Any]:
        """Return further fields of `StepMetrics` from the outputs of a step's microbatches."""
        return {}

    def measure(self, _data: ValidationData, sums: Sums) -> Sums:
        """Return the validation loss; see `eval_step.Measure`."""
        return sums

    def validation_figures(self, _data: ValidationData, _sums: Sums) -> dict[str, Any]:
        """Return further fields of `StepMetrics` from a validation."""
        return {}
