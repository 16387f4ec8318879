"""Make a run folder."""

from rungs.common.command import importing

import click

from rungs.cli.options import LIKE_OPTION, PRESET_OPTION, SET_OPTION
from rungs.common.errors import UserError


@click.command()
@click.argument("run")
@LIKE_OPTION
@SET_OPTION
@PRESET_OPTION
def main(run: str, like: str | None, settings: tuple[str, ...], preset: str | None) -> None:
    """Make the folder RUN, to look at its keys, change them and train it.

    A name without a folder is one in runs/. --like takes your runs and those that come with
    Rungs, such as small-recipe. Nothing is trained."""
    with importing():
        from rungs.common.shown_text import quoted
        from rungs.config.run_config import load_any_run
        from rungs.huggingface.presets import create_preset
        from rungs.run.derive import create_like
        from rungs.run.folder import shipped_runs

    if (like is None) == (preset is None):
        known = ", ".join(shipped_runs())
        raise UserError(f"give --like RUN or --preset NAME; runs that come with Rungs: {known}")
    made = create_like(run, like, settings) if like else create_preset(run, preset or "", settings)
    with made as folder:
        click.echo(f"{folder}: made; to train it: {load_any_run(folder).command} {quoted(run)}")
