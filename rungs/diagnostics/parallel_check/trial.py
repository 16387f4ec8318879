"""A run's first steps, trained in every mode and every split of the accumulation.

All start from the same weights and take the same sequences, so that they differ by the rounding of
sums in another order, and by nothing else. Axes as in `step.py`.
"""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from rungs.checkpointing.restore import place_starting_weights
from rungs.checkpointing.start_from import find_starting_weights
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.config.train_config import Mode, ShardingConfig, mode_problem
from rungs.data.catalog import open_dataset
from rungs.data.loader import Batch, TrainingData
from rungs.data.sequences import IGNORED
from rungs.model.gpt import GPT
from rungs.optim.multi_steps import MultiSteps
from rungs.parallel.devices import memory_bytes
from rungs.parallel.mesh import create_mesh
from rungs.parallel.sharding import Layout, place_batch
from rungs.planning.compiled_communication import Traffic, collectives, summary
from rungs.run.folder import RunFolder
from rungs.step.state import AbstractState, create_model_and_optimizer, named_arrays
from rungs.step.train_step import StepResult, make_train_step

ROUNDING_TOLERANCE = 1e-5
"""How far loss and gradient may be from those of one device, relative. A float32 is rounded by up
to 6e-8 of itself; sums in another order came out at most 2e-7 (loss) and 1e-6 (gradient) apart, in
runs of the ladder and in GPT-2's shape. What is left out of the gradient, or counted twice, shows
where it is more than this share of the whole."""
FEW_TOKENS = 3
"""Tokens that rounding may send to another expert than on one device, where two are as good."""
REROUTED_LOSS_TOLERANCE, REROUTED_GRADIENT_TOLERANCE = 1e-3, 1e-2
"""How far where it did: in runs/mixtral one of 2,048 tokens changed a loss by 6e-5 and a gradient
by 1e-3, two of 256 by 3e-4 and 7e-3."""
_MEMORY_FACTOR = 2.5
"""Memory in a step, of all devices, over that of parameters and optimizer state: at most 2 in
gpt2-small, of short sequences."""
_LARGE_BYTES = 1e9
"""With more parameters and optimizer state the step is compiled for speed: a few steps that are not
take longer then than the compiler is faster."""
_MEAN_OF_GRADIENTS = ".mu."
"""In the dotted names of AdamW's first moments."""


class TrialLimits(NamedTuple):
    """How much of a run is trained, at most."""

    steps: int
    sequences: int
    """Of a step."""
    tokens: int
    """Of a sequence."""


class ParallelCase(NamedTuple):
    """One way to train."""

    mode: Mode
    data: int
    tensor: int
    microbatches: int
    microbatch_size: int
    balanced: bool
    """Whether the load-balancing loss of experts is trained on."""


class TrialResult(NamedTuple):
    """What came of it."""

    losses: np.ndarray
    """Of each step, nats per target that counts."""
    gradient: dict[str, np.ndarray]
    """Of the first step, by name of the parameter, before clipping."""
    expert_tokens: np.ndarray
    """Of each step; mixture of experts: for each layer and expert; else 0."""
    bytes_per_device: int
    """Of parameters and optimizer state after the last step, on the device with most."""
    traffic: list[Traffic]
    """Of the compiled step."""


class Difference(NamedTuple):
    """How far an outcome is from that of one device, relative."""

    loss: float
    """The largest of all steps."""
    gradient: float
    """Norm of the difference over the norm, all parameters together."""
    most_in: str
    """The parameter with the largest part in it."""
    rerouted: int
    """Tokens that went to another expert, in the step with most."""

    @property
    def is_rerouted(self) -> bool:
        """Whether it went to other experts by rounding alone."""
        return 0 < self.rerouted <= FEW_TOKENS

    @property
    def tolerances(self) -> tuple[float, float]:
        """For loss and gradient."""
        if self.is_rerouted:
            return REROUTED_LOSS_TOLERANCE, REROUTED_GRADIENT_TOLERANCE
        return ROUNDING_TOLERANCE, ROUNDING_TOLERANCE

    @property
    def exceeds(self) -> tuple[bool, bool]:
        """Whether loss and gradient are further away than they may be; what is no number is."""
        loss, gradient = self.tolerances
        return not self.loss <= loss, not self.gradient <= gradient


class Trial(NamedTuple):
    """The first steps of a run, cut to a size."""

    config: RunConfig
    """Computed in float32, whose rounding is known, and without warm-up: the first updates would
    be too small to be seen in the losses."""
    batches: list[Batch]
    total_steps: int
    before: Weights | None
    """The weights that it starts from; random ones where there are none."""

    @classmethod
    def of_run(
        cls, run: RunFolder, config: RunConfig, datasets_dir: Path, limits: TrialLimits
    ) -> Self:
        """A run as it starts, whatever it has been trained to.

        Raises:
            UserError: the run and its data do not fit together.
        """
        before, names = find_starting_weights(run, config), config.train.datasets
        datasets = {name: open_dataset(name, datasets_dir, update=False) for name in names}
        data = TrainingData(config, datasets)
        return cls.of(config, data, before, limits)

    @classmethod
    def of(
        cls, config: RunConfig, data: TrainingData, before: Weights | None, limits: TrialLimits
    ) -> Self:
        """What the limits leave of a run's first steps.

        Raises:
            UserError: none of the tokens that are left is a target.
        """
        train = config.train
        count = min(train.sequences_per_step, limits.sequences)
        microbatches = train.gradient_accumulation_steps
        if count < train.sequences_per_step:
            microbatches = 2 if microbatches > 1 and count % 2 == 0 else 1
        changes = {
            "gradient_accumulation_steps": microbatches,
            "microbatch_size": count // microbatches,
            "compute_dtype": "float32",
            "optimizer": "adamw",
            "warmup_period_percent": 0.0,
        }
        steps = range(min(limits.steps, data.total_steps))
        batches = [_cut(data.batch(step), count, limits.tokens) for step in steps]
        if not all((batch.targets_ABS != IGNORED).any() for batch in batches):
            raise UserError(
                f"no target is among the first {limits.tokens} tokens of the sequences;"
                " raise --tokens"
            )
        cut = RunConfig(config.model, train.model_copy(update=changes))
        return cls(cut, batches, data.total_steps, before)

    def reference(self, balanced: bool | None = None) -> ParallelCase:
        """One device, with the run's own split."""
        train = self.config.train
        split = train.gradient_accumulation_steps, train.microbatch_size
        return ParallelCase(
            "dp", 1, 1, *split, self._balances(*split) if balanced is None else balanced
        )

    def _balances(self, *split: int) -> bool:
        """The load-balancing loss is one of each microbatch, so its gradient is comparable in the
        run's own split only."""
        model, train = self.config
        own = train.gradient_accumulation_steps, train.microbatch_size
        return bool(model.n_experts and train.load_balancing_weight) and split == own

    def meshes(self, devices: int) -> tuple[list[tuple[Mode, int, int]], list[str]]:
        """Mode, data and tensor of the largest meshes that fit, one device first; and a line for
        each reason why one of all the devices does not."""
        fitting: list[tuple[Mode, int, int]] = [("dp", 1, 1)]
        reasons: list[str] = []
        for mode in get_args(Mode):
            for count in range(devices, 1, -1):
                misfits = {shape: self._misfits(mode, *shape) for shape in _shapes(mode, count)}
                if count == devices:
                    reasons += [
                        f"{mode} {data}×{tensor} does not fit: {line}"
                        for (data, tensor), lines in misfits.items()
                        for line in lines
                    ]
                if fits := [(mode, *shape) for shape, lines in misfits.items() if not lines]:
                    fitting += fits
                    break
        return fitting, reasons

    def splits(self, mode: Mode, data: int, tensor: int) -> Iterator[ParallelCase]:
        """Every split of the accumulation on a mesh."""
        count = self.config.train.sequences_per_step
        for microbatches in _divisors(count):
            split = microbatches, count // microbatches
            if split[1] % data == 0:
                yield ParallelCase(mode, data, tensor, *split, self._balances(*split))

    def _misfits(self, mode: Mode, data: int, tensor: int) -> list[str]:
        """Why a mesh is none for this trial."""
        lines = Layout(_mesh(data, tensor), mode).problems(self.config.model)
        if (count := self.config.train.sequences_per_step) % data:
            lines.append(f"{count} sequences do not divide by {data}")
        if lines:
            return lines
        needed = _MEMORY_FACTOR * self._state_bytes(
            ParallelCase(mode, data, tensor, 1, count, False)
        )
        if needed > (there := memory_bytes()):
            lines.append(f"takes about {needed / 1e9:,.0f} GB of memory, of {there / 1e9:,.0f}")
        return lines

    def _state_bytes(self, case: ParallelCase) -> int:
        """Of parameters and optimizer state, on all devices together."""
        config, mesh = self.config_of(case), _mesh(case.data, case.tensor)
        abstract = AbstractState(config, self.total_steps, mesh)
        arrays = *abstract.weights.values(), *abstract.optimizer.values()
        return mesh.size * sum(
            math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
            for array in arrays
            if array.sharding is not None
        )

    def config_of(self, case: ParallelCase) -> RunConfig:
        """The run's config, trained in this way."""
        changes: dict[str, Any] = {
            "sharding": ShardingConfig(mode=case.mode, data=case.data, tensor=case.tensor),
            "gradient_accumulation_steps": case.microbatches,
            "microbatch_size": case.microbatch_size,
        }
        if not case.balanced:
            changes["load_balancing_weight"] = 0.0
        model, train = self.config
        return RunConfig(model, train.model_copy(update=changes))

    def train(self, case: ParallelCase) -> TrialResult:
        """Train the steps."""
        config, mesh = self.config_of(case), _mesh(case.data, case.tensor)
        weights = place_starting_weights(self.before, config, self.total_steps, mesh)
        model, optimizer = create_model_and_optimizer(config, self.total_steps, mesh, weights)
        shape = (case.microbatches, case.microbatch_size, -1)
        batches = [
            place_batch(mesh, *(array.reshape(shape) for array in batch)) for batch in self.batches
        ]
        lowered = make_train_step(config.train, mesh).lower(model, optimizer, *batches[0])  # type: ignore[attr-defined]
        level = 2 if mesh.size * _bytes_per_device(model, optimizer) > _LARGE_BYTES else 0
        compiled = lowered.compile({"xla_backend_optimization_level": level})
        results: list[StepResult] = []
        gradient: dict[str, np.ndarray] = {}
        for batch in batches:
            result = StepResult(*jax.device_get(tuple(compiled(model, optimizer, *batch))))
            gradient = gradient or _gradient(config, optimizer, result)
            results.append(result)
        return TrialResult(
            np.array([_loss(result) for result in results]),
            gradient,
            np.stack([result.routing.counts_E if result.routing else 0 for result in results]),
            _bytes_per_device(model, optimizer),
            summary(collectives(compiled.as_text()), mesh),
        )


def compare(found: TrialResult, expected: TrialResult) -> Difference:
    """How far they are from each other."""
    squares = {
        name: _square(found.gradient[name] - array) for name, array in expected.gradient.items()
    }
    norm = math.sqrt(sum(map(_square, expected.gradient.values())))
    moved = np.abs(found.expert_tokens - expected.expert_tokens).reshape(len(found.losses), -1)
    return Difference(
        float(np.abs(found.losses / expected.losses - 1).max()),
        math.sqrt(sum(squares.values())) / norm,
        max(squares, key=lambda name: squares[name]),
        int(moved.sum(axis=-1).max()) // 2,
    )


def _cut(batch: Batch, sequences: int, tokens: int) -> Batch:
    """The first of its sequences, in one microbatch, and their first tokens."""
    length = batch.inputs_ABS.shape[-1]
    return Batch(*(array.reshape(1, -1, length)[:, :sequences, :tokens] for array in batch))


def _loss(result: StepResult) -> float:
    """The mean over the targets that count."""
    counts = result.finite_A & (result.weights_A > 0)
    losses_A = result.losses_A[counts].astype(np.float64)
    return float(np.average(losses_A, weights=result.weights_A[counts]))


def _gradient(
    config: RunConfig, optimizer: MultiSteps, result: StepResult
) -> dict[str, np.ndarray]:
    """What the first update was made of: AdamW's mean of gradients, which starts at 0, then holds
    (1 − beta1) of it, clipped."""
    train, norm = config.train, float(result.gradient_norm)
    limit = train.clipping_max_norm
    scale = (1 - train.beta1) * (limit / norm if limit and result.clipped else 1)
    return {
        name.partition(_MEAN_OF_GRADIENTS)[2]: np.asarray(array) / np.float32(scale)
        for name, array in named_arrays(optimizer, config.model.vocab_size).items()
        if _MEAN_OF_GRADIENTS in name
    }


def _bytes_per_device(model: GPT, optimizer: MultiSteps) -> int:
    held: Counter[jax.Device] = Counter()
    for array in (*named_arrays(model).values(), *named_arrays(optimizer).values()):
        for part in array.addressable_shards:
            held[part.device] += part.data.nbytes
    return max(held.values())


def _square(array: np.ndarray) -> float:
    """The sum of the squares."""
    return float(np.square(array, dtype=np.float64).sum())


def _mesh(data: int, tensor: int) -> Mesh:
    return create_mesh((data, tensor), devices=jax.devices()[: data * tensor])


def _shapes(mode: Mode, devices: int) -> list[tuple[int, int]]:
    """Data × tensor of the meshes that a mode can have."""
    shapes = [(data, devices // data) for data in _divisors(devices)]
    return [shape for shape in shapes if mode_problem(mode, *shape) is None]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
