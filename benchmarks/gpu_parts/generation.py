"""Tokens per second of generation with GPT-2's shape, beside `transformers`."""

import statistics
from collections.abc import Iterator
from contextlib import ExitStack

import jax

from benchmarks.generation_speed.generation_speed import (
    BYTES_EACH,
    GPT2,
    LONG_PROMPT,
    NEW_TOKENS,
    PROMPT_TOKENS,
    Sides,
    Work,
    our_sides,
    read_weights,
    take_turns,
    their_sides,
    transformers,
)
from benchmarks.gpu_parts.figure import Figure
from benchmarks.gpu_parts.setting import Setting
from benchmarks.side_process import start
from rungs.model.gpt import GPT
from rungs.parallel import jax_setup
from rungs.planning.hardware import device_of_kind

SIZES, TURNS = (1, 8, 64), 5
OURS, THEIRS = ("bfloat16", "int8"), ("bfloat16",)
TINY = {"vocab_size": 512, "context_length": 128, "emb_dim": 64, "n_layers": 2, "n_heads": 2}


def figures(setting: Setting) -> Iterator[Figure]:
    config = GPT2.model_copy(update=TINY) if setting.rehearse else GPT2
    sizes = SIZES[:2] if setting.rehearse else SIZES
    jax_setup.enable_compilation_cache()
    with ExitStack() as stack:
        theirs: Sides = {}
        if setting.torch is None:
            yield Figure("transformers", [], note="not here; left out")
        else:
            side = transformers(setting.torch, config, max(sizes), THEIRS)
            theirs = their_sides(stack.enter_context(start(side)), THEIRS)
        model = GPT(config, jax.random.key(0))
        sides = our_sides(model, max(sizes), OURS) | theirs
        turns = 1 if setting.rehearse else TURNS
        for size in sizes:
            yield from _rates(sides, size, turns, _possible(read_weights(model)))
        long = min(LONG_PROMPT, config.context_length // 2)
        for name, took in take_turns(sides, Work(1, long, 1), turns).items():
            yield Figure(
                f"first token after {long} tokens, {name}", [1e3 * each for each in took], "ms"
            )


def _possible(weights: int) -> dict[str, float]:
    """Return how many tokens per second the published bandwidth allows one text, by what the
    weights are stored as."""
    hardware = device_of_kind(jax.devices()[0].device_kind)
    if hardware is None or hardware.bandwidth is None:
        return {}
    return {name: hardware.bandwidth / (weights * BYTES_EACH[name]) for name in OURS}


def _rates(sides: Sides, size: int, turns: int, possible: dict[str, float]) -> Iterator[Figure]:
    """Yield tokens per second of a batch, and our ratios to `transformers`, which runs eagerly."""
    found = take_turns(sides, Work(size, PROMPT_TOKENS, NEW_TOKENS), turns)
    rates = {name: [size * NEW_TOKENS / took for took in times] for name, times in found.items()}
    texts = f"{size} text{'s' if size > 1 else ''}"
    for name, each in rates.items():
        allowed = possible.get(name.removeprefix("Rungs ")) if size == 1 else None
        share = f"{statistics.median(each) / allowed:.0%} of what memory allows" if allowed else ""
        yield Figure(f"{texts}, {name}", each, "tokens/s", share)
    other = f"transformers {THEIRS[0]}"
    for name in rates if other in rates else ():
        if name != other:
            ratios = [one / another for one, another in zip(rates[name], rates[other], strict=True)]
            yield Figure(f"{texts}, {name} ÷ {other}", ratios)
