"""How does a model continue a prompt? Generates twenty tokens, greedily.

    uv run smoke_tests/test_generation.py runs/a-to-a/checkpoints/best/model.safetensors

An A-to-A model repeats the last token.
"""

from rungs.common.command import begin_command, run_command

if __name__ == "__main__":
    begin_command()

import click

from rungs.checkpointing.load import load_generator

PROMPT = "Every effort moves you"
NEW_TOKENS = 20


@click.command()
@click.argument("checkpoint")
def main(checkpoint: str) -> None:
    """Print how a model continues a short prompt, decoded greedily.

    CHECKPOINT is a run folder, a checkpoint or a model.safetensors.
    """
    (text,) = load_generator(checkpoint).continue_texts([PROMPT], NEW_TOKENS)
    print(PROMPT + text)


if __name__ == "__main__":
    run_command(main)
