"""Parallel check: train a run's first steps in every sharding mode and every accumulation split,
with the same weights and sequences. Results may differ only by rounding, from the order of sums.
Axes as in `rungs/step/train_step.py`."""

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from rungs.checkpointing import load, weights_file
from rungs.checks.check import Check, failures, print_checks
from rungs.checks.short_run import ShortRun
from rungs.common.machine import memory_bytes
from rungs.common.shown_text import counted, format_bytes
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import Mode, ShardingConfig, mode_problem
from rungs.data.tokens import loader
from rungs.model.gpt import GPT
from rungs.objectives.table import objective_of
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import CONTEXT, Layout, create_mesh, dotted, place_batch, size_along
from rungs.planning.memory import bytes_per_device
from rungs.step.state import copy_bytes, create_model_and_optimizer, host_arrays, host_copies
from rungs.step.train_step import StepResult, step_function, update_parts
from rungs.training.dataset_learner import MakeObjective

_MEMORY_FACTOR = 2.5
"""Memory of a step over all devices, relative to parameters, gradient and optimizer state: at most
2 in gpt2-small with short sequences."""
_GRADIENT_DIVISORS = (1000.0, 1.0)
"""Divisors of the gradient in the two updates that compare optimizers. In the second, moments are
far smaller than the gradient, and Adafactor clips its updates."""
_LARGE_BYTES = 1e9
"""Bytes of parameters and optimizer state above which compiler optimizations save more time than
they take, even for a few steps."""
ROUNDING_TOLERANCE = 1e-5
"""Largest relative difference of loss, gradient and update from one device. Rounding changes a
float32 by up to 6e-8; in the committed runs and GPT-2's shape, other orders of summation gave at
most 2e-7 (loss) and 1e-6 (gradient). A missing or double-counted part of the gradient is found if
it is more than this share of the total."""
MAX_REROUTED_TOKENS = 3
"""Tokens that rounding may reroute to another expert with almost the same score."""
REROUTED_LOSS_TOLERANCE, REROUTED_GRADIENT_TOLERANCE = 1e-3, 1e-2
"""Tolerances in that case. In runs/mixtral, rerouting one of 2,048 tokens changed a loss by 6e-5
and a gradient by 1e-3; two of 256 tokens, 3e-4 and 7e-3."""


class ParallelCase(NamedTuple):
    """A mesh, a sharding mode, and a split of a step into microbatches."""

    mode: Mode
    data: int
    last: int
    """Devices along the last mesh axis: context in cp, otherwise tensor."""
    microbatches: int
    microbatch_size: int
    balanced: bool
    """Whether the loss includes the load-balancing loss of experts."""

    def __str__(self) -> str:
        split = f"{self.microbatches}×{self.microbatch_size}"
        return f"{self.mode:7} {self.data}×{self.last}, {split}"

    @property
    def sharding(self) -> ShardingConfig:
        return ShardingConfig.of(self.mode, (self.data, self.last))


class CaseResult(NamedTuple):
    """Result of training one case."""

    losses: np.ndarray
    """Loss of each step, in nats per counted target."""
    gradient: dict[str, np.ndarray]
    """Gradient of the first step by parameter name, before clipping."""
    change: dict[str, np.ndarray]
    """Change of each trained parameter in two updates with the gradient of one device."""
    expert_tokens: np.ndarray
    """Tokens by step, layer and expert; 0 without experts."""
    bytes_per_device: int
    """Parameters and optimizer state."""


class ParallelCheck(NamedTuple):
    """The first steps of a run, cut to a maximum size."""

    config: RunConfig
    """In float32, to keep rounding small, and without warm-up, which would make the first updates
    too small to show in the losses."""
    batches: list[loader.Batch]
    total_steps: int
    start_weights: weights_file.Weights | None
    """Weights that the run starts from; None: random ones."""
    make_objective: MakeObjective = objective_of

    @classmethod
    def of(cls, short: ShortRun) -> Self:
        """Return the check of a short run."""
        train, (_, count, length) = short.config.train, short.batches[0].inputs_ABS.shape
        microbatches = train.gradient_accumulation_steps
        if count < train.sequences_per_step:
            microbatches = 2 if microbatches > 1 and count % 2 == 0 else 1
        changes: dict[str, Any] = {
            "gradient_accumulation_steps": microbatches,
            "microbatch_size": count // microbatches,
            "sequence_length": length,
            "compute_dtype": "float32",
            "warmup_period_percent": 0.0,
        }
        cut = short.config._replace(train=train.model_copy(update=changes))
        return cls(cut, short.batches, short.total_steps, short.start_weights)

    def reference(self, balanced: bool | None = None) -> ParallelCase:
        """Return the case of one device with the run's own split."""
        train = self.config.train
        split = train.gradient_accumulation_steps, train.microbatch_size
        return ParallelCase(
            "dp", 1, 1, *split, self._balances(*split) if balanced is None else balanced
        )

    def _balances(self, *split: int) -> bool:
        """Whether a split includes the load-balancing loss, which is computed per microbatch, so
        that gradients are only comparable within one split: the run's own."""
        model, train = self.config
        own = train.gradient_accumulation_steps, train.microbatch_size
        return bool(model.n_experts and train.load_balancing_weight) and split == own

    def meshes(self, devices: int) -> tuple[list[tuple[Mode, int, int]], list[str]]:
        """Return mode and sizes of the largest meshes that fit, one device first, and a line for
        each reason why a mesh of all devices does not fit."""
        fitting: list[tuple[Mode, int, int]] = [("dp", 1, 1)]
        reasons: list[str] = []
        for mode in get_args(Mode):
            for count in range(devices, 1, -1):
                problems = {shape: self._problems(mode, *shape) for shape in _shapes(mode, count)}
                if count == devices:
                    reasons += [
                        f"{mode} {data}×{last} does not fit: {line}"
                        for (data, last), lines in problems.items()
                        for line in lines
                    ]
                if fits := [(mode, *shape) for shape, lines in problems.items() if not lines]:
                    fitting += fits
                    break
        return fitting, reasons

    def splits(self, mode: Mode, data: int, last: int) -> Iterator[ParallelCase]:
        """Yield every split into microbatches on a mesh."""
        count = self.config.train.sequences_per_step
        for microbatches in _divisors(count):
            split = microbatches, count // microbatches
            if split[1] % (data * self.config.train.sequences_per_example) == 0:
                yield ParallelCase(mode, data, last, *split, self._balances(*split))

    def _problems(self, mode: Mode, data: int, last: int) -> list[str]:
        """Return the reasons why a mesh does not fit."""
        mesh = mesh_of(ShardingConfig.of(mode, (data, last)))
        lines = Layout(mesh, mode).problems(self.config.model)
        train = self.config.train
        if (count := train.sequences_per_step) % (data * train.sequences_per_example):
            lines.append(f"{count} sequences are not divisible by {data}")
        if (length := self.config.sequence_length) % (parts := size_along(mesh, CONTEXT)):
            lines.append(f"sequences of {length} tokens are not divisible by {parts}")
        copies = data if mode == "dp" else 1
        needed, available = _MEMORY_FACTOR * copies * copy_bytes(self.config), memory_bytes()
        if needed > available:
            lines.append(f"needs {needed / 1e9:,.0f} GB of memory, has {available / 1e9:,.0f} GB")
        return lines

    def config_of(self, case: ParallelCase) -> RunConfig:
        """Return the run's config with the settings of a case."""
        changes: dict[str, Any] = {
            "sharding": case.sharding,
            "gradient_accumulation_steps": case.microbatches,
            "microbatch_size": case.microbatch_size,
        }
        if not case.balanced:
            changes["load_balancing_weight"] = 0.0
        model, train = self.config
        return RunConfig(model, train.model_copy(update=changes))

    def train(
        self, case: ParallelCase, gradient: dict[str, np.ndarray] | None = None
    ) -> CaseResult:
        """Train the steps of a case. The optimizer's change is computed from `gradient`, the
        reference's, or by default its own."""
        result = self._train_steps(case)
        return result._replace(change=self._change(case, gradient or result.gradient))

    def _train_steps(self, case: ParallelCase) -> CaseResult:
        config, mesh = self.config_of(case), mesh_of(case.sharding)
        model, optimizer = self._create(config, mesh)

        def split(array: np.ndarray) -> np.ndarray:
            return array.reshape(case.microbatches, case.microbatch_size, *array.shape[2:])

        batches = [place_batch(mesh, *jax.tree.map(split, tuple(batch))) for batch in self.batches]
        objective, layout = self.make_objective(config.train), Layout.of(case.sharding, mesh)
        kept = step_function(objective, config.train, layout, keeps_gradient=True)
        step = nnx.jit(kept, donate_argnums=(0, 1))
        lowered: Any = step.lower(model, optimizer, *batches[0])
        state_bytes = bytes_per_device(jax.tree.leaves((nnx.state(model), nnx.state(optimizer))))
        level = 2 if mesh.size * state_bytes > _LARGE_BYTES else 0
        compiled = lowered.compile({"xla_backend_optimization_level": level})
        results: list[StepResult] = []
        gradient: dict[str, np.ndarray] = {}
        for batch in batches:
            result = compiled(model, optimizer, *batch)
            gradient = gradient or host_arrays(result.gradient, config.model.vocab_size)
            results.append(jax.device_get(result._replace(gradient=())))
        return CaseResult(
            np.array([result.trained_loss for result in results], float),
            gradient,
            {},
            np.stack([result.routing.counts_E if result.routing else 0 for result in results]),
            state_bytes,
        )

    def _change(self, case: ParallelCase, gradient: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the change of each trained parameter in two updates with a gradient. A small error
        of the optimizer hardly shows in losses, and gradients that differ by rounding can move a
        parameter in opposite directions."""
        config, mesh = self.config_of(case), mesh_of(case.sharding)
        model, optimizer = self._create(config, mesh)
        before = host_copies(model, config.model.vocab_size)
        placed = nnx.state(model, optimizer.wrt)
        for path, param in nnx.to_flat_state(placed):
            param.set_value(load.place_padded(gradient[dotted(path)], param.get_value()))
        update = nnx.jit(functools.partial(update_parts, Layout.of(config.train.sharding, mesh)))
        for divisor in _GRADIENT_DIVISORS:
            update(model, optimizer, placed, jnp.asarray(divisor))
        after = host_copies(model, config.model.vocab_size)
        return {name: after[name] - before[name] for name in gradient}

    def _create(self, config: RunConfig, mesh: Mesh) -> tuple[GPT, SkippingOptimizer]:
        weights = load.place_starting_weights(self.start_weights, config, self.total_steps, mesh)
        return create_model_and_optimizer(config, self.total_steps, mesh, weights)


def mesh_of(sharding: ShardingConfig) -> Mesh:
    """Return a mesh of the first devices."""
    devices = jax.devices()[: math.prod(sharding.sizes)]
    return create_mesh(sharding.sizes, sharding.axes, devices)


def _shapes(mode: Mode, devices: int) -> list[tuple[int, int]]:
    """Return the possible meshes of a mode."""
    shapes = [(data, devices // data) for data in _divisors(devices)]
    return [shape for shape in shapes if mode_problem(mode, *shape) is None]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


class Difference(NamedTuple):
    """Relative difference from one device."""

    loss: float
    """The largest of all steps."""
    gradient: float
    """Norm of the difference over the norm, over all parameters."""
    update: float
    """The same for the optimizer's change from the same gradient."""
    most_in: str
    """The parameter with the largest difference in gradient or, if gradients agree, in change."""
    rerouted: int
    """Tokens routed to another expert, in the step with the most."""

    @property
    def tolerances(self) -> tuple[float, float, float]:
        """The tolerances of loss, gradient and update."""
        if 0 < self.rerouted <= MAX_REROUTED_TOKENS:  # few enough to be explained by rounding
            return REROUTED_LOSS_TOLERANCE, REROUTED_GRADIENT_TOLERANCE, ROUNDING_TOLERANCE
        return ROUNDING_TOLERANCE, ROUNDING_TOLERANCE, ROUNDING_TOLERANCE

    @property
    def exceeds(self) -> tuple[bool, bool, bool]:
        """Whether loss, gradient and update exceed their tolerances, as NaN does."""
        loss, gradient, update = self.tolerances
        return not self.loss <= loss, not self.gradient <= gradient, not self.update <= update


def run_check(path: Path, config: RunConfig, check: ParallelCheck, devices: int) -> bool:
    """Train every case on at most `devices` devices and print a table, each row as soon as it is
    known. Return whether all differences are within their tolerances."""
    meshes, problems = check.meshes(devices)
    print(*_header(path, config, check), *problems, "", sep="\n", flush=True)
    return not failures(print_checks(_checks(check, meshes)))


def _header(path: Path, config: RunConfig, check: ParallelCheck) -> Iterator[str]:
    """Describe the training, how it differs from the run, and the reference."""
    _, sequences, tokens = check.batches[0].inputs_ABS.shape
    own_sequences, own_tokens = config.train.sequences_per_step, config.sequence_length
    of_sequences = f" of the {own_sequences:,}" * (sequences < own_sequences)
    of_tokens = f" of the {own_tokens:,}" * (tokens < own_tokens)
    yield (
        f"{path}: the first {counted(len(check.batches), 'step')}, each with {sequences:,}"
        f"{of_sequences} sequences of {tokens:,}{of_tokens} tokens,"
    )
    yield "in float32, without warm-up, on virtual CPU devices."
    yield "A row is a mode, devices along data × tensor (in cp, context), microbatches × sequences."
    yield f"Relative differences from {check.reference()} of loss, gradient, and the change that"
    yield f"{config.train.optimizer} makes with the same gradient; bytes of weights and moments."
    if check.reference().balanced:
        yield "The load-balancing loss depends on the microbatches: rows with others are compared"
        yield "with one device without it."


def _checks(check: ParallelCheck, meshes: list[tuple[Mode, int, int]]) -> Iterator[Check]:
    """Yield the comparison of each case with its reference."""
    references: dict[bool, CaseResult] = {}
    for case in (case for mesh in meshes for case in check.splits(*mesh)):
        reference = check.reference(case.balanced)
        if case.balanced not in references:
            references[case.balanced] = check.train(reference)
        expected = references[case.balanced]
        if case != reference:
            yield _as_check(case, check.train(case, expected.gradient), expected)


def _as_check(case: ParallelCase, result: CaseResult, expected: CaseResult) -> Check:
    difference = compare(result, expected)
    passed, notes = not any(difference.exceeds), []
    if difference.rerouted:
        notes.append(f"{counted(difference.rerouted, 'token')} to other experts")
    if not passed:
        notes.append(f"largest difference in {difference.most_in}")
    limits = " ".join(f"{limit:.0e}" for limit in dict.fromkeys(difference.tolerances))
    values = " ".join(f"{value:.1e}" for value in difference[:3])
    notes.append(f"{format_bytes(result.bytes_per_device)} per device")
    return Check(str(case), values, limits, passed, tuple(notes))


def compare(found: CaseResult, expected: CaseResult) -> Difference:
    """Return the differences of a result from the expected one."""
    gradient, most_in_gradient = relative_difference(found.gradient, expected.gradient)
    update, most_in_change = relative_difference(found.change, expected.change)
    rerouted = np.abs(found.expert_tokens - expected.expert_tokens).reshape(len(found.losses), -1)
    return Difference(
        float(np.abs(found.losses / expected.losses - 1).max()),
        gradient,
        update,
        most_in_change if gradient <= ROUNDING_TOLERANCE < update else most_in_gradient,
        int(rerouted.sum(axis=-1).max()) // 2,
    )


def relative_difference(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> tuple[float, str]:
    """Return the norm of all differences over the norm of all expected values, and the name with
    the largest difference."""
    squares = {name: _square(found[name] - array) for name, array in expected.items()}
    apart, norm = math.sqrt(sum(squares.values())), math.sqrt(sum(map(_square, expected.values())))
    most_in = max(squares, key=lambda name: squares[name])
    return (apart / norm if norm else math.inf if apart else 0.0), most_in


def _square(array: np.ndarray) -> float:
    """Return the sum of the squares."""
    return float(np.square(array, dtype=np.float64).sum())
