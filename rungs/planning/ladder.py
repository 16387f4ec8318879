"""A ladder of runs: the best model size and training for a compute budget and smaller ones before
it, with the architecture, dataset and sequence length of one origin run."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rungs.common import shown_text
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.data.catalog import build_command
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import TrainingData
from rungs.parallel.sharding import BLOCKS
from rungs.planning import mup
from rungs.planning.flops import (
    TOKENS_PER_PARAMETER,
    count_active_parameters,
    model_flops_per_token,
)
from rungs.planning.forecast import Forecast, Speed
from rungs.planning.memory import Memory
from rungs.planning.report import UNKNOWN_SPEED
from rungs.run.derive import NewRun
from rungs.step.state import Shapes, shapes_of

SPACING = math.sqrt(10)
"""Factor between consecutive budgets."""
ASPECT_RATIOS = (96, 64, 48, 32)
"""emb_dim ÷ n_layers of candidates. Around these the loss hardly depends on the ratio (Kaplan et
al. 2020, figure 5)."""
MAX_EPOCHS = 4
"""Up to this many epochs, repeated tokens are nearly worth new ones (Muennighoff et al. 2023)."""
_WIDTH_STEPS = 16
"""Candidate widths differ by at least one part in this many."""
_MIN_SHARE = 0.7
"""Least share of `TOKENS_PER_PARAMETER` for the first rung."""
_TUNED_OPTIMIZERS = ("adamw", "muon")
"""Optimizers with the update size for which the learning-rate law was found."""


class ModelSize(NamedTuple):
    """A candidate size of a model."""

    changes: dict[str, Any]
    """Keys of `model.json` for this size."""
    parameters: int
    """Active parameters: those that a token uses."""
    flops_per_token: float

    def tokens(self, budget: float) -> float:
        """Return the training tokens for a budget in FLOPs."""
        return budget / self.flops_per_token

    def tokens_per_parameter(self, budget: float) -> float:
        return self.tokens(budget) / self.parameters


class Rung(NamedTuple):
    """A run of the ladder."""

    budget: float
    """FLOPs."""
    size: ModelSize
    changes: dict[str, Any]
    """All keys that differ from the origin run."""
    config: RunConfig
    """The origin's config with these changes."""
    steps: int
    tokens_per_step: int

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> float:
        """FLOPs of all steps, near the budget as steps are whole."""
        return self.tokens * self.size.flops_per_token


def propose(
    config: RunConfig, budget: float, count: int, datasets: Mapping[str, Dataset]
) -> list[Rung]:
    """Return the rungs up to a budget in FLOPs, largest last. Each rung takes the model size
    nearest to `flops.TOKENS_PER_PARAMETER` tokens per parameter, among those with a usual ratio of
    width to depth. `config` is the origin run's. If `datasets` has all of its datasets, they are
    repeated for as many epochs as needed. Raises UserError if the run cannot be scaled, or a budget
    is too small for it or too large for the datasets."""
    _check_scalable(config)
    budgets = [budget / SPACING**rest for rest in reversed(range(count))]
    sizes = list(candidates(config, budget))
    _check_smallest_budget(budgets, sizes[0], count)
    return [_rung(config, one, nearest_to_optimal(sizes, one), datasets) for one in budgets]


def make(rungs: list[Rung], origin: Path, folder: Path) -> list[Path]:
    """Write the run folders into `folder`, derived from the run folder `origin`. Raises UserError,
    without writing any, if something else is in the place of one."""
    runs = [
        NewRun.of(folder / f"rung-{number}", origin, rung.changes)
        for number, rung in enumerate(rungs, start=1)
    ]
    return [run.make() for run in runs]


def learning_rate(flops: float) -> float:
    """Return the best peak learning rate for AdamW, 0.3118 · C^−0.125 for C `flops` of training (Bi
    et al. 2024, "DeepSeek LLM", section 3.1). The law was found from 1e17 FLOPs on and is not far
    off at 3e11 (docs/log.md)."""
    return 0.3118 * flops**-0.125


def batch_tokens(flops: float) -> float:
    """Return the best batch size in tokens, 0.292 · C^0.3271 (source as for `learning_rate`)."""
    return 0.292 * flops**0.3271


def as_text(rungs: list[Rung], forecast: Forecast, largest: Memory) -> str:
    """Return a table of the rungs, with their times if known, and notes. `forecast` is the origin
    run's, on the devices for the rungs; `largest` is the memory of the last rung."""
    shown = [_row(rung, forecast.speed) for rung in rungs]
    table = shown_text.align_columns([[*shown[0]], *([*row.values()] for row in shown)], left=0)
    return "\n".join([table, "", *_notes(rungs, forecast, largest)])


def as_json(rungs: list[Rung], forecast: Forecast, largest: Memory) -> str:
    """Return the same figures as JSON; arguments as for `as_text`."""
    figures = {
        "rungs": [
            {
                "flops": rung.flops,
                "parameters": rung.size.parameters,
                "tokens": rung.tokens,
                "steps": rung.steps,
                "tokens_per_step": rung.tokens_per_step,
                "seconds": rung.flops / forecast.speed.flops if forecast.speed else None,
                "set": rung.changes,
            }
            for rung in rungs
        ],
        "missing_datasets": forecast.missing_datasets,
        "bytes_per_device_of_largest": largest.total,
        "fits": largest.total <= forecast.usable_bytes,
    }
    return json.dumps(figures, indent=2)


def _check_scalable(config: RunConfig) -> None:
    model, train = config
    if not model.n_layers:
        raise UserError("--ladder: the model has no layers (n_layers is 0); choose another run")
    if train.start_from is not None:
        raise UserError("--ladder: start_from fixes the model's size; use a run without it")
    if train.optimizer not in _TUNED_OPTIMIZERS:
        known = " and ".join(_TUNED_OPTIMIZERS)
        raise UserError(f"--ladder: learning rates are known for {known}, not {train.optimizer}")


def _check_smallest_budget(budgets: list[float], smallest: ModelSize, count: int) -> None:
    needed = _MIN_SHARE * smallest.flops_per_token * smallest.parameters * TOKENS_PER_PARAMETER
    if budgets[0] < needed:
        enough = _rounded_up(needed * SPACING ** (count - 1))
        raise UserError(
            f"--ladder: the first rung's {budgets[0]:.2g} FLOPs are too few for the smallest model"
            f" of this kind, emb_dim {smallest.changes['emb_dim']} with"
            f" {smallest.parameters:,} parameters; give {enough} or more, fewer --rungs, or a"
            " smaller vocabulary"
        )


def _rounded_up(number: float) -> str:
    """Return a number rounded up to three digits."""
    digit = 10.0 ** (math.floor(math.log10(number)) - 2)
    return f"{math.ceil(number / digit) * digit:.3g}"


def candidates(config: RunConfig, budget: float) -> Iterator[ModelSize]:
    """Yield candidates, from the smallest to one that is too large for the budget."""
    grain = mup.smallest_width(config.model)
    width = grain
    while True:
        of_width = _sizes_of_width(config, width)
        yield from of_width
        if of_width[0].tokens_per_parameter(budget) < TOKENS_PER_PARAMETER / 4:
            return
        width += grain * max(1, width // (grain * _WIDTH_STEPS))


def _sizes_of_width(config: RunConfig, width: int) -> list[ModelSize]:
    """Return the candidates of one width, shallowest first. The model is traced once, as other
    depths differ only in the length of the layer axis."""
    depths = sorted({max(1, round(width / ratio)) for ratio in ASPECT_RATIOS})
    sizes: list[ModelSize] = []
    traced: Shapes = {}
    for depth in depths:
        changes = {**mup.keys_for_width(config.model, width), "n_layers": depth}
        model = mup.with_keys(config.model, changes)
        traced = traced or shapes_of(model)
        shapes = {
            name: (depth, *shape[1:]) if name.startswith(BLOCKS) else shape
            for name, shape in traced.items()
        }
        parameters = count_active_parameters(shapes, model).total
        flops = model_flops_per_token(shapes, model, config.sequence_length)
        sizes.append(ModelSize(changes, parameters, flops))
    return sizes


def nearest_to_optimal(sizes: list[ModelSize], budget: float) -> ModelSize:
    """Return the size nearest to compute-optimal tokens per parameter."""

    def distance(size: ModelSize) -> float:
        return abs(math.log(size.tokens_per_parameter(budget) / TOKENS_PER_PARAMETER))

    return min(sizes, key=distance)


def _rung(
    config: RunConfig, budget: float, size: ModelSize, datasets: Mapping[str, Dataset]
) -> Rung:
    tokens = size.tokens(budget)
    microbatch_tokens = config.train.microbatch_size * config.sequence_length
    microbatches = max(1, round(batch_tokens(budget) / microbatch_tokens))
    changes: dict[str, Any] = {"gradient_accumulation_steps": microbatches}
    if config.train.batch_growth:
        changes["batch_growth"] = {}  # the law is for a constant batch size
    if config.train.max_steps:
        changes["max_steps"] = None
    if config.model.mup is None:
        changes["learning_rate"] = float(f"{learning_rate(budget):.2g}")
    per_step = microbatches * microbatch_tokens
    train = config.train.model_copy(update=changes)
    epochs = _epochs(RunConfig(config.model, train), tokens, datasets)
    steps_per_epoch = max(1, round(tokens / epochs / per_step))
    changes |= {"epochs": epochs, "min_train_tokens": steps_per_epoch * per_step}
    new = RunConfig(
        mup.with_keys(config.model, size.changes),
        config.train.model_copy(update=changes),
    )
    steps = steps_per_epoch * epochs
    return Rung(budget, size, {**size.changes, **changes}, new, steps, per_step)


def _epochs(config: RunConfig, tokens: float, datasets: Mapping[str, Dataset]) -> int:
    """Return the epochs for this many tokens; 1 if a dataset is not available."""
    if len(datasets) < len(config.train.datasets):
        return 1
    one_epoch = config.train.model_copy(update={"min_train_tokens": -1, "epochs": 1})
    try:
        data = TrainingData(config._replace(train=one_epoch), dict(datasets))
    except UserError:
        raise UserError(
            f"--ladder: a batch of {config.tokens_per_step:,} tokens, for {tokens:.2g} tokens in"
            " all, is more than the dataset has; give a smaller budget, or use a larger dataset"
        ) from None
    return math.ceil(tokens / (data.total_tokens))


def _row(rung: Rung, speed: Speed | None) -> dict[str, str]:
    """Return the cells of a rung's row by their headings."""
    changes, parameters = rung.changes, rung.size.parameters
    rate = f"{changes['learning_rate']:g}" if "learning_rate" in changes else "unchanged"
    row = {
        "FLOPs": f"{rung.flops:.2e}",
        "emb_dim": f"{changes['emb_dim']:,}",
        "n_layers": f"{changes['n_layers']:,}",
        "parameters": f"{parameters:,}",
        "tokens": f"{rung.tokens:,}",
        "tokens/parameter": f"{rung.tokens / parameters:.1f}",
        "epochs": f"{changes['epochs']:,}",
        "tokens per step": f"{rung.tokens_per_step:,}",
        "steps": f"{rung.steps:,}",
        "learning rate": rate,
    }
    if speed is not None:
        row["time"] = shown_text.format_duration(rung.flops / speed.flops)
    return row


def _notes(rungs: list[Rung], forecast: Forecast, largest: Memory) -> Iterator[str]:
    yield from _total(rungs, forecast.speed)
    yield from _data_notes(rungs, forecast)
    fits = largest.total <= forecast.usable_bytes
    needed, usable = (
        shown_text.format_bytes(largest.total),
        shown_text.format_bytes(forecast.usable_bytes),
    )
    verdict = "fits" if fits else "does not fit, and nothing is written; lower microbatch_size"
    yield f"the largest rung needs {needed} of {usable} on each device: it {verdict}"


def _total(rungs: list[Rung], speed: Speed | None) -> Iterator[str]:
    yield f"{TOKENS_PER_PARAMETER} tokens per parameter are compute-optimal"
    flops = sum(rung.flops for rung in rungs)
    if speed is None:
        yield f"total: {flops:.2e} FLOPs; for the time {UNKNOWN_SPEED}"
        return
    time = shown_text.format_duration(flops / speed.flops)
    yield (
        f"total: {flops:.2e} FLOPs, {time} at {speed.flops / 1e12:.3g} TFLOP/s ({speed.reason});"
        " start-up, and the lower speed of small runs, not included"
    )


def _data_notes(rungs: list[Rung], forecast: Forecast) -> Iterator[str]:
    for name in forecast.missing_datasets:
        yield (
            f"{name} is not here, so the number of epochs is not known:"
            f" {build_command(name)}, then run this command again"
        )
    most = max(rung.changes["epochs"] for rung in rungs)
    if most > MAX_EPOCHS:
        yield (
            f"the dataset is too small: {most:,} epochs. Beyond {MAX_EPOCHS} a repeated token is"
            " worth less than a new one, and losses bend away from a power law"
        )
