"""Variants of GPT-2's step and PyTorch, which take turns."""

import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.gpu_parts.step_variants import SEQUENCES, TINY
from benchmarks.side_process import Side, SideProcess, start
from benchmarks.training_speed.sides import FOLDER, LEARNING_RATE
from benchmarks.training_speed.speed_table import PYTORCH, Shape
from rungs.common.machine import core_count

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
    run: Callable[[int], float]
    """Take so many steps and return the last one's loss."""
    tokens: int
    """Of a step."""
    flops: float = 0.0
    """Of a step; 0 if they are not known."""
    published_peak: float | None = None
    """FLOP/s."""


class Measured(NamedTuple):
    """What a side has done so far."""

    side: Running
    rates: list[float]
    """Tokens per second in each turn."""
    losses: list[float]
    """At the end of each turn."""

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def figure(self) -> Figure:
        side, last = self.side, self.losses[-1]
        notes = [f"loss {last:.3f}"]
        if side.published_peak:
            share = self.rate / side.tokens * side.flops / side.published_peak
            notes.insert(0, f"{share:.1%} of the published peak")
        problem = "" if math.isfinite(last) else "does not train: the loss is not finite"
        return Figure(side.name, self.rates, "tokens/s", "; ".join(notes), problem)


def compare(
    setting: Setting, variants: Sequence[str], torch_sides: Mapping[str, TorchSide]
) -> Iterator[Figure]:
    """Yield what each side needs to start, its tokens per second, and their ratios.

    After the first turn, too, in case that there is no time for others.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ready: list[Running] = []
        yield from _start_torch(stack, setting, torch_sides, folder, ready)
        script = Path(__file__).with_name("variants_side.py")
        command = [sys.executable, str(script), setting.as_json()]
        process = stack.enter_context(start(Side("Rungs", command)))
        for variant in variants:
            yield from _start_variant(process, variant, ready)
        yield from _take_turns(ready, setting, list(variants))


def _start_variant(process: SideProcess, variant: str, ready: list[Running]) -> Iterator[Figure]:
    about = process.ask(json.dumps(["start", variant]))
    if why := about.get("failed"):
        yield Figure(variant, [], problem=why)
        return
    note = f"{about['tokens']:,} tokens a step, microbatches of {about['microbatch']}"
    yield Figure(f"{variant}: memory, as compiled", [about["bytes"] / 1e9], "GB", note)

    def run(steps: int) -> float:
        return float(process.ask(json.dumps(["run", variant, steps])))

    flops, peak = about["flops_per_token"] * about["tokens"], about["published_peak"]
    ready.append(Running(variant, run, about["tokens"], flops, peak))


def _start_torch(
    stack: ExitStack,
    setting: Setting,
    sides: Mapping[str, TorchSide],
    folder: Path,
    ready: list[Running],
) -> Iterator[Figure]:
    """Start the sides of PyTorch, one after another: they time kernels while they compile."""
    if sides and setting.torch is None:
        yield Figure(PYTORCH, [], note="not here; left out")
        return
    for name, side in sides.items():
        try:
            running, about = _start_one(stack, setting, name, side, folder)
        except click.ClickException as error:
            yield Figure(name, [], problem=error.message.splitlines()[-1])
        else:
            note = f"attention: {about['attention']}; PyTorch's default: {about['default']}"
            yield Figure(f"{running.name}: attention", [], note=note)
            ready.append(running)


def _start_one(
    stack: ExitStack, setting: Setting, name: str, side: TorchSide, folder: Path
) -> tuple[Running, Mapping[str, str]]:
    """Start a side with the largest microbatch that fits; return what it says about itself, too.

    Raises:
        ClickException: none fits, or the process failed for another reason.
    """
    shape = dataclasses.replace(GPT2, **_tiny_shape()) if setting.rehearse else GPT2
    assert setting.torch is not None
    for size in side.microbatches:
        microbatch = size // 8 if setting.rehearse else size
        batches = folder / f"{microbatch}.npy"
        tokens = _write_batches(batches, shape, SEQUENCES // size, microbatch)
        asked = {
            **dataclasses.asdict(shape),
            "batches": str(batches),
            "learning_rate": LEARNING_RATE,
            "threads": core_count(),
            "dtype": "bfloat16",
            "compiled": True,
            "attention": side.attention,
        }
        # torch.compile's cache doesn't distinguish kinds of attention:
        # https://github.com/pytorch/pytorch/issues/185449
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"{side.attention}-{microbatch}")}
        command = [*setting.torch, str(FOLDER / "torch_side.py"), json.dumps(asked)]
        label = f"{name}, {microbatch}"
        process = stack.enter_context(start(Side(label, command, cache)))
        try:
            process.ask("1")
        except click.ClickException as error:
            if "out of memory" not in str(error) or size == side.microbatches[-1]:
                raise
        else:
            return _torch(process, label, tokens), process.ask("about")
    raise AssertionError("no sizes")


def _torch(process: SideProcess, name: str, tokens: int) -> Running:
    return Running(name, lambda steps: float(process.ask(f"{steps}")), tokens)


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


def _take_turns(
    sides: list[Running], setting: Setting, variants: Sequence[str]
) -> Iterator[Figure]:
    """Yield the rates of all sides and their ratios, after the first turn and after the last one.

    A side that fails is left out from then on.
    """
    turns, steps, warm_up = (1, 1, 1) if setting.rehearse else (TURNS, STEPS, WARM_UP)
    running = {side.name: Measured(side, [], []) for side in sides}
    for turn in range(turns + 1):
        for name, measured in list(running.items()):
            begin = time.perf_counter()
            try:
                loss = measured.side.run(steps if turn else warm_up)
            except click.ClickException as error:
                del running[name]
                yield Figure(name, [], problem=error.message.splitlines()[-1])
                continue
            if turn:
                measured.losses.append(loss)
                seconds = time.perf_counter() - begin
                measured.rates.append(measured.side.tokens * steps / seconds)
        if turn in (1, turns):
            yield from (measured.figure() for measured in running.values())
            yield from _ratios(running, variants)


def _ratios(running: Mapping[str, Measured], variants: Sequence[str]) -> Iterator[Figure]:
    """Yield our rates divided by the fastest one of PyTorch here, turn by turn; without PyTorch, by
    the first variant's."""
    ours = [name for name in variants if name in running]
    theirs = [name for name in running if name not in ours]
    others = theirs or ours[:1]
    if not others:
        return
    fastest = max(others, key=lambda name: running[name].rate)
    for name in ours:
        if name != fastest:
            pairs = zip(running[name].rates, running[fastest].rates, strict=True)
            yield Figure(f"{name} ÷ {fastest}", [one / other for one, other in pairs])
