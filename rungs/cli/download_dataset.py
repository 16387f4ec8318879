"""Build or download a dataset, and print what is in it."""

from rungs.common.command import importing

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from rungs.cli.options import DATASETS_DIR_OPTION, FiniteRange
from rungs.common.shown_text import counted
from rungs.config.option_values import (
    CHAT_TEMPLATES,
    DOCUMENTS_VALIDATION_PERCENT,
    LARGEST_VOCAB,
    TOKEN_DTYPES,
    VALIDATION_PERCENT,
    VOCAB_SIZE,
)

if TYPE_CHECKING:
    from rungs.common.hub import HubRepository
    from rungs.data import overlap
    from rungs.data.build.document_dataset import Request
    from rungs.data.build.document_files import DataFile
    from rungs.data.text.tokenizer import Tokenizer
    from rungs.data.tokens.dataset import Dataset, Source

_OWN_FILES = ("text", "pairs", "chats", "preferences", "unpaired", "parquet", "jsonl", "tokens")


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
@click.option(
    "--unpaired",
    is_flag=True,
    help='Likewise of unpaired preferences, rows {"prompt", "completion", "desirable"}.',
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
@click.option(
    "--token-dtype",
    type=click.Choice(TOKEN_DTYPES),
    help="With --tokens: the type of numbers in .bin files without a header.  [default: uint16]",
)
@click.option("--text-column", help="The column with the documents.  [default: text]")
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"With --chats or --preferences: a file in Jinja, or {CHAT_TEMPLATES}."
    "  [default: the tokenizer's own]",
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
    "--near-duplicates",
    type=FiniteRange(0, 1, min_open=True),
    help="Build a dataset of the documents of NAME that are less similar to all earlier ones.",
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
def main(
    what: tuple[str, ...],
    datasets_dir: Path | None,
    check: bool,
    items: Path | None,
    **options: Any,
) -> None:
    """Build or download a dataset, and print what is in it.

    NAME is python-stdlib (built in), or the id of a dataset on the Hugging Face hub: tokens, such
    as gpjt/fineweb-gpt2-tokens, or documents in Parquet, JSON lines or plain text, such as
    roneneldan/TinyStories, which are tokenized as they arrive. Killed and run again, it goes on.

    With --text, the dataset is built from FILEs of text; with --parquet or --jsonl from FILEs with
    a document in each row. With --pairs, each line of a FILE is a prompt and the answer to learn;
    with --chats a chat, of which what the assistant says is to be learned; with --preferences a
    prompt with a chosen and a rejected answer, with --unpaired one with an answer that is desirable
    or not; with --tokens FILEs of token ids.
    Some of the files or documents are kept for validation; if there is only one file of text or
    tokens, its end is.

    The name of a special token inside a text, such as <|endoftext|>, becomes that token.
    """
    with importing():
        from rungs.data import overlap
        from rungs.data.catalog import find_datasets_dir

    chosen = Options(**options)
    chosen.check(what)
    examined = overlap.read_items(items) if items else None
    dataset = _dataset(what, find_datasets_dir(datasets_dir), chosen)
    if check:
        overlap.check(dataset).save(dataset.folder)
    _report(dataset)
    if examined:
        _report_found(str(items), "items", overlap.check_items(dataset, examined))


class Options(SimpleNamespace):
    """The options that say how a dataset is built, by the names of the parameters of Click."""

    @property
    def given(self) -> set[str]:
        """The names of the options that are given, also as 0."""
        absent = (None, False, ())
        return {key for key, value in vars(self).items() if not any(value is no for no in absent)}

    @property
    def kinds(self) -> list[str]:
        """The options that say what the FILE arguments hold."""
        return [f"--{kind}" for kind in _OWN_FILES if getattr(self, kind)]

    @property
    def has_preferences(self) -> bool:
        """Whether the rows are preferences, paired or not."""
        return bool(self.preferences or self.unpaired)

    def check(self, what: tuple[str, ...]) -> None:
        """Raise click.UsageError if the options do not go together."""
        given = self.given
        kind = next(iter(self.kinds), "--near-duplicates" if self.near_duplicates else "")
        is_hub_id = _is_hub_id(what) if self.has_preferences else not kind and "/" in what[0]
        is_of_chats = self.chats or self.has_preferences
        is_of_rows = self.parquet or self.jsonl

        def first(*keys: str) -> str:
            """Return the first of these options that is given, or an empty text."""
            found = (f"--{key.replace('_', '-')}" for key in keys if key in given)
            return next(found, "")

        of_hub = first("config", "split", "files", "revision")
        of_documents = first("text_column", "max_bytes")
        of_chats = first("chat_template", "max_tokens")
        apart = "do not go together; leave out one"
        for is_wrong, message in (
            (
                len(self.kinds) > 1,
                f"{' and '.join(self.kinds)} build different datasets; choose one",
            ),
            (
                self.near_duplicates and (len(what) > 1 or given != {"near_duplicates", "name"}),
                "--near-duplicates needs the NAME of one dataset and a new --name, nothing else",
            ),
            (
                not kind and (len(what) > 1 or (given and not is_hub_id)),
                "to build a dataset from files, add --text, --parquet or the like",
            ),
            (kind and not self.name, f"{kind} needs a --name for the dataset"),
            (of_hub and not is_hub_id, f"{of_hub} is for repositories on the hub"),
            (
                of_documents and kind and not is_of_rows,
                f"{of_documents} is for documents, not for {kind}",
            ),
            (of_chats and not is_of_chats, f"{of_chats} is for --chats or --preferences"),
            (
                is_of_chats and ("vocab_size" in given or not self.tokenizer),
                f"{kind} needs the --tokenizer of the model to fine-tune",
            ),
            (
                self.tokens and not given & {"vocab_size", "tokenizer"},
                "--tokens needs the --tokenizer that made them, or its --vocab-size",
            ),
            (self.validation_file and not self.tokens, "--validation-file is for --tokens"),
            (self.token_dtype and not self.tokens, "--token-dtype is for --tokens"),
            (
                self.validation_file and "validation_percent" in given,
                f"--validation-file and --validation-percent {apart}",
            ),
            (given >= {"vocab_size", "tokenizer"}, f"--vocab-size and --tokenizer {apart}"),
        ):
            if is_wrong:
                raise click.UsageError(message)

    def load_tokenizer(self) -> "Tokenizer | int":
        """Return the tokenizer, or the vocabulary size of a tokenizer to train."""
        from rungs.data.text import tokenizer_files

        if self.tokenizer:
            return tokenizer_files.load_tokenizer(self.tokenizer)
        if self.vocab_size is not None:
            return int(self.vocab_size)
        click.echo(
            f"training a tokenizer of at most {VOCAB_SIZE:,} tokens (--vocab-size);"
            " to fine-tune a model, give its --tokenizer"
        )
        return VOCAB_SIZE

    def percent(self, default: float = VALIDATION_PERCENT) -> float:
        """Return the percentage to use for validation."""
        return default if self.validation_percent is None else float(self.validation_percent)


def _dataset(what: tuple[str, ...], datasets_dir: Path, options: Options) -> "Dataset":
    """Build, download or open the dataset."""
    from rungs.common import hub
    from rungs.data import catalog
    from rungs.data.build import near_duplicates
    from rungs.data.build.document_files import local_files

    if options.near_duplicates:
        given = catalog.open_dataset(what[0], datasets_dir)
        leave_out = partial(near_duplicates.build, similarity=options.near_duplicates)
        return catalog.build_dataset(options.name, [given], datasets_dir, leave_out)
    if options.has_preferences:
        files, build = _preferences(what, options)
        return catalog.build_dataset(options.name, files, datasets_dir, build)
    if options.parquet or options.jsonl:
        rows = local_files(map(Path, what), "parquet" if options.parquet else "json lines")
        return catalog.build_documents_dataset(options.name, _request(rows, options), datasets_dir)
    if options.kinds:
        paths = [*map(Path, what)]
        return catalog.build_dataset(options.name, paths, datasets_dir, _builder(options))
    name = what[0]
    asks_to_build = "/" in name and bool(options.given - {"validation_percent"})
    if (
        "/" in name
        and not asks_to_build
        and not catalog.dataset_folder(name, datasets_dir).exists()
    ):
        asks_to_build = catalog.HUB_FILES[0] not in hub.dataset_repository(name).files
    if not asks_to_build:
        return catalog.open_dataset(name, datasets_dir)
    repository, rows = _on_hub(name, options)
    request = _request(rows, options)._replace(
        repository=name, revision=repository.revision, license=repository.license
    )
    return catalog.build_documents_dataset(options.name or name, request, datasets_dir)


def _builder(options: Options) -> Callable[[Path, list[Any]], "Source"]:
    """Return the function that builds a dataset of texts, pairs, chats or tokens."""
    from rungs.data.build import chat_dataset, pair_dataset, text_dataset, tokens_dataset
    from rungs.data.text.chat_template import ChatTemplate
    from rungs.data.text.tokenizer import Tokenizer

    tokenizer, percent = options.load_tokenizer(), options.percent()
    if options.tokens:
        return partial(
            tokens_dataset.build,
            validation_files=list(options.validation_file),
            vocabulary=tokenizer,
            validation_percent=percent,
            dtype=options.token_dtype,
        )
    if not options.chats:
        module = pair_dataset if options.pairs else text_dataset
        return partial(module.build, tokenizer=tokenizer, validation_percent=percent)
    assert isinstance(tokenizer, Tokenizer)
    template = ChatTemplate.load(options.tokenizer, options.chat_template)
    form = chat_dataset.ChatFormat(template, tokenizer, options.max_tokens)
    return partial(chat_dataset.build, form=form, validation_percent=percent)


def _preferences(
    what: tuple[str, ...], options: Options
) -> "tuple[list[DataFile], Callable[..., Source]]":
    """Return the files with preferences, and the function that builds a dataset of them."""
    from rungs.data.build import preference_dataset
    from rungs.data.build.document_files import format_of, local_files
    from rungs.data.text.tokenizer import Tokenizer

    tokenizer = options.load_tokenizer()
    assert isinstance(tokenizer, Tokenizer)
    form = preference_dataset.PreferenceFormat(
        *(tokenizer, options.tokenizer, options.chat_template, options.max_tokens),
        is_unpaired=options.unpaired,
    )
    build = partial(preference_dataset.build, form=form, validation_percent=options.percent())
    if _is_hub_id(what):
        repository, files = _on_hub(what[0], options)
        return files, partial(build, repository=what[0], revision=repository.revision)
    of_each = (local_files([Path(name)], format_of(name) or "json lines") for name in what)
    return [file for files in of_each for file in files], build


def _is_hub_id(what: tuple[str, ...]) -> bool:
    """Whether an argument is the id of a repository rather than a file."""
    from rungs.data.build.document_files import format_of

    only = what[0]
    is_file = len(what) > 1 or Path(only).exists() or format_of(only) is not None
    return "/" in only and not is_file


def _on_hub(name: str, options: Options) -> "tuple[HubRepository, list[DataFile]]":
    """Return a dataset repository, and those of its files that the options choose."""
    from rungs.common import hub
    from rungs.data.build.document_files import Choice, hub_files

    repository = hub.dataset_repository(name, options.revision)
    choice = Choice(options.config, options.split, options.files)
    return repository, hub_files(name, repository, choice)


def _request(files: "list[DataFile]", options: Options) -> "Request":
    from rungs.data.build.document_dataset import Request

    percent = options.percent(DOCUMENTS_VALIDATION_PERCENT)
    return Request(files, options.load_tokenizer(), options.text_column, percent, options.max_bytes)


def _report(dataset: "Dataset") -> None:
    from rungs.data import overlap
    from rungs.data.text import tokenizer_files

    click.echo(f"{dataset.name}: {dataset.folder}")
    for split in dataset.splits:
        contents = dataset.description.splits[split]
        click.echo(
            f"  {split}: {counted(contents.tokens, 'token')}, largest id"
            f" {contents.largest_token_id}, {contents.file_bytes:,} bytes of {contents.dtype}"
        )
        if pairs := contents.pairs:
            of_preferences = pairs.is_preferences or pairs.is_unpaired
            kind = "answer" if of_preferences else "chat" if pairs.is_chats else "pair"
            click.echo(
                f"    {counted(pairs.pairs, kind)}, the"
                f" longest has {counted(pairs.longest_tokens, 'token')};"
                f" {counted(pairs.answer_tokens, 'token')} in the answers"
            )
    if (chats := dataset.description.source.chats) and chats.left_out:
        is_of_preferences = dataset.description.source.kind in ("preferences", "unpaired")
        left_out = counted(chats.left_out, "preference" if is_of_preferences else "chat")
        click.echo(f"  {left_out} of more than {chats.max_tokens:,} tokens left out")
    if near := dataset.description.source.near_duplicates:
        click.echo(
            f"  {near.left_out:,} of {counted(near.documents, 'document')} left out: with a"
            f" similarity of {near.similarity:g} or more to an earlier one"
        )
    if documents := dataset.description.source.documents:
        count = sum(file.documents for file in documents.files)
        click.echo(
            f"  from {counted(count, 'document')} in {counted(len(documents.files), 'file')},"
            f" {documents.text_bytes:,} bytes of text;"
            f" {counted(documents.rows_without_text, 'row')} without text;"
            f" license: {documents.license or 'not given'}"
        )
    if found := overlap.recorded(dataset.folder):
        click.echo(f"  {found.repeated_in_training:.2%} of the training documents came before")
        if found.validation:
            _report_found("validation", "documents", found.validation)
    if dataset.tokenizer_file:
        tokenizer = tokenizer_files.load_tokenizer(dataset.folder)
        if dataset.description.source.kind in ("text", "documents", "pairs"):
            click.echo(f"  {tokenizer.describe_texts(dataset.begin)}")
        click.echo(f"  tokenizer: vocab_size {tokenizer.vocab_size}")


def _report_found(name: str, kind: str, found: "overlap.Found") -> None:
    from rungs.data import overlap

    count = f"{found.texts:,} {kind}"
    if found.examined < found.texts:
        count += f", of which the first {found.examined:,} were examined"
    click.echo(f"  {name}: {count}")
    click.echo(f"    {found.copied_share:.2%} are in training word for word")
    click.echo(
        f"    {found.overlapping_share:.2%} of the {found.long_enough:,} with {overlap.WORDS} words"
        f" or more share {overlap.WORDS} in a row with training"
    )
    click.echo(f"    {found.repeated:.2%} came before")
