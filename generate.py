"""Generate text from a model: `uv run generate.py runs/layers "def main():"`.

Greedy, unless a sampling option is given. A single text is printed while it is generated. With
--chat, a conversation: each line that you type is a message, and the model answers it.
"""

from rungs.common.command import begin_command, importing, run_command

if __name__ == "__main__":
    begin_command()

from pathlib import Path
from typing import Any

import click

from rungs.config.option_values import NEW_TOKENS, NEW_TOKENS_OF_A_CHAT


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
    help="With --chat: a template in Jinja.  [default: the model's own]",
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
@click.option("--past-the-end", is_flag=True, help="Continue after the end-of-text token.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Dtype of matrices and activations. Default: float32 on a CPU, else bfloat16.",
)
@click.option(
    "--weights",
    "weight_format",
    type=click.Choice(["int8", "ema"]),
    help="int8: round matrices to 8 bits: less memory and, on a CPU with few texts, faster; the"
    " text may change. ema: use the averaged weights of a run with ema_decay."
    "  [default: neither]",
)
def main(**options: Any) -> None:
    """Continue each PROMPT with the model of RUN_OR_CHECKPOINT: a run folder (its best checkpoint,
    or the imported model), a checkpoint or a model.safetensors."""
    with importing():
        from rungs.commands.generate import generate
    generate(**options)


if __name__ == "__main__":
    run_command(main)
