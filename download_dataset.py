"""Command: make a dataset ready: from the hub, from your own text or pairs, or the embedded one."""

from pathlib import Path

import click

from rungs.common.errors import run_command
from rungs.data import catalog, python_stdlib
from rungs.data.dataset import Dataset
from rungs.data.tokenizer_files import load_tokenizer


@click.command(options_metavar="[OPTIONS]")
@click.argument("what", nargs=-1, required=True, metavar="NAME | --text FILE... | --pairs FILE...")
@click.option("--text", is_flag=True, help="Make a dataset of your own UTF-8 text files.")
@click.option(
    "--pairs",
    is_flag=True,
    help='Make one of your own JSON lines {"prompt": "...", "answer": "..."}.',
)
@click.option("--name", help="Name of the dataset made of files.")
@click.option(
    "--vocab-size",
    type=int,
    help=f"Tokens of the tokenizer trained on the text.  [default: {python_stdlib.VOCAB_SIZE}]",
)
@click.option(
    "--tokenizer",
    help="A tokenizer.json, a folder with one, or a hub id: instead of training one; for pairs"
    " that of the model to fine-tune.",
)
@click.option(
    "--validation-percent",
    type=click.FloatRange(0, 100, max_open=True),
    default=python_stdlib.VALIDATION_PERCENT,
    show_default=True,
    help="Share of the files that is for validation.",
)
@click.option(
    "--datasets-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Where datasets are.  [default: ${catalog.VARIABLE}, else the project's datasets/]",
)
def main(
    what: tuple[str, ...],
    text: bool,
    pairs: bool,
    name: str | None,
    vocab_size: int | None,
    tokenizer: str | None,
    validation_percent: float,
    datasets_dir: Path | None,
) -> None:
    """Make a dataset ready for training and say what is in it.

    NAME is python-stdlib (built in), or the id of a dataset on the Hugging Face hub, such as
    gpjt/fineweb-gpt2-tokens. With --text, FILEs are tokenized into a dataset called by --name;
    of several files some are for validation, of one its end. With --pairs likewise, each line of
    a FILE a prompt and the answer to learn.
    """
    place = catalog.find_datasets_dir(datasets_dir)
    _refuse_misfits(what, text, pairs, name, vocab_size, tokenizer)
    files = [Path(file) for file in what]
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    if name and pairs and loaded:
        made = catalog.add_pairs(
            name, files, place, tokenizer=loaded, validation_percent=validation_percent
        )
    elif name:
        made = catalog.add_text(
            name,
            files,
            place,
            tokenizer=loaded or vocab_size or python_stdlib.VOCAB_SIZE,
            validation_percent=validation_percent,
        )
    else:
        made = catalog.open_dataset(what[0], place)
    _report(made)


def _refuse_misfits(
    what: tuple[str, ...],
    text: bool,
    pairs: bool,
    name: str | None,
    vocab_size: int | None,
    tokenizer: str | None,
) -> None:
    """Raises click.UsageError for options that do not go together."""
    if text and pairs:
        raise click.UsageError("--text and --pairs make different datasets; leave out one")
    if not (text or pairs) and (len(what) > 1 or name or vocab_size or tokenizer):
        raise click.UsageError("to make a dataset of files, add --text or --pairs")
    if (text or pairs) and not name:
        raise click.UsageError(f"--{'text' if text else 'pairs'} needs a --name for the dataset")
    if pairs and (vocab_size or not tokenizer):
        raise click.UsageError("--pairs needs the --tokenizer of the model to fine-tune")
    if vocab_size and tokenizer:
        raise click.UsageError("--vocab-size is for a tokenizer trained here; leave out one")


def _report(made: Dataset) -> None:
    click.echo(f"{made.name}: {made.folder}")
    for split in made.splits:
        found = made.description.splits[split]
        click.echo(
            f"  {split}: {found.tokens:,} tokens, largest id {found.largest_token_id},"
            f" {found.file_bytes:,} bytes of {found.dtype}"
        )
        if found.pairs:
            click.echo(
                f"    {found.pairs.pairs:,} pairs, the longest of {found.pairs.longest_tokens:,}"
                f" tokens; {found.pairs.answer_tokens:,} tokens in the answers"
            )
    if made.tokenizer_file:
        click.echo(f"  tokenizer: vocab_size {load_tokenizer(made.folder).vocab_size}")


if __name__ == "__main__":
    run_command(main)
