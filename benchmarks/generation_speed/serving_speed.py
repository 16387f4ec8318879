"""Tokens per second of `serve.py` with 1, 4 and 16 clients at once, and how long they wait.

Each client sends one request after the other: a prompt of 32 tokens, 64 new ones, streamed.
The numbers of clients take turns, several rounds; medians with the smallest and the largest.
"""

from rungs.common.command import run_command

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import click

from benchmarks.report import spread
from rungs.common.machine import processor

ROOT = Path(__file__).parents[2]
PROMPT_TOKENS, NEW_TOKENS = 32, 64


class Times(NamedTuple):
    """Of one request, in seconds after it was sent."""

    first: float
    """The first text."""
    last: float
    """The end."""


@click.command()
@click.argument("run")
@click.option("--clients", default="1,4,16", show_default=True)
@click.option("--requests", default=4, show_default=True, help="Of each client and round.")
@click.option("--rounds", default=3, show_default=True)
def main(run: str, clients: str, requests: int, rounds: int) -> None:
    """Measure how many tokens per second the model of RUN gives to several clients."""
    counts = [int(count) for count in clients.split(",")]
    rates: dict[int, list[float]] = {count: [] for count in counts}
    firsts: dict[int, list[float]] = {count: [] for count in counts}
    with served(run) as (url, model):
        for count in counts:  # compiles
            ask_all(url, model, count, 1)
        for _ in range(rounds):
            for count in counts:
                began = time.perf_counter()
                times = ask_all(url, model, count, requests)
                seconds = time.perf_counter() - began
                rates[count].append(len(times) * NEW_TOKENS / seconds)
                firsts[count].append(statistics.median(each.first for each in times))
    click.echo(f"{run} on {processor()}")
    alone = statistics.median(rates[counts[0]])
    for count in counts:
        ratio = statistics.median(rates[count]) / alone
        click.echo(
            f"{count:3} clients: {spread(rates[count], 0)} tokens/s, {ratio:.2f} times one"
            f" client; first text after {spread([1000 * s for s in firsts[count]], 0)} ms"
        )


@contextmanager
def served(run: str) -> Iterator[tuple[str, str]]:
    """Serve a model while the block runs; yield the address and the model's name."""
    command = [sys.executable, str(ROOT / "serve.py"), run, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            line = next(line for line in process.stdout if "http://" in line)
            found = re.match(r"(http://\S+)/ answers for (\S+)", line)
            assert found, line
            yield found[1], found[2]
        finally:
            process.terminate()


def ask_all(url: str, model: str, clients: int, requests: int) -> Sequence[Times]:
    """Let clients send requests at once, and return the times of all."""
    with ThreadPoolExecutor(clients) as pool:
        each = pool.map(
            lambda seed: [ask(url, model, seed) for _ in range(requests)], range(clients)
        )
        return [times for client in each for times in client]


def ask(url: str, model: str, seed: int) -> Times:
    """Send a request and return its times."""
    body = {
        "model": model,
        "prompt": [(7 * seed + place) % 255 for place in range(PROMPT_TOKENS)],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    began, first = time.perf_counter(), None
    with urlopen(Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)) as lines:
        for _ in lines:
            first = first or time.perf_counter()
    assert first is not None
    return Times(first - began, time.perf_counter() - began)


if __name__ == "__main__":
    run_command(main)
