"""Command: build a dataset from your own files, or download one from the hub."""

from rungs.common.command import run_command

from pathlib import Path

import click

from rungs.data import catalog, python_stdlib
from rungs.data.catalog import DATASETS_DIR_OPTION
from rungs.data.dataset import Dataset
from rungs.data.tokenizer_files import load_tokenizer


@click.command(options_metavar="[OPTIONS]")
@click.argument("what", nargs=-1, required=True, metavar="NAME | --text FILE... | --pairs FILE...")
@click.option("--text", is_flag=True, help="Build a dataset from your own UTF-8 text files.")
@click.option(
    "--pairs",
    is_flag=True,
    help='Build a dataset from your own JSON lines {"prompt": "...", "answer": "..."}.',
)
@click.option("--name", help="Name of the dataset to build.")
@click.option(
    "--vocab-size",
    type=int,
    help="Vocabulary size of the BPE tokenizer trained on the text."
    f"  [default: {python_stdlib.VOCAB_SIZE}]",
)
@click.option(
    "--tokenizer",
    help="Use this tokenizer instead of training one: a tokenizer.json, a folder with one, or a"
    " hub id. For pairs it must be the tokenizer of the model to fine-tune.",
)
@click.option(
    "--validation-percent",
    type=click.FloatRange(0, 100, max_open=True),
    default=python_stdlib.VALIDATION_PERCENT,
    show_default=True,
    help="Share of the text to use for validation.",
)
@DATASETS_DIR_OPTION
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
    """Build or download a dataset, and print what is in it.

    NAME is python-stdlib (built in), or the id of a dataset on the Hugging Face hub, such as
    gpjt/fineweb-gpt2-tokens.

    With --text, the dataset is built from FILEs of text. With --pairs, each line of a FILE is a
    prompt and the answer to learn. Some of the files are kept for validation; if there is only
    one, its end is.

    The name of a special token inside a text, such as <|endoftext|>, becomes that token.
    """
    datasets_dir = catalog.find_datasets_dir(datasets_dir)
    _check_options(what, text, pairs, name, vocab_size, tokenizer)
    files = [Path(file) for file in what]
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    if name and pairs and loaded:
        dataset = catalog.build_pair_dataset(
            name, files, datasets_dir, tokenizer=loaded, validation_percent=validation_percent
        )
    elif name:
        dataset = catalog.build_text_dataset(
            name,
            files,
            datasets_dir,
            tokenizer=loaded or vocab_size or python_stdlib.VOCAB_SIZE,
            validation_percent=validation_percent,
        )
    else:
        dataset = catalog.open_dataset(what[0], datasets_dir)
    _report(dataset)


def _check_options(
    what: tuple[str, ...],
    text: bool,
    pairs: bool,
    name: str | None,
    vocab_size: int | None,
    tokenizer: str | None,
) -> None:
    """Raise click.UsageError if options do not go together."""
    if text and pairs:
        raise click.UsageError("--text and --pairs build different datasets; leave out one")
    if not (text or pairs) and (len(what) > 1 or name or vocab_size or tokenizer):
        raise click.UsageError("to build a dataset from files, add --text or --pairs")
    if (text or pairs) and not name:
        raise click.UsageError(f"--{'text' if text else 'pairs'} needs a --name for the dataset")
    if pairs and (vocab_size or not tokenizer):
        raise click.UsageError("--pairs needs the --tokenizer of the model to fine-tune")
    if vocab_size and tokenizer:
        raise click.UsageError("--vocab-size and --tokenizer do not go together; leave out one")


def _report(dataset: Dataset) -> None:
    click.echo(f"{dataset.name}: {dataset.folder}")
    for split in dataset.splits:
        contents = dataset.description.splits[split]
        click.echo(
            f"  {split}: {contents.tokens:,} tokens, largest id {contents.largest_token_id},"
            f" {contents.file_bytes:,} bytes of {contents.dtype}"
        )
        if pairs := contents.pairs:
            click.echo(
                f"    {pairs.pairs:,} pairs, the longest has {pairs.longest_tokens:,} tokens;"
                f" {pairs.answer_tokens:,} tokens in the answers"
            )
    if dataset.tokenizer_file:
        click.echo(f"  tokenizer: vocab_size {load_tokenizer(dataset.folder).vocab_size}")


if __name__ == "__main__":
    run_command(main)
