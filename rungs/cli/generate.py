"""Continue prompts with a model, or have a conversation with it, on the terminal."""

from rungs.common.command import importing

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from rungs.cli.options import DTYPE_OPTION
from rungs.common.errors import UserError, check_characters
from rungs.common.shown_text import counted
from rungs.config.option_values import CHAT_TEMPLATES, NEW_TOKENS, NEW_TOKENS_OF_A_CHAT

if TYPE_CHECKING:
    from rungs.data.build.chat_dataset import ChatFormat
    from rungs.data.text.messages import Message
    from rungs.data.text.tokenizer import Tokenizer
    from rungs.model.generation import Conversation, Generator, Request
    from rungs.model.sampling import Sampling
    from rungs.model.weight_formats import WeightFormat


@click.command()
@click.argument("checkpoint", metavar="RUN_OR_CHECKPOINT")
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option(
    "--prompts-file",
    type=click.Path(path_type=Path),
    help='More prompts, one per line; in a .jsonl file as {"prompt": "…"}.',
)
@click.option(
    "--new-tokens",
    type=click.IntRange(1),
    help="Maximum number of tokens to generate per text."
    f"  [default: {NEW_TOKENS}; with --chat {NEW_TOKENS_OF_A_CHAT}]",
)
@click.option(
    "--chat",
    is_flag=True,
    help="Have a conversation, in the format of the model's chat template. Each PROMPT is a"
    " message; then type yours. /new starts over, Ctrl-C stops an answer, Ctrl-D ends.",
)
@click.option("--system", help="With --chat: the system message.")
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"With --chat: a file in Jinja, or {CHAT_TEMPLATES}.  [default: the model's own]",
)
@click.option("--num-samples", type=click.IntRange(1), default=1, help="Texts per prompt.")
@click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy.")
@click.option("--top-k", type=int, help="Sample from the K most likely tokens, ties included.")
@click.option(
    "--top-p",
    type=float,
    help="Sample from the most likely tokens with total probability P, ties included.",
)
@click.option(
    "--min-p", type=float, help="Sample from tokens with at least P times the highest probability."
)
@click.option(
    "--repetition-penalty", type=float, help="Above 1, repeated tokens become less likely."
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Seed for sampling.",
)
@click.option(
    "--lookahead",
    metavar="N",
    type=click.IntRange(0),
    default=0,
    help="Draft N tokens by looking up the last ones in the text so far, and verify them in one"
    " pass: faster where text repeats, with the same result. 8 is a good start.  [default: 0, off]",
)
@click.option(
    "--passes",
    metavar="N",
    type=click.IntRange(1),
    help="Passes through a model of masked_diffusion, which fills in several tokens in each."
    "  [default: one for each new token]",
)
@click.option("--past-the-end", is_flag=True, help="Continue after the end-of-text token.")
@DTYPE_OPTION
@click.option(
    "--weights",
    "weight_format",
    type=click.Choice(["int8", "ema"]),
    help="int8: round matrices to 8 bits: less memory and, on a CPU with few texts, faster; the"
    " text may change. ema: use the averaged weights of a run with ema_decay."
    "  [default: neither]",
)
def main(
    checkpoint: str,
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    new_tokens: int | None,
    chat: bool,
    system: str | None,
    chat_template: Path | None,
    num_samples: int,
    seed: int,
    lookahead: int,
    passes: int | None,
    past_the_end: bool,
    dtype: str | None,
    weight_format: "WeightFormat | Literal['ema'] | None",
    **settings: float | None,
) -> None:
    """Continue each PROMPT with the model of RUN_OR_CHECKPOINT: a run folder (its best checkpoint,
    or the imported model), a checkpoint or a model.safetensors."""
    texts = [*prompts, *(read_prompts(prompts_file) if prompts_file else ())]
    if prompts_file and not texts:
        raise UserError(f"{prompts_file}: has no prompt")
    if not texts and not chat:
        raise UserError("no prompt; add one in quotes, or --prompts-file")
    if chat and num_samples > 1:
        raise click.UsageError("--num-samples is for prompts; leave it out with --chat")
    if not chat and (system or chat_template):
        raise click.UsageError("--system and --chat-template are for --chat")

    with importing():
        from rungs.checkpointing.checkpoint_folder import find_averaged_weights, find_weights
        from rungs.checkpointing.load import load_model, load_token_generator, load_tokenizer
        from rungs.checkpointing.published import all_stop_tokens, load_chat_template
        from rungs.checkpointing.weights_file import Weights
        from rungs.data.build.chat_dataset import ChatFormat
        from rungs.model.generation import Request
        from rungs.model.unmasking import Unmasker
        from rungs.parallel import jax_setup

    sampling = read_sampling(settings, num_samples)
    jax_setup.enable_compilation_cache()
    if weight_format == "ema":
        checkpoint, weight_format = str(find_averaged_weights(checkpoint)), None
    weights, tokenizer = find_weights(checkpoint), load_tokenizer(checkpoint)
    header = Weights(weights).header
    if lookahead >= (most := header.model.context_length):
        raise UserError(f"--lookahead {lookahead}: must be below the model's context_length {most}")
    if not past_the_end:
        stops = all_stop_tokens(Weights(weights), tokenizer)
        sampling = sampling._replace(stop_tokens=stops)
    default_tokens = NEW_TOKENS_OF_A_CHAT if chat else NEW_TOKENS
    request = Request(new_tokens or default_tokens, sampling, seed, lookahead)
    load: Any = partial(load_token_generator, weights, dtype, weight_format or "dtype")
    if lookahead or weight_format or not header.model.bidirectional:
        if passes or header.model.bidirectional:
            raise UserError("--passes is for masked_diffusion; --lookahead and int8 are for others")
    else:
        load = lambda: Unmasker(load_model(weights), dtype or "float32", passes)  # noqa: E731
    if chat:
        form = ChatFormat(load_chat_template(weights, chat_template), tokenizer)
        converse(start_conversation(form, request, system, load), texts)
        return
    if tokenizer.begin or tokenizer.eos_token or len(sampling.stop_tokens) > 1:
        begin, end = tokenizer.names(tokenizer.begin), tokenizer.names(sampling.stop_tokens)
        click.echo(f"prompts begin with {begin}; texts end with {end}", err=True)
    rows = [tokenizer.encode_beginning(text) for text in texts for _ in range(num_samples)]
    check_token_ids(rows, header.model.vocab_size)
    generator = load()
    form_of_weights = generator.dtype.name + " with int8 weights" * (weight_format == "int8")
    speed = continue_texts(generator, rows, request, num_samples, tokenizer)
    click.echo(f"{speed} in {form_of_weights}, from {weights}", err=True)


def continue_texts(
    generator: "Generator",
    rows: Sequence[list[int]],
    request: "Request",
    num_samples: int,
    tokenizer: "Tokenizer",
) -> str:
    """Print the continuations of texts; return how long that took, and on which device."""
    import jax

    if max(map(len, rows)) + request.new_tokens > generator.context_length + 1:
        click.echo(
            f"texts may become longer than the model's context of {generator.context_length:,}"
            " tokens; if so, the model continues from the last half of the context",
            err=True,
        )
    start = time.perf_counter()
    if len(rows) == 1:
        chunks = (chunk[0] for chunk in generator.stream(rows, request))
        count = print_streamed(rows[0], chunks, tokenizer)
    else:
        continuations = generator.generate(rows, request)
        count = sum(map(len, continuations))
        for index, (prompt, new) in enumerate(zip(rows, continuations, strict=True)):
            number, sample = divmod(index, num_samples)
            of = f", sample {sample + 1} of {num_samples}" if num_samples > 1 else ""
            click.echo(f"--- prompt {number + 1} of {len(rows) // num_samples}{of}")
            _write(tokenizer.decode(prompt + new, skip_special_tokens=True) + "\n")
    seconds, device = time.perf_counter() - start, jax.devices()[0].device_kind
    return f"{_speed(count, seconds)}, including compilation, on {device}"


def _speed(tokens: int, seconds: float) -> str:
    rate = f"{tokens / seconds:,.1f} tokens per second"
    return f"{counted(tokens, 'token')} in {seconds:.1f} s ({rate})"


def say_what_begins(form: "ChatFormat", messages: Sequence["Message"], ends: Sequence[int]) -> None:
    """Print the special tokens that begin a conversation by the template, and that end answers."""
    from rungs.data.text.messages import Message

    text = form.template.render([*messages, Message("user", "Hi")], add_generation_prompt=True)
    usual = form.tokenizer.begin
    begin = form.tokenizer.encode(text)[: len(usual) or 1]
    if begin != usual and form.tokenizer.decode(begin, skip_special_tokens=True):
        begin = []
    start, end = form.tokenizer.names(begin), form.tokenizer.names(ends)
    click.echo(f"conversations begin with {start}; answers end with {end}", err=True)


def start_conversation(
    form: "ChatFormat", request: "Request", system: str | None, load: "Callable[[], Generator]"
) -> "Conversation":
    """Return a conversation with the model that `load` returns. The template's end of a turn ends
    an answer."""
    from rungs.data.text.messages import Message
    from rungs.model.generation import Conversation

    if (end := form.end_of_turn) is not None:
        stops = (*request.sampling.stop_tokens, end)
        request = request._replace(sampling=request.sampling._replace(stop_tokens=stops))
    check_characters(system or "", "--system")
    first = [Message("system", system)] if system else []
    say_what_begins(form, first, request.sampling.stop_tokens)
    return Conversation(load(), form, request, first)


def converse(conversation: "Conversation", messages: Sequence[str]) -> None:
    """Answer the given messages, then typed ones until the end of input."""
    first, is_terminal = [*conversation.messages], sys.stdin.isatty()
    for message in messages:
        click.echo(f"> {message}")
        print_answer(conversation, message)
    while is_terminal or not messages:
        try:
            message = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if message == "/new":
            conversation.messages = [*first]
        elif message:
            try:
                print_answer(conversation, message)
            except UserError as error:
                if not is_terminal:
                    raise
                click.echo(f"error: {error}", err=True)


def print_answer(conversation: "Conversation", message: str) -> None:
    """Print an answer while it is generated, then how long that took; Ctrl-C stops it."""
    start = time.perf_counter()
    check_characters(message, "the message")
    with contextlib.suppress(KeyboardInterrupt):
        for piece in conversation.answer(message):
            _write(piece)
    _write("\n")
    length = conversation.generator.context_length
    if conversation.prompt_tokens + conversation.answer_tokens > length + 1:
        click.echo(
            f"the conversation is longer than the model's context of {length:,} tokens; it read"
            " only the last part",
            err=True,
        )
    speed = _speed(conversation.answer_tokens, time.perf_counter() - start)
    click.echo(click.style(speed, dim=True), err=True)


def read_sampling(settings: dict[str, float | None], num_samples: int) -> "Sampling":
    """Return the sampling settings of the command line. If top-k, top-p or min-p is given without a
    temperature, the temperature is 1. Raises UserError with a line for each setting that is out of
    range or has no effect."""
    from rungs.model.sampling import Sampling

    given = {name: value for name, value in settings.items() if value is not None}
    needs_sampling = given.keys() & {"top_k", "top_p", "min_p"}
    sampling = Sampling(**{"temperature": 1.0 if needs_sampling else 0.0, **given})  # type: ignore[arg-type]
    sampling.check(_option)
    if not sampling.temperature and needs_sampling:
        name = _option(min(needs_sampling))
        raise UserError(
            f"{name}: has no effect at temperature 0, which is greedy; remove one of the two"
        )
    if not sampling.temperature and num_samples > 1:
        raise UserError(
            f"--num-samples {num_samples}: greedy samples are all the same; add --temperature 1"
        )
    return sampling


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_prompts(path: Path) -> list[str]:
    """Return the prompts in a file: its lines, or the "prompt" of each line of a .jsonl file.
    Raises UserError if the file is not readable, or a line of a .jsonl file has no prompt."""
    from rungs.common.strict_json import read_text

    numbered = enumerate(read_text(path).replace("\r\n", "\n").split("\n"), 1)
    lines = [(n, line) for n, line in numbered if line.strip()]
    if path.suffix.lower() != ".jsonl":
        return [line for _, line in lines]
    return [_read_jsonl_prompt(line, f"{path}: line {number}") for number, line in lines]


def _read_jsonl_prompt(line: str, place: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise UserError(f'{place}: must be an object with a string, {{"prompt": "…"}}')
    check_characters(prompt, place)
    return prompt


def check_token_ids(rows: Sequence[list[int]], vocab_size: int) -> None:
    """Raise UserError if a prompt has a token id that the model doesn't have."""
    if (largest := max(map(max, rows))) >= vocab_size:
        raise UserError(
            f"a prompt has token id {largest}, but the model's vocab_size is {vocab_size}: its"
            " tokenizer has more tokens than the model"
        )


def print_streamed(prompt: list[int], chunks: Iterator[list[int]], tokenizer: "Tokenizer") -> int:
    """Print whole characters of a text while it is generated; return the number of new tokens."""
    from rungs.model.generation import decode_stream

    new: list[int] = []

    def noted() -> Iterator[list[int]]:
        for chunk in chunks:
            new.extend(chunk)
            yield chunk

    for piece in decode_stream(itertools.chain([prompt], noted()), tokenizer):
        _write(piece)
    _write("\n")
    return len(new)


def _write(text: str) -> None:
    """Print a text unchanged: Click removes escape sequences where the output is not a terminal."""
    sys.stdout.write(text)
    sys.stdout.flush()
