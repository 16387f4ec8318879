"""A ladder of runs, as a table for people and as JSON for programs."""

import json
from collections.abc import Iterator

from estimate import TOKENS_PER_PARAMETER
from ladder import Rung
from table import aligned, duration

MOST_EPOCHS = 4
"""Up to so many, repeated tokens are worth nearly what new ones are (Muennighoff et al. 2023)."""
_HEADINGS = ("FLOPs", "emb_dim", "n_layers", "parameters", "tokens", "each", "epochs")
_HEADINGS_OF_STEPS = ("tokens a step", "steps", "learning rate")


def as_text(rungs: list[Rung], flops_per_second: float | None) -> str:
    """The table, with the time that each run takes where that is known."""
    headings = [*_HEADINGS, *_HEADINGS_OF_STEPS]
    rows = [_row(rung) for rung in rungs]
    if flops_per_second is not None:
        headings.append("time")
        for row, rung in zip(rows, rungs, strict=True):
            row.append(duration(rung.flops / flops_per_second))
    return "\n".join([aligned([headings, *rows], left=0), "", *_notes(rungs, flops_per_second)])


def as_json(rungs: list[Rung], flops_per_second: float | None) -> str:
    """The same figures: FLOPs, tokens and seconds; and the keys that are changed."""
    content = [
        {
            "flops": rung.flops,
            "parameters": rung.shape.parameters,
            "tokens": rung.tokens,
            "steps": rung.steps,
            "tokens_per_step": rung.tokens_per_step,
            "seconds": flops_per_second and rung.flops / flops_per_second,
            "set": rung.changes,
        }
        for rung in rungs
    ]
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


def _notes(rungs: list[Rung], flops_per_second: float | None) -> Iterator[str]:
    yield f"each: tokens for each parameter; {TOKENS_PER_PARAMETER} are taken to be best"
    total = sum(rung.flops for rung in rungs)
    if flops_per_second is None:
        yield f"all together {total:.2e} FLOPs; --tokens-per-second of the run gives times"
    else:
        yield f"all together {total:.2e} FLOPs, {duration(total / flops_per_second)}"
    if any(rung.changes["epochs"] > MOST_EPOCHS for rung in rungs):
        yield f"beyond {MOST_EPOCHS} epochs a repeated token is worth less than a new one"
