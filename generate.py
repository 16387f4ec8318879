"""Continue prompts with a model: `uv run generate.py runs/layers "def main():"`.

Greedy, unless a sampling option is given. A single text is printed as it grows.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from rungs.common.errors import UserError, run_command
from rungs.common.paths import is_file
from rungs.common.strict_json import read_text
from rungs.data.tokenizer import LARGEST_VOCAB, Tokenizer
from rungs.model.sampling import Sampling
from rungs.parallel import jax_setup

GENERATION_CONFIG_FILE = "generation_config.json"
CUT_CHARACTER = "\ufffd"
"""What bytes that are not a whole character yet are decoded to."""


@click.command()
@click.argument("checkpoint", metavar="RUN_OR_CHECKPOINT")
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option(
    "--prompts-file",
    type=click.Path(path_type=Path),
    help='More prompts: a line each or, in a .jsonl file, {"prompt": "…"}.',
)
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--num-samples", type=click.IntRange(1), default=1, help="Texts for each prompt.")
@click.option("--temperature", type=float, help="Divides the logits; 0 is greedy.")
@click.option("--top-k", type=int, help="Only the K most likely tokens.")
@click.option("--top-p", type=float, help="Only the most likely that together reach P.")
@click.option("--min-p", type=float, help="Only those at least P times as likely as the first.")
@click.option("--repetition-penalty", type=float, help="Above 1: tokens come again less often.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--past-the-end", is_flag=True, help="Go on after the token that ends a text.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Type of matrices, activations and cache; float32 on a CPU, else bfloat16.",
)
def main(
    checkpoint: str,
    prompts: tuple[str, ...],
    prompts_file: Path | None,
    new_tokens: int,
    num_samples: int,
    seed: int,
    past_the_end: bool,
    dtype: str | None,
    **settings: float | None,
) -> None:
    """Continue each PROMPT with the model of a run folder (its best checkpoint, else what was
    imported), a checkpoint or a model.safetensors."""
    sampling = read_sampling(settings, num_samples)
    texts = [*prompts, *(read_prompts(prompts_file) if prompts_file else ())]
    if not texts:
        raise UserError("no prompt; give one in quotes, or --prompts-file")

    import jax
    import jax.numpy as jnp

    from rungs.checkpointing.load import find_weights, load_model, load_tokenizer
    from rungs.model.generation import Generator, Request

    jax_setup.enable_compilation_cache()
    weights, tokenizer = find_weights(checkpoint), load_tokenizer(checkpoint)
    rows = [read_prompt(text, tokenizer) for text in texts for _ in range(num_samples)]
    if not past_the_end:
        sampling = sampling._replace(stop_tokens=stop_tokens(weights.parent, tokenizer))
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model = load_model(weights)
    refuse_unknown_tokens(rows, model.config.vocab_size)
    generator = Generator(model, jnp.dtype(dtype), take_over=True)
    say_if_outgrown(generator.context_length, max(map(len, rows)), new_tokens)
    request = Request(new_tokens, sampling, seed)
    start = time.perf_counter()
    if len(rows) == 1:
        growth = (news[0] for news in generator.stream(rows, request))
        count = print_growing(rows[0], growth, tokenizer)
    else:
        news = generator.continued(rows, request)
        count = print_all(rows, news, num_samples, tokenizer)
    seconds = time.perf_counter() - start
    device = jax.devices()[0].device_kind
    click.echo(
        f"{count:,} tokens in {seconds:.1f} s, compilation included, on {device} in {dtype}, by"
        f" {weights}",
        err=True,
    )


def read_sampling(settings: dict[str, float | None], num_samples: int) -> Sampling:
    """The sampling settings that were given; temperature is 1 where only others are.

    Raises:
        UserError: a line for each that makes no sense.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    draws = given.keys() & {"top_k", "top_p", "min_p"}
    sampling = Sampling(**{"temperature": 1.0 if draws else 0.0, **given})  # type: ignore[arg-type]
    sampling.check()
    if not sampling.temperature and draws:
        name = min(draws).replace("_", "-")
        raise UserError(f"--{name}: has no effect at temperature 0, which is greedy; leave one out")
    if not sampling.temperature and num_samples > 1:
        raise UserError(
            f"--num-samples {num_samples}: greedy texts are all alike; add --temperature 1"
        )
    return sampling


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file, a line each.

    Raises:
        UserError: not readable, or a line of a .jsonl file that has no prompt.
    """
    lines = [(n, line) for n, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    return [_prompt_in(line, f"{path}: line {number}") for number, line in lines]


def _prompt_in(line: str, place: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise UserError(f'{place}: must be an object with a text, {{"prompt": "…"}}')
    return prompt


def read_prompt(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids to go on from: the prompt's or, for an empty one, the end of a text before it."""
    tokens = tokenizer.encode_prompt(text)
    if tokens:
        return tokens
    if tokenizer.end_of_text is None:
        raise UserError("the prompt is empty, and the tokenizer has no token to begin a text with")
    return [tokenizer.end_of_text]


def refuse_unknown_tokens(rows: Sequence[list[int]], vocab_size: int) -> None:
    """Raises UserError where a prompt has a token that the model does not know."""
    if (most := max(map(max, rows))) >= vocab_size:
        raise UserError(
            f"a prompt has token id {most}, but the model's vocab_size is {vocab_size}: its"
            " tokenizer knows tokens that it does not"
        )


def stop_tokens(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end a text: those of the imported model's generation_config.json, else the
    tokenizer's end of text.

    Raises:
        UserError: that file is damaged.
    """
    path = folder / GENERATION_CONFIG_FILE
    try:
        ends = json.loads(read_text(path))["eos_token_id"] if is_file(path) else None
    except KeyError:
        ends = None
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"{path}: not a readable generation config") from None
    if ends is None:
        return () if tokenizer.end_of_text is None else (tokenizer.end_of_text,)
    tokens = tuple(ends) if isinstance(ends, list) else (ends,)
    if not all(isinstance(token, int) and 0 <= token < LARGEST_VOCAB for token in tokens):
        raise UserError(f"{path}: eos_token_id: must be a token id, or a list of them")
    return tokens


def say_if_outgrown(context_length: int, prompt_tokens: int, new_tokens: int) -> None:
    """Tell what becomes of texts longer than what the model sees at a time."""
    if prompt_tokens + new_tokens > context_length + 1:
        click.echo(
            f"texts may outgrow the model's context of {context_length:,} tokens; where they do,"
            " they go on from its last half",
            err=True,
        )


def print_growing(prompt: list[int], news: Iterator[list[int]], tokenizer: Tokenizer) -> int:
    """Print a text as it grows, whole characters only; returns the number of new tokens."""
    tokens, shown = list(prompt), ""
    for new in news:
        tokens += new
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if not text.endswith(CUT_CHARACTER):
            _write(text.removeprefix(shown))
            shown = text
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    _write(text.removeprefix(shown) + "\n")
    return len(tokens) - len(prompt)


def print_all(
    rows: Sequence[list[int]], news: Sequence[list[int]], num_samples: int, tokenizer: Tokenizer
) -> int:
    """Print each text below a line that says which it is; returns the number of new tokens."""
    for index, (prompt, new) in enumerate(zip(rows, news, strict=True)):
        number, sample = divmod(index, num_samples)
        of = f", sample {sample + 1} of {num_samples}" if num_samples > 1 else ""
        click.echo(f"--- prompt {number + 1} of {len(rows) // num_samples}{of}")
        click.echo(tokenizer.decode(prompt + new, skip_special_tokens=True))
    return sum(map(len, news))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    run_command(main)
