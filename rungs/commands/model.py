"""Show the model of a run as it is built."""

import os

import click

from rungs.config.run_config import load_any_run
from rungs.run.folder import find_run

MAX_INITIALIZED_PARAMETERS = 500_000_000
"""Models with more parameters are not initialized, as they may not fit into memory."""


def show_model(run: str, data: int, tensor: int, context: int, as_json: bool) -> None:
    """Do what the options of `model.py` ask for. Raises UserError if the run is not readable."""
    config = load_any_run(find_run(run))
    # Must be set before JAX is imported, which takes seconds; config errors are reported first.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from rungs.parallel import jax_setup
    from rungs.planning import model_summary

    jax_setup.refuse_unusable()
    summary = model_summary.summarize(
        config.model,
        config.train.lora,
        {"data": data, "tensor": tensor, "context": context},
        seed=config.train.seed,
        max_initialized=MAX_INITIALIZED_PARAMETERS,
    )
    click.echo((model_summary.as_json if as_json else model_summary.as_text)(summary))
