"""Command: build a dataset from your own files or from text on the hub, or download tokens."""

from rungs.common.command import begin_command, importing, run_command

if __name__ == "__main__":
    begin_command()

from pathlib import Path
from typing import Any

import click

from rungs.commands.options import DATASETS_DIR_OPTION, FiniteRange
from rungs.config.option_values import (
    DOCUMENTS_VALIDATION_PERCENT,
    LARGEST_VOCAB,
    VALIDATION_PERCENT,
    VOCAB_SIZE,
)


@click.command(options_metavar="[OPTIONS]")
@click.argument("what", nargs=-1, required=True, metavar="NAME | --text FILE... | --pairs FILE...")
@click.option("--text", is_flag=True, help="Build a dataset from your own UTF-8 text files.")
@click.option(
    "--pairs",
    is_flag=True,
    help='Build a dataset from your own JSON lines {"prompt": "...", "answer": "..."}.',
)
@click.option(
    "--chats",
    is_flag=True,
    help='Build a dataset from your own JSON lines {"messages": [{"role", "content"}, ...]}, or in'
    " ShareGPT's format, as the tokenizer's chat template renders them.",
)
@click.option(
    "--preferences",
    is_flag=True,
    help='Build a dataset from preferences, rows {"prompt", "chosen", "rejected"} of texts or'
    " messages, in your own JSON lines or Parquet, or of a repository on the hub.",
)
@click.option("--parquet", is_flag=True, help="Build a dataset from your own Parquet files.")
@click.option(
    "--jsonl",
    is_flag=True,
    help='Build a dataset from your own JSON lines {"text": "..."}, also .gz and .zst.',
)
@click.option(
    "--tokens",
    is_flag=True,
    help="Build a dataset from token ids in your own files: .npy, .safetensors, .bin of nanoGPT,"
    " llm.c and modded-nanogpt. Needs --tokenizer or --vocab-size.",
)
@click.option("--name", help="Name of the dataset to build.  [default: that on the hub]")
@click.option(
    "--vocab-size",
    type=click.IntRange(max=LARGEST_VOCAB),
    help="Vocabulary size of the BPE tokenizer trained on the text or pairs; with --tokens, of the"
    f" one that made them.  [default: {VOCAB_SIZE}; none for tokens]",
)
@click.option(
    "--tokenizer",
    help="Use this tokenizer instead of training one: a tokenizer.json, a folder with one, or a"
    " hub id such as gpt2. To fine-tune a model, it must be the model's.",
)
@click.option(
    "--validation-percent",
    type=FiniteRange(0, 100, max_open=True),
    help="Share of the text to use for validation, unless a repository has a split for it."
    f"  [default: {VALIDATION_PERCENT}; of documents {DOCUMENTS_VALIDATION_PERCENT:g}]",
)
@click.option(
    "--validation-file",
    multiple=True,
    type=click.Path(path_type=Path),
    help="With --tokens: a file of tokens for validation, instead of a share. Can be repeated.",
)
@click.option("--text-column", help="The column with the documents.  [default: text]")
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --chats or --preferences: a template in Jinja.  [default: the tokenizer's own]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(2),
    help="With --chats or --preferences: leave out those with more tokens.",
)
@click.option("--max-bytes", type=click.IntRange(1), help="Stop after so many bytes of documents.")
@click.option("--config", help="For a repository on the hub: which of its configurations.")
@click.option("--split", help="For a repository on the hub: train on this split only.")
@click.option(
    "--files",
    multiple=True,
    metavar="PATTERN",
    help="For a repository on the hub: only these files, such as 'sample/10BT/*'. Can be repeated.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Report how much of the validation split also appears in training, and duplicates.",
)
@click.option(
    "--items",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Report how many of a benchmark's items, JSON lines, also appear in training.",
)
@click.option("--revision", help="For a repository on the hub: a branch, tag or commit.")
@DATASETS_DIR_OPTION
def main(**options: Any) -> None:
    """Build or download a dataset, and print what is in it.

    NAME is python-stdlib (built in), or the id of a dataset on the Hugging Face hub: tokens, such
    as gpjt/fineweb-gpt2-tokens, or documents in Parquet, JSON lines or plain text, such as
    roneneldan/TinyStories, which are tokenized as they arrive. Killed and run again, it goes on.

    With --text, the dataset is built from FILEs of text; with --parquet or --jsonl from FILEs with
    a document in each row. With --pairs, each line of a FILE is a prompt and the answer to learn;
    with --chats a chat, of which what the assistant says is to be learned; with --preferences a
    prompt with a chosen and a rejected answer; with --tokens FILEs of token ids.
    Some of the files or documents are kept for validation; if there is only one file of text or
    tokens, its end is.

    The name of a special token inside a text, such as <|endoftext|>, becomes that token.
    """
    with importing():
        from rungs.commands.download_dataset import download_dataset
    download_dataset(**options)


if __name__ == "__main__":
    run_command(main)
