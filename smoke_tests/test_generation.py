"""How does a model continue a prompt? Generates twenty tokens, greedily.

    uv run smoke_tests/test_generation.py runs/a-to-a/checkpoints/best/model.safetensors

An A-to-A model repeats the last token.
"""

from rungs.common.command import run_command

import click

from rungs.checkpointing.load import load_model, load_tokenizer
from rungs.model.generation import Generator, Request

PROMPT = "Every effort moves you"
NEW_TOKENS = 20


@click.command()
@click.argument("checkpoint")
def main(checkpoint: str) -> None:
    """Print how a model continues a short prompt, decoded greedily.

    CHECKPOINT is a run folder, a checkpoint or a model.safetensors.
    """
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    tokens = tokenizer.encode(PROMPT)
    (new,) = Generator(model).generate([tokens], Request(NEW_TOKENS))
    print(tokenizer.decode(tokens + new))


if __name__ == "__main__":
    run_command(main)
