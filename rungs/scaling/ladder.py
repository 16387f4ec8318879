"""A ladder of runs: for a compute budget, and for smaller ones on the way to it, the model and the
training that make the most of it.

All are of the kind of one run: its architecture, vocabulary, dataset and sequence length stay.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.data.dataset import Dataset
from rungs.data.loader import TrainingData
from rungs.planning.flops import TOKENS_PER_PARAMETER, active_parameters, conventional_flops
from rungs.run.derive import NewRun
from rungs.scaling import widths
from rungs.step.state import shapes_of

SPACING = math.sqrt(10)
"""From one budget to the next."""
ASPECT_RATIOS = (96, 64, 48, 32)
"""emb_dim ÷ n_layers of the shapes that are looked at: around them the loss hardly depends on it
(Kaplan et al. 2020, figure 5)."""
_FINEST = 16
"""Widths that are looked at lie this share of themselves apart at least."""
_LEAST_SHARE = 0.7
"""Of the usual tokens for each parameter, which the first rung is to have."""
_TUNED = ("adamw", "muon")
"""Optimizers whose updates are of the size that the law for learning rates was found with."""


class ModelSize(NamedTuple):
    """A model by its size."""

    changes: dict[str, Any]
    """The keys of `model.json` that make it."""
    parameters: int
    """That a token meets."""
    flops_per_token: float

    def tokens(self, budget: float) -> float:
        """That a budget, in FLOPs, lasts for."""
        return budget / self.flops_per_token

    def tokens_per_parameter(self, budget: float) -> float:
        """As `tokens`, for each parameter."""
        return self.tokens(budget) / self.parameters


class Rung(NamedTuple):
    """A run of the ladder."""

    budget: float
    """FLOPs."""
    shape: ModelSize
    changes: dict[str, Any]
    """All keys in which it differs from the run that it is made from."""
    config: RunConfig
    """With these."""
    steps: int
    tokens_per_step: int

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> float:
        """What it takes, in whole steps."""
        return self.tokens * self.shape.flops_per_token


def propose(
    config: RunConfig, budget: float, count: int, datasets: Mapping[str, Dataset]
) -> list[Rung]:
    """The rungs up to a budget, the largest last.

    The shape is the one with nearest to `estimate.TOKENS_PER_PARAMETER` tokens for each parameter
    of those with a usual ratio of width to depth.

    Args:
        config: of the run whose kind they are.
        budget: FLOPs of the last one.
        datasets: those of the run's that are here. Where that is all, they are repeated as often as
            the tokens take.

    Raises:
        UserError: the run is not of a kind that can be scaled, or a budget is too small for it, or
            too large for the datasets.
    """
    _refuse_misfits(config)
    budgets = [budget / SPACING**rest for rest in reversed(range(count))]
    shapes = list(_shapes(config, budget))
    _refuse_too_small(budgets, shapes[0], count)
    return [_rung(config, one, _best(shapes, one), datasets) for one in budgets]


def make(rungs: list[Rung], origin: Path, folder: Path) -> list[Path]:
    """Write the run folders; none where something else is in the place of one.

    Args:
        origin: the run folder that they are made from.
        folder: to hold them.

    Raises:
        UserError: something else is there.
    """
    runs = [
        NewRun.of(folder / f"rung-{number}", origin, rung.changes)
        for number, rung in enumerate(rungs, start=1)
    ]
    return [run.make() for run in runs]


def learning_rate(flops: float) -> float:
    """The best peak for AdamW, 0.3118 · C^−0.125 (Bi et al. 2024, «DeepSeek LLM», section 3.1);
    found from 1e17 FLOPs on, and not far off at 3e11 (docs/log.md).

    Args:
        flops: C, of training.
    """
    return 0.3118 * flops**-0.125


def batch_tokens(flops: float) -> float:
    """The best batch, in tokens, 0.292 · C^0.3271 (as `learning_rate`)."""
    return 0.292 * flops**0.3271


def _refuse_misfits(config: RunConfig) -> None:
    model, train = config
    if not model.n_layers:
        raise UserError("--ladder: the run has no layers; take one that has")
    if train.start_from is not None:
        raise UserError("--ladder: start_from has the size that it has; take a run without it")
    if train.optimizer not in _TUNED:
        known = " and ".join(_TUNED)
        raise UserError(f"--ladder: learning rates are known for {known}, not {train.optimizer}")


def _refuse_too_small(budgets: list[float], least: ModelSize, count: int) -> None:
    needed = least.flops_per_token * least.parameters * TOKENS_PER_PARAMETER
    if budgets[0] < needed * _LEAST_SHARE:
        enough = _rounded_up(needed * _LEAST_SHARE * SPACING ** (count - 1))
        raise UserError(
            f"--ladder: the first rung's {budgets[0]:.2g} FLOPs are too few for the least model of"
            f" this kind, emb_dim {least.changes['emb_dim']} with {least.parameters:,} parameters;"
            f" give {enough} or more, fewer --rungs, or a smaller vocabulary"
        )


def _rounded_up(number: float) -> str:
    """To three digits."""
    digit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return f"{math.ceil(number / digit) * digit:.3g}"


def _shapes(config: RunConfig, budget: float) -> Iterator[ModelSize]:
    """From the least to one that is too large for the budget."""
    grain = widths.step(config.model)
    width = grain
    while True:
        depths = sorted({max(1, round(width / ratio)) for ratio in ASPECT_RATIOS})
        of_width = [_shape(config, width, depth) for depth in depths]
        yield from of_width
        if of_width[0].tokens_per_parameter(budget) < TOKENS_PER_PARAMETER / 4:
            return
        width += grain * max(1, width // (grain * _FINEST))


def _shape(config: RunConfig, width: int, depth: int) -> ModelSize:
    changes = {**widths.changes(config.model, width), "n_layers": depth}
    model = widths.changed(config.model, changes)
    shapes = shapes_of(model)
    return ModelSize(
        changes,
        active_parameters(shapes, model).total,
        conventional_flops(shapes, model, config.sequence_length),
    )


def _best(shapes: list[ModelSize], budget: float) -> ModelSize:
    def miss(shape: ModelSize) -> float:
        return abs(math.log(shape.tokens_per_parameter(budget) / TOKENS_PER_PARAMETER))

    return min(shapes, key=miss)


def _rung(
    config: RunConfig, budget: float, shape: ModelSize, datasets: Mapping[str, Dataset]
) -> Rung:
    tokens = shape.tokens(budget)
    length = config.sequence_length
    microbatch_tokens = config.train.microbatch_size * length
    microbatches = max(1, round(batch_tokens(budget) / microbatch_tokens))
    changes: dict[str, Any] = {"gradient_accumulation_steps": microbatches}
    if config.model.mup is None:
        changes["learning_rate"] = float(f"{learning_rate(budget):.2g}")
    per_step = microbatches * microbatch_tokens
    train = config.train.model_copy(update=changes)
    epochs = _epochs(RunConfig(config.model, train), tokens, datasets)
    steps_per_epoch = max(1, round(tokens / epochs / per_step))
    changes |= {"epochs": epochs, "min_train_tokens": steps_per_epoch * per_step}
    new = RunConfig(
        widths.changed(config.model, shape.changes), config.train.model_copy(update=changes)
    )
    steps = steps_per_epoch * epochs
    return Rung(budget, shape, {**shape.changes, **changes}, new, steps, per_step)


def _epochs(config: RunConfig, tokens: float, datasets: Mapping[str, Dataset]) -> int:
    """How often the datasets are gone through for so many tokens; 1 where they are not here."""
    if len(datasets) < len(config.train.datasets):
        return 1
    one_epoch = config.train.model_copy(update={"min_train_tokens": -1, "epochs": 1})
    try:
        data = TrainingData(config._replace(train=one_epoch), dict(datasets))
    except UserError:
        batch = config.tokens_per_step
        raise UserError(
            f"--ladder: a batch of {batch:,} tokens for {tokens:.2g} in all is more than there are"
            " to train on; give a smaller budget, or take a larger dataset"
        ) from None
    return math.ceil(tokens / (data.total_steps * data.tokens_per_step))
