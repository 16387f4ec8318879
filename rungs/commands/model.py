"""Show the model of a run as it is built."""

import json
import os
from typing import TYPE_CHECKING

import click

from rungs.common.shown_text import align_columns
from rungs.config.run_config import load_any_run
from rungs.run.folder import find_run

if TYPE_CHECKING:
    from rungs.planning.model_summary import ArraySummary, ModelSummary

MAX_INITIALIZED_PARAMETERS = 500_000_000
"""Models with more parameters are not initialized, as they may not fit into memory."""


def show_model(run: str, data: int, tensor: int, context: int, as_json: bool) -> None:
    """Do what the options of `model.py` ask for. Raises UserError if the run is not readable."""
    config = load_any_run(find_run(run))
    # Must be set before JAX is imported, which takes seconds; config errors are reported first.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from rungs.parallel import jax_setup
    from rungs.planning.model_summary import summarize

    jax_setup.refuse_unusable()
    summary = summarize(
        config.model,
        config.train.lora,
        {"data": data, "tensor": tensor, "context": context},
        seed=config.train.seed,
        max_initialized=MAX_INITIALIZED_PARAMETERS,
    )
    click.echo(_as_json(summary) if as_json else _as_text(summary))


def _as_json(summary: "ModelSummary") -> str:
    return json.dumps(
        {
            "parameters": summary.parameters,
            "modules": [module._asdict() for module in summary.modules],
            "arrays": [array._asdict() for array in summary.arrays],
        },
        indent=2,
    )


def _as_text(summary: "ModelSummary") -> str:
    header = ("array", "axes", "shape", "dtype", "initial std", "share", *summary.arrays[0].splits)
    table = align_columns([header, *map(_row, summary.arrays)], left=4)
    return f"{_tree(summary)}\n\n{table}"


def _tree(summary: "ModelSummary") -> str:
    rows = []
    for module in summary.modules:
        depth = module.path.count(".") + 1 if module.path else 0
        name = module.path.rpartition(".")[2]
        label = f"{'  ' * depth}{name}: {module.type}" if name else module.type
        rows.append((label, f"{module.parameters:,}"))
    return align_columns([("module", "parameters"), *rows])


def _row(array: "ArraySummary") -> tuple[str, ...]:
    splits = [
        ", ".join(f"{axis} / {over}" for axis, over in by_axis.items())
        for by_axis in array.splits.values()
    ]
    return (
        array.name,
        " ".join(array.axes),
        " × ".join(f"{size:,}" for size in array.shape),
        array.dtype,
        "too large" if array.initial_std is None else f"{array.initial_std:.4g}",
        f"{array.share:.2%}",
        *(split or "–" for split in splits),
    )
