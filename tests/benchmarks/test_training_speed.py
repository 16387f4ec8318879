"""The speed table of `benchmarks/training_speed/`, and the processes that it times."""

import dataclasses
import math
import re
import sys

import click
import pytest

from benchmarks.side_process import Side, start
from benchmarks.training_speed.rungs_side import run_config
from benchmarks.training_speed.speed_table import Row, Shape, speed_table
from rungs.step.state import shapes_of

SMALL = Shape(vocab=8192, length=256, width=256, heads=8, layers=4)
ODD = Shape(vocab=101, length=7, width=12, heads=3, layers=5)
EMBEDDINGS = ("token_embedding.embedding", "position_embedding.embedding")


@pytest.mark.parametrize("shape", [SMALL, ODD])
def test_parameters_are_counted_as_in_the_model_that_is_trained(shape: Shape) -> None:
    asked = {"dtype": "float32", "learning_rate": 0.001, "devices": "auto"}
    run = run_config(dataclasses.asdict(shape) | asked, accumulation=2, microbatch=8)
    counts = {name: math.prod(lengths) for name, lengths in shapes_of(run.model).items()}
    in_tables = sum(counts.pop(name) for name in EMBEDDINGS)
    assert in_tables == (shape.vocab + shape.length) * shape.width
    assert shape.parameters == sum(counts.values())


def test_flops_per_token_match_a_count_by_hand() -> None:
    block = 3 * 256 * 256 + (256 * 256 + 256) + 2 * 512 + (256 * 1024 + 1024) + (1024 * 256 + 256)
    parameters = 4 * block + 512 + 256 * 8192
    assert SMALL.parameters == parameters == 5_253_632
    assert SMALL.flops_per_token == 6 * parameters + 12 * 4 * 256 * 256 == 34_667_520


def test_each_side_is_compared_with_the_plain_loop_the_fastest_pytorch_and_the_peak() -> None:
    rows = [
        Row("Rungs float32", [2000.0, 3000.0, 2500.0], 6.25),
        Row("plain loop", [1000.0], 6.5),
        Row("PyTorch float32", [1250.0], 6.0),
        Row("PyTorch bfloat16, compiled", [2000.0], 6.0),
    ]
    heading, *lines = speed_table(rows, flops_per_token=1e6, peak=1e10).splitlines()
    assert cells(heading) == [
        "side",
        "tokens/s (lowest to highest)",
        "÷ plain loop",
        "÷ fastest PyTorch",
        "GFLOP/s",
        "of the peak",
        "last loss",
    ]
    assert {len(line) for line in lines} == {len(heading)}
    expected = ["Rungs float32", "2,500 (2,000 to 3,000)", "2.50", "1.25", "2.5", "25.0%", "6.250"]
    assert cells(lines[0]) == expected
    assert cells(lines[2])[2:4] == ["1.25", "0.62"]


def test_without_the_plain_loop_and_pytorch_there_is_no_ratio() -> None:
    table = speed_table([Row("Rungs float32", [10.0], 1.0)], flops_per_token=1.0, peak=100.0)
    assert cells(table.splitlines()[-1])[2:4] == ["–", "–"]


def test_a_failed_side_is_reported_with_the_last_lines_of_its_stderr() -> None:
    program = "import sys; sys.exit('\\n'.join(map(str, range(100))))"
    side = Side("a side", [sys.executable, "-c", program])
    with start(side) as process, pytest.raises(click.ClickException) as raised:
        process.ask("1")
    name, *lines = raised.value.message.splitlines()
    assert name.startswith("a side:")
    assert lines == [str(number) for number in range(85, 100)]


def cells(line: str) -> list[str]:
    return re.split("  +", line.strip())
