"""Command: make a dataset ready: from the hub, from your own text, or the embedded one."""

from pathlib import Path

import click

import dataset
import python_stdlib
from dataset_folder import Dataset
from errors import run_command
from tokenization import load_tokenizer


@click.command(options_metavar="[OPTIONS]")
@click.argument("what", nargs=-1, required=True, metavar="NAME | --text FILE... --name NAME")
@click.option("--text", is_flag=True, help="Make a dataset of your own UTF-8 text files.")
@click.option("--name", help="Name of the dataset made of text.")
@click.option(
    "--vocab-size",
    type=int,
    help=f"Tokens of the tokenizer trained on the text.  [default: {python_stdlib.VOCAB_SIZE}]",
)
@click.option("--tokenizer", help="A tokenizer.json or hub id to use instead of training one.")
@click.option(
    "--validation-percent",
    type=click.FloatRange(0, 100, max_open=True),
    default=python_stdlib.VALIDATION_PERCENT,
    show_default=True,
    help="Share of the text that is for validation.",
)
@click.option(
    "--datasets-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Where datasets are.  [default: ${dataset.VARIABLE}, else the project's datasets/]",
)
def main(
    what: tuple[str, ...],
    text: bool,
    name: str | None,
    vocab_size: int | None,
    tokenizer: str | None,
    validation_percent: float,
    datasets_dir: Path | None,
) -> None:
    """Make a dataset ready for training and say what is in it.

    NAME is python-stdlib (built in), or the id of a dataset on the Hugging Face hub, such as
    gpjt/fineweb-gpt2-tokens. With --text, FILEs are tokenized into a dataset called NAME; of
    several files some are for validation, of one its end.
    """
    place = dataset.find_datasets_dir(datasets_dir)
    if not text:
        if len(what) > 1 or name or vocab_size or tokenizer:
            raise click.UsageError("to make a dataset of files, add --text")
        _report(dataset.open_dataset(what[0], place))
        return
    if not name:
        raise click.UsageError("--text needs a --name for the dataset")
    if vocab_size and tokenizer:
        raise click.UsageError("--vocab-size is for a tokenizer trained here; leave out one")
    made = dataset.add_text(
        name,
        [Path(file) for file in what],
        place,
        tokenizer=load_tokenizer(tokenizer)
        if tokenizer
        else vocab_size or python_stdlib.VOCAB_SIZE,
        validation_percent=validation_percent,
    )
    _report(made)


def _report(made: Dataset) -> None:
    click.echo(f"{made.name}: {made.folder}")
    for split in made.splits:
        found = made.description.splits[split]
        click.echo(
            f"  {split}: {found.tokens:,} tokens, largest id {found.largest_token_id},"
            f" {found.file_bytes:,} bytes of {found.dtype}"
        )
    if made.tokenizer_file:
        click.echo(f"  tokenizer: vocab_size {load_tokenizer(made.folder).vocab_size}")


if __name__ == "__main__":
    run_command(main)
