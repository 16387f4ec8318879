"""Figures of committed files that sentences of the pages quote, by the names in their marks."""

import functools
import json
import statistics
import tomllib
from pathlib import Path

from benchmarks.gpu_parts.results import figures_of, read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/gpu_results"
RACES = ROOT / "benchmarks/racing/measured"
MINUTES_OF_THE_RECIPE, TOKENS_PER_STEP = 2.2, 48 * 1024
"""In the race on the H200."""


@functools.cache
def quoted() -> dict[str, str]:
    """Return the text of each figure."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    h200 = tomllib.loads((ROOT / "rungs/planning/devices.toml").read_text())["devices"]["h200"]
    return {
        **_of_the_race(),
        **_of_the_step(),
        "h200-peaks": f"{h200['flops'] / 1e12:g} TFLOP/s, {h200['bandwidth'] / 1e12:g} TB/s",
        "most-lines": f"{-(-project['tool']['rungs']['max-lines'] // 1000)},000",
    }


def _of_the_race() -> dict[str, str]:
    recipe = _last_line("h200/rungs-recipe-2.2min-0.01-seed0.jsonl")
    pytorch = _last_line("h200/pytorch-5min-0.0012-seed0.jsonl")
    sides = json.loads((RACES / "h200/race.json").read_text())
    by_rate = (_last_line(f"xeon/pytorch-5min-{rate}-seed0.jsonl") for rate in (5e-4, 1e-3, 2e-3))
    slow, middle, fast = (one["loss"] for one in by_rate)
    return {
        "race-minutes": f"{sides[0]['minutes_to_goal'][0]:.2f}",
        "race-start-minutes": f"{MINUTES_OF_THE_RECIPE - recipe['seconds'] / 60:.1f}",
        "race-speed": _tokens_per_second(recipe),
        "race-speed-pytorch": _tokens_per_second(pytorch),
        "race-losses-pytorch": f"{slow:.3f}, {middle:.3f} and {fast:.3f}",
    }


def _of_the_step() -> dict[str, str]:
    measured = _medians("nvidia-h200-51d27786.json")
    before = _medians("nvidia-h200-2a59e8fa.json")["torch_largest"]["PyTorch, faster attention, 96"]
    variants = _medians("nvidia-h200-step-variants.json")["variants"]
    ours, pytorch = measured["step"]["runs/gpt2-small"], measured["step"]["PyTorch, 96"]
    sketch = "sketch of head, norms and feed-forward,microbatch_size=96"
    return {
        "step-pytorch-before": f"{before:,.0f}",
        "step-pytorch-flash": f"{measured['step, flash attention']['PyTorch, 96']:,.0f}",
        "step-against-pytorch": f"{ours / before:.2f} to {ours / pytorch:.2f}",
        "step-microbatches": f"{variants['microbatches of 96'] / variants['runs/gpt2-small']:.1f}",
        "step-sketch": f"{variants[f'{sketch},xla_gpu_dot_merger_threshold_mb=0']:,.0f}",
    }


def _last_line(name: str) -> dict[str, float]:
    line: dict[str, float] = json.loads((RACES / name).read_text().splitlines()[-1])
    return line


def _tokens_per_second(last: dict[str, float]) -> str:
    """Return the speed of a side of the race on the H200, to thousands, validations included."""
    return f"{round(last['step'] * TOKENS_PER_STEP / last['seconds'], -3):,.0f}"


def _medians(name: str) -> dict[str, dict[str, float]]:
    """Return the median of each figure by part; of parts of variants, by the word before them."""
    return {
        part.partition(":")[0]: {
            figure.name: statistics.median(figure.values)
            for figure in figures_of(content)
            if figure.values
        }
        for part, content in read(RESULTS / name)["parts"].items()
    }
