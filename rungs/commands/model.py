"""Show the model of a run as it is built, or what it does with a text."""

from rungs.common.command import importing

import os

import click

from rungs.common.errors import RunFailure, UserError, errors_at
from rungs.common.shown_text import counted
from rungs.config.run_config import load_any_run
from rungs.run.folder import RunFolder, find_run

MAX_INITIALIZED_PARAMETERS = 500_000_000
"""Models with more parameters are not initialized, as they may not fit into memory."""


def show(run: str, data: int, tensor: int, context: int, as_json: bool, look: str | None) -> None:
    """Do what the options of `model.py` ask for. Raises UserError if the run is not readable, or
    the text doesn't fit its model."""
    if look is None:
        show_model(run, data, tensor, context, as_json)
    elif as_json:
        raise UserError("--look: writes a page; leave out --json, or use rungs.look in Python")
    else:
        look_inside(RunFolder(find_run(run)), look)


def show_model(run: str, data: int, tensor: int, context: int, as_json: bool) -> None:
    """Print the modules and arrays of a run's model, before training."""
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


def look_inside(run: RunFolder, text: str) -> None:
    """Write the page of what a run's best checkpoint does with a text."""
    with importing():
        import numpy as np

        from rungs.checkpointing.checkpoint_folder import find_weights
        from rungs.checkpointing.load import load_model, load_tokenizer
        from rungs.checkpointing.weights_file import Weights
        from rungs.inspect.look import look
        from rungs.parallel import jax_setup
        from rungs.report import look_page
    jax_setup.enable_compilation_cache()
    weights, tokenizer = find_weights(run.path), load_tokenizer(run.path)
    tokens = tokenizer.encode(text)
    if not tokens:
        raise UserError("--look: the text has no token; give another one")
    tokens = [*tokenizer.begin, *tokens]
    most = look_page.most_tokens(Weights(weights).header.model)
    if len(tokens) > most:
        raise UserError(
            f"--look: the text has {len(tokens):,} tokens; a page of this model has at most"
            f" {most:,}, so give a shorter one"
        )
    with errors_at("--look: ", ValueError):
        found = look(load_model(weights), np.asarray([tokens]))
    if not np.isfinite(found.contributions.logits_BS).all():
        raise RunFailure(f"{weights}: its logits are not finite; use another checkpoint")
    step = weights.resolve().parent.name
    look_page.write_page(run.look, found, tokenizer, run.path.name, step)
    losses = found.losses_BS
    mean = f", mean loss {losses.mean():.4f}" if losses.size else ""
    click.echo(f"{counted(len(tokens), 'token')}{mean}; the page is {run.look}")
