"""A ladder of runs, as a table for people and as JSON for programs."""

import json
from collections.abc import Iterator

from rungs.common.text_table import align_columns, format_duration
from rungs.planning.flops import TOKENS_PER_PARAMETER
from rungs.planning.forecast import Forecast, Speed
from rungs.planning.memory import Memory, shown
from rungs.planning.report import UNKNOWN_SPEED
from rungs.scaling.ladder import Rung

MOST_EPOCHS = 4
"""Up to so many, repeated tokens are worth nearly what new ones are (Muennighoff et al. 2023)."""
_HEADINGS = ("FLOPs", "emb_dim", "n_layers", "parameters", "tokens", "each", "epochs")
_HEADINGS_OF_STEPS = ("tokens a step", "steps", "learning rate")


def as_text(rungs: list[Rung], planned: Forecast, largest: Memory) -> str:
    """The table, with the time that each run takes where that is known.

    Args:
        planned: the run that they are made from, on the devices that they are for.
        largest: memory of the last.
    """
    headings = [*_HEADINGS, *_HEADINGS_OF_STEPS]
    rows = [_row(rung) for rung in rungs]
    if planned.speed is not None:
        headings.append("time")
        for row, rung in zip(rows, rungs, strict=True):
            row.append(format_duration(rung.flops / planned.speed.flops))
    notes = [*_of_all(rungs, planned.speed), *_of_data(rungs, planned)]
    table = align_columns([headings, *rows], left=0)
    return "\n".join([table, "", *notes, _verdict(planned, largest)])


def as_json(rungs: list[Rung], planned: Forecast, largest: Memory) -> str:
    """The same figures: FLOPs, tokens and seconds; and the keys that are changed."""
    speed = planned.speed
    content = {
        "rungs": [
            {
                "flops": rung.flops,
                "parameters": rung.shape.parameters,
                "tokens": rung.tokens,
                "steps": rung.steps,
                "tokens_per_step": rung.tokens_per_step,
                "seconds": speed and rung.flops / speed.flops,
                "set": rung.changes,
            }
            for rung in rungs
        ],
        "missing_datasets": planned.missing,
        "bytes_per_device_of_largest": largest.total,
        "fits": largest.total <= planned.usable_bytes,
    }
    return json.dumps(content, indent=2)


def _row(rung: Rung) -> list[str]:
    changes = rung.changes
    return [
        f"{rung.flops:.2e}",
        f"{changes['emb_dim']:,}",
        f"{changes['n_layers']:,}",
        f"{rung.shape.parameters:,}",
        f"{rung.tokens:,}",
        f"{rung.tokens / rung.shape.parameters:.1f}",
        f"{changes['epochs']:,}",
        f"{rung.tokens_per_step:,}",
        f"{rung.steps:,}",
        f"{changes['learning_rate']:g}" if "learning_rate" in changes else "as it is",
    ]


def _of_all(rungs: list[Rung], speed: Speed | None) -> Iterator[str]:
    yield f"each: tokens for each parameter; {TOKENS_PER_PARAMETER} are taken to be best"
    total = sum(rung.flops for rung in rungs)
    if speed is None:
        yield f"all together {total:.2e} FLOPs; {UNKNOWN_SPEED}"
        return
    time = format_duration(total / speed.flops)
    yield f"all together {total:.2e} FLOPs, {time} at {speed.flops / 1e12:.3g} TFLOP/s"
    yield f"({speed.reason}), starts and whatever keeps small runs from that left out"


def _of_data(rungs: list[Rung], planned: Forecast) -> Iterator[str]:
    for name in planned.missing:
        yield (
            f"{name} is not here, so how often it is to be repeated is not known:"
            f" uv run download_dataset.py {name}, then propose again"
        )
    most = max(rung.changes["epochs"] for rung in rungs)
    if most > MOST_EPOCHS:
        yield (
            f"the data is too small: repeated {most:,} times. Beyond {MOST_EPOCHS} a token is worth"
            " less than a new one, and losses bend away from a power law"
        )


def _verdict(planned: Forecast, largest: Memory) -> str:
    memory = f"{shown(largest.total)} of {shown(planned.usable_bytes)} on each device"
    if largest.total <= planned.usable_bytes:
        return f"the largest takes {memory}: it fits"
    return (
        f"the largest takes {memory}: it does not fit, and nothing is written; a smaller"
        " microbatch_size takes less"
    )
