"""Generate text from a model: `uv run generate.py runs/layers "def main():"`.

Greedy, unless a sampling option is given. A single text is printed while it is generated.
"""

from rungs.common.command import run_command

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from rungs.common.errors import UserError
from rungs.common.strict_json import read_text
from rungs.data.tokenizer import Tokenizer
from rungs.model.sampling import Sampling
from rungs.parallel import jax_setup

REPLACEMENT_CHARACTER = "\ufffd"
"""Incomplete UTF-8 is decoded to this."""


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
    default=64,
    show_default=True,
    help="Maximum number of tokens to generate per text.",
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
@click.option("--past-the-end", is_flag=True, help="Continue after the end-of-text token.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Dtype of matrices, activations and cache. Default: float32 on a CPU, else bfloat16.",
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
    """Continue each PROMPT with the model of RUN_OR_CHECKPOINT: a run folder (its best checkpoint,
    or the imported model), a checkpoint or a model.safetensors."""
    sampling = read_sampling(settings, num_samples)
    texts = [*prompts, *(read_prompts(prompts_file) if prompts_file else ())]
    if not texts:
        raise UserError("no prompt; add one in quotes, or --prompts-file")

    import jax
    import jax.numpy as jnp

    from rungs.checkpointing.load import find_weights, load_model, load_tokenizer
    from rungs.checkpointing.published import stop_tokens
    from rungs.model.generation import Generator, Request

    jax_setup.enable_compilation_cache()
    weights, tokenizer = find_weights(checkpoint), load_tokenizer(checkpoint)
    rows = [encode_prompt(text, tokenizer) for text in texts for _ in range(num_samples)]
    if not past_the_end:
        sampling = sampling._replace(stop_tokens=stop_tokens(weights.parent, tokenizer))
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    model = load_model(weights)
    check_token_ids(rows, model.config.vocab_size)
    generator = Generator(model, jnp.dtype(dtype), donate=True)
    warn_if_longer_than_context(generator.context_length, max(map(len, rows)), new_tokens)
    request = Request(new_tokens, sampling, seed)
    start = time.perf_counter()
    if len(rows) == 1:
        chunks = (chunk[0] for chunk in generator.stream(rows, request))
        count = print_streamed(rows[0], chunks, tokenizer)
    else:
        continuations = generator.generate(rows, request)
        count = print_all(rows, continuations, num_samples, tokenizer)
    seconds = time.perf_counter() - start
    device = jax.devices()[0].device_kind
    click.echo(
        f"{count:,} tokens in {seconds:.1f} s, including compilation, on {device} in {dtype},"
        f" from {weights}",
        err=True,
    )


def read_sampling(settings: dict[str, float | None], num_samples: int) -> Sampling:
    """Return the sampling settings of the command line. If top-k, top-p or min-p is given without
    a temperature, the temperature is 1.

    Raises:
        UserError: with a line for each setting that is out of range or has no effect.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    needs_sampling = given.keys() & {"top_k", "top_p", "min_p"}
    sampling = Sampling(**{"temperature": 1.0 if needs_sampling else 0.0, **given})  # type: ignore[arg-type]
    sampling.check()
    if not sampling.temperature and needs_sampling:
        name = min(needs_sampling).replace("_", "-")
        raise UserError(
            f"--{name}: has no effect at temperature 0, which is greedy; remove one of the two"
        )
    if not sampling.temperature and num_samples > 1:
        raise UserError(
            f"--num-samples {num_samples}: greedy samples are all the same; add --temperature 1"
        )
    return sampling


def read_prompts(path: Path) -> list[str]:
    """Return the prompts in a file: its lines, or the "prompt" of each line of a .jsonl file.

    Raises:
        UserError: the file is not readable, or a line of a .jsonl file has no prompt.
    """
    lines = [(n, line) for n, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if path.suffix != ".jsonl":
        return [line for _, line in lines]
    return [_read_jsonl_prompt(line, f"{path}: line {number}") for number, line in lines]


def _read_jsonl_prompt(line: str, place: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise UserError(f'{place}: must be an object with a string, {{"prompt": "…"}}')
    return prompt


def encode_prompt(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt's token ids; for an empty prompt the end-of-text token."""
    tokens = tokenizer.encode_prompt(text)
    if tokens:
        return tokens
    if tokenizer.end_of_text is None:
        raise UserError(
            "the prompt is empty, and the tokenizer has no end-of-text token to start with"
        )
    return [tokenizer.end_of_text]


def check_token_ids(rows: Sequence[list[int]], vocab_size: int) -> None:
    """Raise UserError if a prompt has a token id that the model doesn't have."""
    if (largest := max(map(max, rows))) >= vocab_size:
        raise UserError(
            f"a prompt has token id {largest}, but the model's vocab_size is {vocab_size}: its"
            " tokenizer has more tokens than the model"
        )


def warn_if_longer_than_context(context_length: int, prompt_tokens: int, new_tokens: int) -> None:
    """Print a warning if texts may become longer than the context, and say what happens then."""
    if prompt_tokens + new_tokens > context_length + 1:
        click.echo(
            f"texts may become longer than the model's context of {context_length:,} tokens;"
            " if so, the model continues from the last half of the context",
            err=True,
        )


def print_streamed(prompt: list[int], chunks: Iterator[list[int]], tokenizer: Tokenizer) -> int:
    """Print a text while it is generated, complete characters only; return the number of new
    tokens."""
    tokens, printed = list(prompt), ""
    for chunk in chunks:
        tokens += chunk
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if not text.endswith(REPLACEMENT_CHARACTER):
            _write(text.removeprefix(printed))
            printed = text
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    _write(text.removeprefix(printed) + "\n")
    return len(tokens) - len(prompt)


def print_all(
    rows: Sequence[list[int]],
    continuations: Sequence[list[int]],
    num_samples: int,
    tokenizer: Tokenizer,
) -> int:
    """Print each text below a line with its number; return the number of new tokens."""
    for index, (prompt, new) in enumerate(zip(rows, continuations, strict=True)):
        number, sample = divmod(index, num_samples)
        of = f", sample {sample + 1} of {num_samples}" if num_samples > 1 else ""
        click.echo(f"--- prompt {number + 1} of {len(rows) // num_samples}{of}")
        click.echo(tokenizer.decode(prompt + new, skip_special_tokens=True))
    return sum(map(len, continuations))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    run_command(main)
