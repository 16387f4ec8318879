"""What a Gated DeltaNet layer costs beside causal attention of the same width.

First a layer by itself, with its projections, in float32 on one device: the time of its forward
pass, and with the backward pass, and the compiler's figure for its memory. Then decoding: the time
of a token after so many others, and the size of what is kept of them, of models of four layers.
Everything of a table takes turns, and ratios are of the same turn.
"""

from rungs.common.command import run_command

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from benchmarks.report import spread
from rungs.common.shown_text import align_columns
from rungs.config.model_config import LayerKind, ModelConfig
from rungs.model.attention import sequence_contexts
from rungs.model.blocks import Block
from rungs.model.decoding import DecodingState, Prompts
from rungs.model.generation import Generator
from rungs.model.gpt import GPT
from rungs.model.sampling import GREEDY

WIDTH, HEADS = 512, 8
LENGTHS = (1024, 4096, 16_384)
PLACES = (1024, 8192, 32_768)
NEW_TOKENS = 32
PATTERNS: dict[str, list[LayerKind]] = {
    "attention": ["global"],
    "3 : 1": ["delta_net", "delta_net", "delta_net", "global"],
    "Gated DeltaNet": ["delta_net"],
}


@click.command()
@click.option("--turns", default=7, show_default=True, type=click.IntRange(1))
@click.option("--longest", default=LENGTHS[-1], show_default=True, help="Longest sequence.")
def main(turns: int, longest: int) -> None:
    """Print both tables."""
    click.echo(f"Medians of {turns} turns (lowest to highest).\n")
    rows: list[tuple[str, ...]] = [
        (
            "tokens",
            "forward, attention ÷ delta",
            "with backward",
            "ms",
            "memory, MB",
            "of attention",
        )
    ]
    rows += [of_length(length, turns) for length in LENGTHS if length <= longest]
    click.echo(align_columns(rows) + "\n")
    names = tuple(PATTERNS)
    header = ("tokens before", *(f"{n}, ms" for n in names), *(f"{n}, MB" for n in names))
    click.echo(align_columns([header, *map(functools.partial(of_place, turns), PLACES)]))


def config_of(pattern: Sequence[LayerKind], length: int, width: int = WIDTH) -> ModelConfig:
    heads = width // (WIDTH // HEADS)
    delta_net = {"key_heads": heads, "key_dim": width // heads}
    return ModelConfig.model_validate(
        {
            **{"vocab_size": 256, "context_length": length, "emb_dim": width, "n_heads": heads},
            **{"n_layers": 4, "positions": "none", "norm": "rms_norm", "layer_pattern": pattern},
            "sliding_window": None if "delta_net" in pattern else length,
            "delta_net": delta_net if "delta_net" in pattern else None,
        }
    )


def of_length(length: int, turns: int) -> tuple[str, ...]:
    """Return the row of a sequence length."""
    timed, megabytes = dict[tuple[str, bool], Callable[[], Array]](), list[float]()
    for name in ("attention", "Gated DeltaNet"):
        config = config_of(PATTERNS[name], length)
        kind = PATTERNS[name][0]
        block = Block(config, jax.random.key(0), kind)
        layer: Any = block.attention or block.delta_net
        context = sequence_contexts(config, length)[kind]
        graph, state = nnx.split(layer)

        def forward(
            state: nnx.State, x: Array, graph: Any = graph, context: Any = context
        ) -> Array:
            return jnp.sum(nnx.merge(graph, state)(x, context)[0] ** 2)

        x_BSD = jax.random.normal(jax.random.key(1), (1, length, WIDTH))
        for function in (forward, jax.value_and_grad(forward, (0, 1))):
            compiled = jax.jit(function).lower(state, x_BSD).compile()
            timed[name, function is not forward] = functools.partial(compiled, state, x_BSD)
        memory = compiled.memory_analysis()
        assert memory is not None
        megabytes.append(memory.temp_size_in_bytes / 1e6)
    seconds = in_turns(timed, turns)
    ratios = [
        [
            a / b
            for a, b in zip(
                seconds["attention", both], seconds["Gated DeltaNet", both], strict=True
            )
        ]
        for both in (False, True)
    ]
    delta_ms = [1000 * each for each in seconds["Gated DeltaNet", True]]
    shown = *map(spread, ratios), spread(delta_ms, 0)
    return f"{length:,}", *shown, f"{megabytes[1]:,.0f}", f"{megabytes[0]:,.0f}"


def of_place(turns: int, place: int) -> tuple[str, ...]:
    """Return the row of a number of tokens before, for which the caches have room."""
    timed, megabytes = dict[str, Callable[[], Array]](), list[float]()
    for name, pattern in PATTERNS.items():
        config = config_of(pattern, place + NEW_TOKENS, WIDTH // 2)
        generator = Generator(GPT(config, jax.random.key(0)))
        state = state_at(generator, place)
        megabytes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(state.caches)) / 1e6)
        decode = jax.jit(functools.partial(generator.decoder.decode, sampling=GREEDY))
        timed[name] = functools.partial(decode, generator.weights, state, place + NEW_TOKENS - 1)
    seconds = in_turns(timed, turns)
    each = [spread([1000 * s / (NEW_TOKENS - 1) for s in seconds[name]]) for name in PATTERNS]
    return f"{place:,}", *each, *(f"{size:,.2f}" for size in megabytes)


def state_at(generator: Generator, place: int) -> DecodingState:
    """Return the state of a text of so many tokens, with caches of zeros: the time doesn't depend
    on what they hold."""
    decoder, shape = generator.decoder, (1, place)
    zeros = jnp.zeros(1, jnp.int32)
    keys = jax.random.split(jax.random.key(0), 1)
    prompts = Prompts(jnp.zeros(shape, jnp.int32), zeros, zeros > 0, keys, 0)
    return decoder.initial_state(prompts, place + NEW_TOKENS)


def in_turns(timed: dict[Any, Callable[[], Any]], turns: int) -> dict[Any, list[float]]:
    """Return the seconds of each function; a first turn is not counted."""
    seconds: dict[Any, list[float]] = {name: [] for name in timed}
    for turn in range(turns + 1):
        for name, function in timed.items():
            begin = time.perf_counter()
            jax.block_until_ready(function())
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


if __name__ == "__main__":
    run_command(main)
