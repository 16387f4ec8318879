"""Variants of GPT-2's step and PyTorch, which take turns."""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.gpu_parts.step_variants import SEQUENCES, TINY
from benchmarks.processor import cores
from benchmarks.side_process import Side, SideProcess, start
from benchmarks.training_speed.sides import FOLDER, LEARNING_RATE
from benchmarks.training_speed.speed_table import PYTORCH, Shape

TURNS, STEPS, WARM_UP = 5, 5, 3
"""Of each side; steps of a turn, and steps that don't count."""
GPT2 = Shape(vocab=50257, length=1024, width=768, heads=12, layers=12)


class TorchSide(NamedTuple):
    """How PyTorch takes the step."""

    attention: str
    """As in `torch_side.py`."""
    microbatches: Sequence[int]
    """Sizes to try, until one fits."""


class Running(NamedTuple):
    """A side that is ready."""

    name: str
    run: Callable[[int], Any]
    """Take so many steps and wait for the last one."""
    tokens: int
    """Of a step."""


def compare(
    setting: Setting, variants: Sequence[str], torch_sides: Mapping[str, TorchSide]
) -> Iterator[Figure]:
    """Yield what each side needs to start, its tokens per second, and the ratios to PyTorch's
    fastest."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        theirs, failures = _start_torch(stack, setting, torch_sides, folder)
        yield from failures
        script = Path(__file__).with_name("variants_side.py")
        command = [sys.executable, str(script), setting.as_json()]
        process = stack.enter_context(start(Side("Rungs", command)))
        ours, about = [], {}
        for variant in variants:
            about[variant] = process.ask(json.dumps(["start", variant]))
            ours.append(_variant(process, variant, about[variant]["tokens"]))
            yield from _costs(variant, about[variant])
        rates = _take_turns([*ours, *theirs], setting)
        for side in (*ours, *theirs):
            yield _rate(side.name, rates[side.name], next(iter(about.values())))
        yield from _ratios(rates, [side.name for side in ours], [side.name for side in theirs])


def _variant(process: SideProcess, name: str, tokens: int) -> Running:
    return Running(name, lambda steps: process.ask(json.dumps(["run", name, steps])), tokens)


def _costs(variant: str, about: Mapping[str, Any]) -> Iterator[Figure]:
    note = f"{about['tokens']:,} tokens a step, microbatches of {about['microbatch']}"
    yield Figure(f"{variant}: compiling", [about["compile_seconds"]], "s", note)
    yield Figure(f"{variant}: memory, by the compiler", [about["bytes"] / 1e9], "GB")


def _start_torch(
    stack: ExitStack, setting: Setting, sides: Mapping[str, TorchSide], folder: Path
) -> tuple[list[Running], list[Figure]]:
    """Start all sides of PyTorch at once, as they compile with few threads."""
    if not sides:
        return [], []
    if setting.torch is None:
        return [], [Figure(PYTORCH, [], note="not here; left out")]
    started, failures = [], []
    with ThreadPoolExecutor(len(sides)) as pool:
        jobs = {
            name: pool.submit(_start_one, stack, setting, name, side, folder)
            for name, side in sides.items()
        }
    for name, job in jobs.items():
        try:
            started.append(job.result())
        except click.ClickException as error:
            failures.append(Figure(name, [], problem=str(error).splitlines()[-1]))
    return started, failures


def _start_one(
    stack: ExitStack, setting: Setting, name: str, side: TorchSide, folder: Path
) -> Running:
    """Start a side with the largest microbatch that fits.

    Raises:
        ClickException: none fits, or the process failed for another reason.
    """
    shape = dataclasses.replace(GPT2, **_tiny_shape()) if setting.rehearse else GPT2
    for size in side.microbatches:
        microbatch = size // 8 if setting.rehearse else size
        batches = folder / f"{microbatch}.npy"
        tokens = _write_batches(batches, shape, SEQUENCES // size, microbatch)
        asked = {
            **dataclasses.asdict(shape),
            "batches": str(batches),
            "learning_rate": LEARNING_RATE,
            "threads": cores(),
            "dtype": "bfloat16",
            "compiled": True,
            "attention": side.attention,
        }
        assert setting.torch is not None
        command = [*setting.torch, str(FOLDER / "torch_side.py"), json.dumps(asked)]
        label = f"{name}, {microbatch}"
        process = stack.enter_context(start(Side(label, command)))
        try:
            process.ask("1")
        except click.ClickException as error:
            if "out of memory" not in str(error) or size == side.microbatches[-1]:
                raise
        else:
            return _torch(process, label, tokens)
    raise AssertionError("unreachable")


def _torch(process: SideProcess, name: str, tokens: int) -> Running:
    return Running(name, lambda steps: process.ask(f"{steps}"), tokens)


def _tiny_shape() -> dict[str, int]:
    names = {"vocab_size": "vocab", "context_length": "length", "emb_dim": "width"}
    others = {"n_heads": "heads", "n_layers": "layers"}
    return {name: TINY[key] for key, name in (names | others).items()}


def _write_batches(path: Path, shape: Shape, microbatches: int, size: int) -> int:
    """Save random tokens of a step; return how many it trains."""
    rng = np.random.default_rng(0)
    batch = 1, microbatches, size, shape.length + 1
    np.save(path, rng.integers(shape.vocab, size=batch, dtype=np.int32))
    return microbatches * size * shape.length


def _take_turns(sides: Sequence[Running], setting: Setting) -> dict[str, list[float]]:
    """Return tokens per second of each side in each turn."""
    turns, steps, warm_up = (1, 1, 1) if setting.rehearse else (TURNS, STEPS, WARM_UP)
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    for side in sides:
        side.run(warm_up)
    for _ in range(turns):
        for side in sides:
            begin = time.perf_counter()
            side.run(steps)
            rates[side.name].append(side.tokens * steps / (time.perf_counter() - begin))
    return rates


def _rate(name: str, rates: list[float], about: Mapping[str, Any]) -> Figure:
    note = ""
    if about["published_peak"]:
        share = np.median(rates) * about["flops_per_token"] / about["published_peak"]
        note = f"{share:.1%} of the published peak"
    return Figure(name, rates, "tokens/s", note)


def _ratios(
    rates: Mapping[str, list[float]], ours: Sequence[str], theirs: Sequence[str]
) -> Iterator[Figure]:
    """Yield our rates divided by PyTorch's fastest, turn by turn; without PyTorch, by the first
    variant's."""
    if theirs:
        fastest, what = (
            max(theirs, key=lambda name: float(np.median(rates[name]))),
            "fastest PyTorch",
        )
        compared = ours
    else:
        fastest, what, compared = ours[0], ours[0], ours[1:]
    for name in compared:
        pairs = zip(rates[name], rates[fastest], strict=True)
        yield Figure(f"{name} ÷ {what}", [one / other for one, other in pairs], note=fastest)
