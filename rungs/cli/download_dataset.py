"""Build or download a dataset, and print what is in it."""

from rungs.common.command import importing

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from rungs.cli.options import DATASETS_DIR_OPTION, FiniteRange
from rungs.common.shown_text import counted
from rungs.config.option_values import (
    DOCUMENTS_VALIDATION_PERCENT,
    LARGEST_VOCAB,
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

_OWN_FILES = ("text", "pairs", "chats", "preferences", "parquet", "jsonl", "tokens")


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
    prompt with a chosen and a rejected answer; with --tokens FILEs of token ids.
    Some of the files or documents are kept for validation; if there is only one file of text or
    tokens, its end is.

    The name of a special token inside a text, such as <|endoftext|>, becomes that token.
    """
    with importing():
        from rungs.data import overlap
        from rungs.data.catalog import find_datasets_dir

    chosen = Options(**options)
    _check_options(what, chosen)
    examined = overlap.read_items(items) if items else None
    dataset = _dataset(what, find_datasets_dir(datasets_dir), chosen)
    if check:
        overlap.check(dataset).save(dataset.folder)
    _report(dataset)
    if examined:
        _report_found(str(items), "items", overlap.check_items(dataset, examined))


class Options(NamedTuple):
    """The options of the command, except --datasets-dir."""

    text: bool
    pairs: bool
    chats: bool
    preferences: bool
    parquet: bool
    jsonl: bool
    tokens: bool
    name: str | None
    vocab_size: int | None
    tokenizer: str | None
    validation_percent: float | None
    validation_file: tuple[Path, ...]
    text_column: str | None
    chat_template: Path | None
    max_tokens: int | None
    max_bytes: int | None
    config: str | None
    split: str | None
    files: tuple[str, ...]
    revision: str | None

    @property
    def given(self) -> set[str]:
        """The names of the options that are given, also as 0."""
        return {
            key
            for key, value in self._asdict().items()
            if value is not None and value is not False and value != ()
        }

    @property
    def own_files(self) -> list[str]:
        """The options that describe the FILE arguments."""
        return [f"--{kind}" for kind in _OWN_FILES if getattr(self, kind)]

    def load_tokenizer(self) -> "Tokenizer | int":
        """Return the tokenizer, or the vocabulary size of a tokenizer to train."""
        from rungs.data.text import tokenizer_files

        if self.tokenizer:
            return tokenizer_files.load_tokenizer(self.tokenizer)
        if self.vocab_size is not None:
            return self.vocab_size
        click.echo(
            f"training a tokenizer of at most {VOCAB_SIZE:,} tokens (--vocab-size);"
            " to fine-tune a model, give its --tokenizer"
        )
        return VOCAB_SIZE

    @property
    def own_name(self) -> str:
        """The name of a dataset of one's own files, which needs one."""
        assert self.name is not None
        return self.name

    @property
    def text_percent(self) -> float:
        """Percentage of text, pairs or tokens to use for validation."""
        percent = self.validation_percent
        return VALIDATION_PERCENT if percent is None else percent

    @property
    def documents_percent(self) -> float:
        """Percentage of documents to use for validation."""
        percent = self.validation_percent
        return DOCUMENTS_VALIDATION_PERCENT if percent is None else percent


def _dataset(what: tuple[str, ...], datasets_dir: Path, options: Options) -> "Dataset":
    """Build, download or open the dataset."""
    from rungs.data import catalog
    from rungs.data.build.document_files import local_files

    if options.preferences:
        return _from_preferences(what, datasets_dir, options)
    if options.parquet or options.jsonl:
        files = local_files(map(Path, what), "parquet" if options.parquet else "json lines")
        request = _request(files, options)
        return catalog.build_documents_dataset(options.own_name, request, datasets_dir)
    if options.own_files:
        paths = [*map(Path, what)]
        return catalog.build_dataset(options.own_name, paths, datasets_dir, _builder(options))
    name = what[0]
    asks_to_build = options.given - {"validation_percent"}
    if "/" in name and (asks_to_build or _holds_documents(name, datasets_dir)):
        return _from_hub(name, datasets_dir, options)
    return catalog.open_dataset(name, datasets_dir)


def _builder(options: Options) -> Callable[[Path, list[Any]], "Source"]:
    """Return the function that builds a dataset of texts, pairs, chats or tokens."""
    from rungs.data.build import chat_dataset, pair_dataset, text_dataset, tokens_dataset
    from rungs.data.text.chat_template import ChatTemplate
    from rungs.data.text.tokenizer import Tokenizer

    percent = options.text_percent
    if options.tokens:
        return partial(
            tokens_dataset.build,
            validation_files=list(options.validation_file),
            vocabulary=options.load_tokenizer(),
            validation_percent=percent,
        )
    tokenizer = options.load_tokenizer()
    if not options.chats:
        module = pair_dataset if options.pairs else text_dataset
        return partial(module.build, tokenizer=tokenizer, validation_percent=percent)
    assert isinstance(tokenizer, Tokenizer)
    assert options.tokenizer is not None
    template = ChatTemplate.load(options.tokenizer, options.chat_template)
    form = chat_dataset.ChatFormat(template, tokenizer, options.max_tokens)
    return partial(chat_dataset.build, form=form, validation_percent=percent)


def _from_preferences(what: tuple[str, ...], datasets_dir: Path, options: Options) -> "Dataset":
    from rungs.data import catalog
    from rungs.data.build import preference_dataset
    from rungs.data.build.document_files import format_of, local_files
    from rungs.data.build.preference_dataset import PreferenceFormat
    from rungs.data.text.tokenizer import Tokenizer

    tokenizer, percent = options.load_tokenizer(), options.text_percent
    assert isinstance(tokenizer, Tokenizer)
    assert options.tokenizer is not None
    form = PreferenceFormat(tokenizer, options.tokenizer, options.chat_template, options.max_tokens)
    build = partial(preference_dataset.build, form=form, validation_percent=percent)
    found: list[DataFile] = []
    if _is_hub_id(what):
        repository, found = _on_hub(what[0], options)
        build = partial(build, repository=what[0], revision=repository.revision)
    else:
        for path in map(Path, what):
            found += local_files([path], format_of(path.name) or "json lines")
    return catalog.build_dataset(options.own_name, found, datasets_dir, build)


def _is_hub_id(what: tuple[str, ...]) -> bool:
    """Whether an argument is the id of a repository rather than a file."""
    from rungs.data.build.document_files import format_of

    only = what[0]
    is_file = len(what) > 1 or Path(only).exists() or format_of(only) is not None
    return "/" in only and not is_file


def _from_hub(name: str, datasets_dir: Path, options: Options) -> "Dataset":
    from rungs.data import catalog

    repository, files = _on_hub(name, options)
    request = _request(files, options)._replace(
        repository=name, revision=repository.revision, license=repository.license
    )
    return catalog.build_documents_dataset(options.name or name, request, datasets_dir)


def _on_hub(name: str, options: Options) -> "tuple[HubRepository, list[DataFile]]":
    """Return a dataset repository, and those of its files that the options choose."""
    from rungs.common import hub
    from rungs.data.build.document_files import Choice, hub_files

    repository = hub.dataset_repository(name, options.revision)
    choice = Choice(options.config, options.split, options.files)
    return repository, hub_files(name, repository, choice)


def _request(files: "list[DataFile]", options: Options) -> "Request":
    from rungs.data.build.document_dataset import Request

    return Request(
        files,
        options.load_tokenizer(),
        options.text_column,
        options.documents_percent,
        options.max_bytes,
    )


def _holds_documents(name: str, datasets_dir: Path) -> bool:
    """Whether a repository that is not downloaded yet holds documents rather than tokens."""
    from rungs.common import hub
    from rungs.data import catalog

    if catalog.dataset_folder(name, datasets_dir).exists():
        return False
    return catalog.HUB_FILES[0] not in hub.dataset_repository(name).files


def _check_options(what: tuple[str, ...], options: Options) -> None:
    """Raise click.UsageError if options do not go together."""
    kinds, given = options.own_files, options.given
    is_hub_id = _is_hub_id(what) if options.preferences else not kinds and "/" in what[0]
    if len(kinds) > 1:
        raise click.UsageError(f"{' and '.join(kinds)} build different datasets; choose one")
    if not kinds and len(what) > 1:
        raise click.UsageError("to build a dataset from files, add --text, --parquet or the like")
    if kinds and not options.name:
        raise click.UsageError(f"{kinds[0]} needs a --name for the dataset")
    if not (kinds or is_hub_id) and given:
        raise click.UsageError("to build a dataset from files, add --text, --parquet or the like")
    of_hub = [key for key in ("config", "split", "files", "revision") if key in given]
    if of_hub and not is_hub_id:
        raise click.UsageError(f"--{of_hub[0]} is for repositories on the hub")
    of_documents = [key for key in ("text_column", "max_bytes") if key in given]
    if of_documents and kinds and not (options.parquet or options.jsonl):
        raise click.UsageError(
            f"--{of_documents[0].replace('_', '-')} is for documents, not for {kinds[0]}"
        )
    of_chats = [key for key in ("chat_template", "max_tokens") if key in given]
    needs_tokenizer = options.chats or options.preferences
    if of_chats and not needs_tokenizer:
        name = of_chats[0].replace("_", "-")
        raise click.UsageError(f"--{name} is for --chats or --preferences")
    if needs_tokenizer and ("vocab_size" in given or not options.tokenizer):
        raise click.UsageError(f"{kinds[0]} needs the --tokenizer of the model to fine-tune")
    if options.tokens and not given & {"vocab_size", "tokenizer"}:
        raise click.UsageError("--tokens needs the --tokenizer that made them, or its --vocab-size")
    if options.validation_file and not options.tokens:
        raise click.UsageError("--validation-file is for --tokens")
    if options.validation_file and options.validation_percent is not None:
        raise click.UsageError(
            "--validation-file and --validation-percent do not go together; leave out one"
        )
    if given >= {"vocab_size", "tokenizer"}:
        raise click.UsageError("--vocab-size and --tokenizer do not go together; leave out one")


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
            kind = "chat" if pairs.is_chats else "pair"
            click.echo(
                f"    {counted(pairs.pairs, 'answer' if pairs.is_preferences else kind)}, the"
                f" longest has {counted(pairs.longest_tokens, 'token')};"
                f" {counted(pairs.answer_tokens, 'token')} in the answers"
            )
    if (chats := dataset.description.source.chats) and chats.left_out:
        is_of_pairs = dataset.description.source.kind == "preferences"
        left_out = counted(chats.left_out, "preference" if is_of_pairs else "chat")
        click.echo(f"  {left_out} of more than {chats.max_tokens:,} tokens left out")
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
