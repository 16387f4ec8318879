"""Published models in and out: `uv run pretrained.py import openai-community/gpt2 runs/gpt2`."""

import json
import sys
from pathlib import Path

import click

from rungs.common.atomic_folder import create_folder
from rungs.common.errors import UserError, run_command
from rungs.common.paths import is_there
from rungs.config.model_config import ModelConfig
from rungs.huggingface.comparison import Diverged, compare, find_transformers
from rungs.huggingface.exporting import Export
from rungs.huggingface.importing import Import, find_source, import_model, target_folder
from rungs.run.folder import RunFolder

EXIT_DIVERGED = 1
MOST_EXAMPLE_TOKENS = 1024


@click.group()
def main() -> None:
    """Import models from the Hugging Face hub, and export them for transformers."""


@main.command("import")
@click.argument("source", metavar="HUB_ID_OR_FOLDER")
@click.argument("run")
@click.option("--revision", metavar="NAME", help="A branch, tag or commit on the hub.")
@click.option("--check", is_flag=True, help="Compare with transformers, layer by layer.")
@click.option(
    "--ignore-key",
    "ignored_keys",
    metavar="KEY",
    multiple=True,
    help="A key of config.json that changes nothing; may be given again.",
)
def import_(
    source: str, run: str, revision: str | None, check: bool, ignored_keys: tuple[str, ...]
) -> None:
    """Make run folder RUN (a path, or a name under runs/) of a published model."""
    target = target_folder(run)
    if check:
        find_transformers()
    found = Import.of(find_source(source, revision), ignored_keys)
    click.echo(found.summary())
    for note in found.match.notes:
        click.echo(note)

    def compare_if_asked(made: RunFolder) -> None:
        if check:
            compare(found.source.folder, made.imported, click.echo)

    try:
        notes = import_model(found, target, compare_if_asked)
    except Diverged as divergence:
        click.echo(f"error: {divergence}; {target} is not made", err=True)
        sys.exit(EXIT_DIVERGED)
    for note in notes:
        click.echo(note)
    click.echo(f"{target}: imported")
    click.echo(how_to_fine_tune(target, found.model))


@main.command()
@click.argument("checkpoint", metavar="RUN_OR_CHECKPOINT")
@click.argument("folder", type=click.Path(path_type=Path))
def export(checkpoint: str, folder: Path) -> None:
    """Write FOLDER from a run folder (its best checkpoint, else what was imported), a checkpoint or
    a model.safetensors."""
    if is_there(folder):
        raise UserError(f"{folder}: there already; choose another name, or move it away")
    found = Export(checkpoint)
    click.echo(found.summary())
    with create_folder(folder) as partial:
        notes = found.write(partial)
    for note in notes:
        click.echo(note)
    click.echo(f"{folder}: written. Load it: AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def how_to_fine_tune(target: Path, model: ModelConfig) -> str:
    """The next two steps, for a user who wants to train on from here."""
    example = {
        "start_from": "imported",
        "dataset": "NAME",
        "sequence_length": min(model.context_length, MOST_EXAMPLE_TOKENS),
        "microbatch_size": 4,
        "learning_rate": 1e-5,
        "checkpoint_interval": 100,
    }
    folder = target / "checkpoints" / "imported"
    return (
        "To fine-tune it: uv run download_dataset.py --text FILE --name NAME --tokenizer"
        f" {folder}\nand write {target / 'train.json'}:\n{json.dumps(example, indent=2)}"
    )


if __name__ == "__main__":
    run_command(main)
