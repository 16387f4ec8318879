"""Show the model of a run as it is built, or what it does with a text."""

from rungs.common.command import importing

import os
from typing import TYPE_CHECKING

import click

from rungs.common.errors import RunFailure, UserError, errors_at
from rungs.common.shown_text import counted
from rungs.config.option_values import MOST_DEVICES

if TYPE_CHECKING:
    from rungs.run.folder import RunFolder

MAX_INITIALIZED_PARAMETERS = 500_000_000
"""Models with more parameters are not initialized, as they may not fit into memory."""


@click.command()
@click.argument("run")
@click.option(
    "--data",
    type=click.IntRange(2, MOST_DEVICES),
    default=2,
    show_default=True,
    help="Devices along the data axis, in fsdp, fsdp_tp and cp.",
)
@click.option(
    "--tensor",
    type=click.IntRange(2, MOST_DEVICES),
    default=2,
    show_default=True,
    help="Devices along the tensor axis, in tp and fsdp_tp.",
)
@click.option(
    "--context",
    type=click.IntRange(2, MOST_DEVICES),
    default=2,
    show_default=True,
    help="Devices along the context axis, in cp.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option(
    "--look",
    metavar="TEXT",
    help="Write a page of what the trained model does with a text: attention maps, predictions"
    " after each layer, losses, contributions to the logits.",
)
def main(run: str, data: int, tensor: int, context: int, as_json: bool, look: str | None) -> None:
    """Show the model of RUN as it is before training.

    Prints the module tree, then each array's name, axes, shape, dtype, initial standard deviation
    and share of the parameters, and along which axis each sharding mode splits it. With --look,
    writes look.html into the run folder instead, from its best checkpoint.
    """
    with importing():
        from rungs.config.run_config import load_any_run
        from rungs.run.folder import RunFolder, find_run

    folder = RunFolder(find_run(run))
    if look is not None:
        if as_json:
            raise UserError("--look: writes a page; leave out --json, or use rungs.look in Python")
        look_inside(folder, look)
        return
    config = load_any_run(folder.path)
    # Must be set before JAX is imported, which takes seconds; config errors are reported first.
    os.environ["JAX_PLATFORMS"] = "cpu"
    with importing():
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


def look_inside(run: "RunFolder", text: str) -> None:
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
