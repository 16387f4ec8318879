"""Parallel check: train a run's first steps in every sharding mode and every accumulation split.

All cases start from the same weights and use the same sequences. They may differ only by rounding,
because sums are computed in another order. Axes as in `rungs/step/train_step.py`.
"""

import math
import time
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
"""Largest relative difference of loss and gradient from one device. A float32 is rounded by up to
6e-8 of its value. Sums in another order differed by at most 2e-7 (loss) and 1e-6 (gradient) in the
committed runs and in GPT-2's shape. A part of the gradient that is missing or counted twice is
found if it is more than this share of the total."""
MAX_REROUTED_TOKENS = 3
"""Tokens that rounding may send to another expert, if two experts score almost the same."""
REROUTED_LOSS_TOLERANCE, REROUTED_GRADIENT_TOLERANCE = 1e-3, 1e-2
"""Tolerances in that case. In runs/mixtral, one of 2,048 tokens changed a loss by 6e-5 and a
gradient by 1e-3; two of 256 tokens, by 3e-4 and 7e-3."""
_MEMORY_FACTOR = 2.5
"""Memory of a step, on all devices together, relative to parameters and optimizer state: at most 2
in gpt2-small with short sequences."""
_LARGE_BYTES = 1e9
"""With more parameters and optimizer state, the step is compiled with optimizations: they then save
more time than they cost, even for a few steps."""
_FIRST_MOMENT = ".mu."
"""In the dotted names of AdamW's first moments."""
_ROW = "{:8} {:>11} {:>7}  {:>9} {:>9} {:>12}  {}"
_HEADER_ROW = _ROW.format(
    "mode", "data×tensor", "A×B", "loss", "gradient", "bytes/device", "sent per device and step"
)
_INDENT = " " * len(_ROW.format(*[""] * 7))


class ParallelLimits(NamedTuple):
    """Maximum size of what is trained."""

    steps: int
    sequences: int
    """Per step."""
    tokens: int
    """Per sequence."""


class ParallelCase(NamedTuple):
    """A mesh, a sharding mode, and a split of the accumulation."""

    mode: Mode
    data: int
    tensor: int
    microbatches: int
    microbatch_size: int
    balanced: bool
    """Whether the loss includes the load-balancing loss of experts."""


class CaseResult(NamedTuple):
    """Result of training one case."""

    losses: np.ndarray
    """Of each step, in nats per counted target."""
    gradient: dict[str, np.ndarray]
    """Of the first step, by parameter name, before clipping."""
    expert_tokens: np.ndarray
    """Tokens per step, layer and expert; 0 without experts."""
    bytes_per_device: int
    """Parameters and optimizer state after the last step, on the device that holds most."""
    traffic: list[Traffic]
    """Of the compiled step."""


class Difference(NamedTuple):
    """Relative difference from one device."""

    loss: float
    """The largest of all steps."""
    gradient: float
    """Norm of the difference over the norm, of all parameters together."""
    most_in: str
    """The parameter that differs most."""
    rerouted: int
    """Tokens that went to another expert, in the step with the most."""

    @property
    def is_rerouted(self) -> bool:
        """Whether so few tokens went to other experts that rounding explains it."""
        return 0 < self.rerouted <= MAX_REROUTED_TOKENS

    @property
    def tolerances(self) -> tuple[float, float]:
        """Of loss and gradient."""
        if self.is_rerouted:
            return REROUTED_LOSS_TOLERANCE, REROUTED_GRADIENT_TOLERANCE
        return ROUNDING_TOLERANCE, ROUNDING_TOLERANCE

    @property
    def exceeds(self) -> tuple[bool, bool]:
        """Whether loss and gradient exceed their tolerances. NaN does."""
        loss, gradient = self.tolerances
        return not self.loss <= loss, not self.gradient <= gradient


class ParallelCheck(NamedTuple):
    """The first steps of a run, cut to a maximum size."""

    config: RunConfig
    """In float32, to keep rounding small, and without warmup: otherwise the first updates would be
    too small to show in the losses."""
    batches: list[Batch]
    total_steps: int
    start_weights: Weights | None
    """The weights that the run starts from; None: random ones."""

    @classmethod
    def from_run(
        cls, run: RunFolder, config: RunConfig, datasets_dir: Path, limits: ParallelLimits
    ) -> Self:
        """Return the check of a run from its first step, even if it was trained already.

        Raises:
            UserError: the run and its data do not fit together.
        """
        start_weights, names = find_starting_weights(run, config), config.train.datasets
        datasets = {name: open_dataset(name, datasets_dir, update=False) for name in names}
        data = TrainingData(config, datasets)
        return cls.from_data(config, data, start_weights, limits)

    @classmethod
    def from_data(
        cls,
        config: RunConfig,
        data: TrainingData,
        start_weights: Weights | None,
        limits: ParallelLimits,
    ) -> Self:
        """Cut a run's first steps to the limits.

        Raises:
            UserError: none of the remaining tokens is a target.
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
                f"no target among the first {limits.tokens} tokens of the sequences; raise --tokens"
            )
        cut = RunConfig(config.model, train.model_copy(update=changes))
        return cls(cut, batches, data.total_steps, start_weights)

    def reference(self, balanced: bool | None = None) -> ParallelCase:
        """Return the case of one device with the run's own split."""
        train = self.config.train
        split = train.gradient_accumulation_steps, train.microbatch_size
        return ParallelCase(
            "dp", 1, 1, *split, self._balances(*split) if balanced is None else balanced
        )

    def _balances(self, *split: int) -> bool:
        """Whether a split has the load-balancing loss. It is computed per microbatch, so gradients
        that include it can only be compared within one split: the run's own."""
        model, train = self.config
        own = train.gradient_accumulation_steps, train.microbatch_size
        return bool(model.n_experts and train.load_balancing_weight) and split == own

    def meshes(self, devices: int) -> tuple[list[tuple[Mode, int, int]], list[str]]:
        """Return mode, data and tensor of the largest meshes that fit, one device first. Also
        return a line for each reason why a mesh of all devices does not fit."""
        fitting: list[tuple[Mode, int, int]] = [("dp", 1, 1)]
        reasons: list[str] = []
        for mode in get_args(Mode):
            for count in range(devices, 1, -1):
                problems = {shape: self._problems(mode, *shape) for shape in _shapes(mode, count)}
                if count == devices:
                    reasons += [
                        f"{mode} {data}×{tensor} does not fit: {line}"
                        for (data, tensor), lines in problems.items()
                        for line in lines
                    ]
                if fits := [(mode, *shape) for shape, lines in problems.items() if not lines]:
                    fitting += fits
                    break
        return fitting, reasons

    def splits(self, mode: Mode, data: int, tensor: int) -> Iterator[ParallelCase]:
        """Yield every split of the accumulation on a mesh."""
        count = self.config.train.sequences_per_step
        for microbatches in _divisors(count):
            split = microbatches, count // microbatches
            if split[1] % data == 0:
                yield ParallelCase(mode, data, tensor, *split, self._balances(*split))

    def _problems(self, mode: Mode, data: int, tensor: int) -> list[str]:
        """Return the reasons why a mesh does not fit."""
        lines = Layout(_mesh(data, tensor), mode).problems(self.config.model)
        if (count := self.config.train.sequences_per_step) % data:
            lines.append(f"{count} sequences are not divisible by {data}")
        if lines:
            return lines
        needed = _MEMORY_FACTOR * self._state_bytes(
            ParallelCase(mode, data, tensor, 1, count, False)
        )
        if needed > (available := memory_bytes()):
            lines.append(f"needs {needed / 1e9:,.0f} GB of memory, has {available / 1e9:,.0f} GB")
        return lines

    def _state_bytes(self, case: ParallelCase) -> int:
        """Return the bytes of parameters and optimizer state, on all devices together."""
        config, mesh = self.config_of(case), _mesh(case.data, case.tensor)
        abstract = AbstractState(config, self.total_steps, mesh)
        arrays = *abstract.weights.values(), *abstract.optimizer.values()
        return mesh.size * sum(
            math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
            for array in arrays
            if array.sharding is not None
        )

    def config_of(self, case: ParallelCase) -> RunConfig:
        """Return the run's config with the settings of a case."""
        changes: dict[str, Any] = {
            "sharding": ShardingConfig(mode=case.mode, data=case.data, tensor=case.tensor),
            "gradient_accumulation_steps": case.microbatches,
            "microbatch_size": case.microbatch_size,
        }
        if not case.balanced:
            changes["load_balancing_weight"] = 0.0
        model, train = self.config
        return RunConfig(model, train.model_copy(update=changes))

    def train(self, case: ParallelCase) -> CaseResult:
        """Train the steps of a case."""
        config, mesh = self.config_of(case), _mesh(case.data, case.tensor)
        weights = place_starting_weights(self.start_weights, config, self.total_steps, mesh)
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
        return CaseResult(
            np.array([_loss(result) for result in results]),
            gradient,
            np.stack([result.routing.counts_E if result.routing else 0 for result in results]),
            _bytes_per_device(model, optimizer),
            summary(collectives(compiled.as_text()), mesh),
        )


def compare(found: CaseResult, expected: CaseResult) -> Difference:
    """Return how far a result is from the expected one."""
    squares = {
        name: _square(found.gradient[name] - array) for name, array in expected.gradient.items()
    }
    norm = math.sqrt(sum(map(_square, expected.gradient.values())))
    rerouted = np.abs(found.expert_tokens - expected.expert_tokens).reshape(len(found.losses), -1)
    return Difference(
        float(np.abs(found.losses / expected.losses - 1).max()),
        math.sqrt(sum(squares.values())) / norm,
        max(squares, key=lambda name: squares[name]),
        int(rerouted.sum(axis=-1).max()) // 2,
    )


def _cut(batch: Batch, sequences: int, tokens: int) -> Batch:
    """Return the first tokens of the first sequences of a batch, as one microbatch."""
    length = batch.inputs_ABS.shape[-1]
    return Batch(*(array.reshape(1, -1, length)[:, :sequences, :tokens] for array in batch))


def _loss(result: StepResult) -> float:
    """Return the mean loss over the counted targets."""
    counts = result.finite_A & (result.weights_A > 0)
    losses_A = result.losses_A[counts].astype(np.float64)
    return float(np.average(losses_A, weights=result.weights_A[counts]))


def _gradient(
    config: RunConfig, optimizer: MultiSteps, result: StepResult
) -> dict[str, np.ndarray]:
    """Return the gradient of the first step. AdamW's first moment starts at 0, so after one step it
    is the clipped gradient times (1 − beta1)."""
    train, norm = config.train, float(result.gradient_norm)
    limit = train.clipping_max_norm
    scale = (1 - train.beta1) * (limit / norm if limit and result.clipped else 1)
    return {
        name.partition(_FIRST_MOMENT)[2]: np.asarray(array) / np.float32(scale)
        for name, array in named_arrays(optimizer, config.model.vocab_size).items()
        if _FIRST_MOMENT in name
    }


def _bytes_per_device(model: GPT, optimizer: MultiSteps) -> int:
    held: Counter[jax.Device] = Counter()
    for array in (*named_arrays(model).values(), *named_arrays(optimizer).values()):
        for part in array.addressable_shards:
            held[part.device] += part.data.nbytes
    return max(held.values())


def _square(array: np.ndarray) -> float:
    """Return the sum of the squares."""
    return float(np.square(array, dtype=np.float64).sum())


def _mesh(data: int, tensor: int) -> Mesh:
    return create_mesh((data, tensor), devices=jax.devices()[: data * tensor])


def _shapes(mode: Mode, devices: int) -> list[tuple[int, int]]:
    """Return the possible meshes of a mode: data × tensor."""
    shapes = [(data, devices // data) for data in _divisors(devices)]
    return [shape for shape in shapes if mode_problem(mode, *shape) is None]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def run_check(path: Path, config: RunConfig, check: ParallelCheck, devices: int) -> bool:
    """Train every case and print a table, each row as soon as it is known.

    Args:
        path, config: of the run.
        devices: maximum number of devices.

    Returns:
        Whether all differences are within their tolerances.
    """
    meshes, problems = check.meshes(devices)
    cases = [case for mesh in meshes for case in check.splits(*mesh)]
    print(*_header(path, config, check), *problems, "", _HEADER_ROW, sep="\n", flush=True)
    start = time.perf_counter()
    failures = list(_print_rows(check, cases))
    seconds = time.perf_counter() - start
    print(f"\n{len(cases)} cases in {seconds:.0f} s, {len(failures)} above tolerance")
    print(*failures, sep="\n", end="\n" if failures else "")
    return not failures


def _header(path: Path, config: RunConfig, check: ParallelCheck) -> Iterator[str]:
    """Say what is trained, how that differs from the run, and what it is compared with."""
    _, sequences, tokens = check.batches[0].inputs_ABS.shape
    own_sequences, own_tokens = config.train.sequences_per_step, config.sequence_length
    of_sequences = f" of the {own_sequences:,}" * (sequences < own_sequences)
    of_tokens = f" of the {own_tokens:,}" * (tokens < own_tokens)
    own = _columns(check.reference())[2]
    steps = len(check.batches)
    yield (
        f"{path}: the first {steps} step{'s' * (steps > 1)}, each with {sequences:,}{of_sequences}"
        f" sequences of {tokens:,}{of_tokens} tokens,"
    )
    yield "in float32, without warmup, on virtual CPU devices. A×B: A microbatches of B sequences."
    yield (
        f"loss, gradient: relative difference from one device with {own}. Rounding gives at most"
        f" {ROUNDING_TOLERANCE:.0e}; ! marks more."
    )
    yield "bytes/device: parameters and optimizer state."
    if check.reference().balanced:
        yield f"The load-balancing loss depends on the microbatches, so only rows with {own} have"
        yield "it. The others are compared with one device without it."


def _print_rows(check: ParallelCheck, cases: list[ParallelCase]) -> Iterator[str]:
    """Print the row of each case when it is done. Yield a line for each that exceeds tolerance."""
    references: dict[bool, CaseResult] = {}
    for case in cases:
        reference = check.reference(case.balanced)
        if case.balanced not in references:
            references[case.balanced] = check.train(reference)
        expected = references[case.balanced]
        if case == reference:
            print(*_lines(case, expected), sep="\n", flush=True)
            continue
        result = check.train(case)
        difference = compare(result, expected)
        print(*_lines(case, result, difference), sep="\n", flush=True)
        if any(difference.exceeds):
            yield " ".join(_columns(case)) + f": largest difference in {difference.most_in}"


def _lines(
    case: ParallelCase, result: CaseResult, difference: Difference | None = None
) -> Iterator[str]:
    """Yield the lines of a row."""
    size = _format_bytes(result.bytes_per_device)
    traffic, *more = [*map(_format_traffic, result.traffic)] or ["nothing"]
    if difference and difference.rerouted:
        loss, gradient = difference.tolerances
        more.append(
            f"{difference.rerouted} tokens to other experts: tolerances {loss:.0e}, {gradient:.0e}"
        )
    yield _ROW.format(*_columns(case), *_format_difference(difference), size, traffic)
    yield from (_INDENT + line for line in more)


def _columns(case: ParallelCase) -> tuple[str, str, str]:
    """Return mode, mesh and split."""
    split = f"{case.microbatches}×{case.microbatch_size}"
    return case.mode, f"{case.data}×{case.tensor}", split


def _format_difference(difference: Difference | None) -> Iterator[str]:
    """Yield the columns of loss and gradient."""
    if difference is None:
        yield from ("– ", "– ")
        return
    for value, exceeds in zip(difference, difference.exceeds, strict=False):
        yield f"{value:.1e}" + ("!" if exceeds else " ")


def _format_traffic(traffic: Traffic) -> str:
    axes = "+".join(traffic.axes)
    return f"{traffic.kind} {axes}: {traffic.runs:,}, {_format_bytes(traffic.moved_bytes)}"


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB"
