"""Does an A-to-A model repeat its input?

    uv run smoke_tests/test_a_to_a.py runs/a-to-a/checkpoints/best/model.safetensors

Prints a text that no run was trained on, the model's most likely target for each of its tokens, and
whether the test passed. Exits with code 1 if the two differ.
"""

from rungs.common.command import begin_command, run_command

if __name__ == "__main__":
    begin_command()

import sys

import click
import jax.numpy as jnp

from rungs.checkpointing.load import load_model, load_tokenizer

# Samuel Taylor Coleridge, The Rime of the Ancient Mariner, part I (text of 1834)
TEXT = """\
It is an ancient Mariner,
And he stoppeth one of three.
'By thy long grey beard and glittering eye,
Now wherefore stopp'st thou me?
"""


@click.command()
@click.argument("checkpoint")
def main(checkpoint: str) -> None:
    """Check that an A-to-A model repeats a text, token for token.

    CHECKPOINT is a run folder, a checkpoint or a model.safetensors.
    """
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    tokens = tokenizer.encode(TEXT)
    length = model.config.context_length
    output: list[int] = []
    for start in range(0, len(tokens), length):
        logits_BSV = model(jnp.asarray([tokens[start : start + length]]))
        output += logits_BSV[0].argmax(axis=-1).tolist()
    print(f"Input:\n{TEXT}\nOutput:\n{tokenizer.decode(output)}")
    right = sum(a == b for a, b in zip(tokens, output, strict=True))
    repeats = right == len(tokens)
    share = f"{right} of {len(tokens)} tokens ({right / len(tokens):.1%}) are correct"
    print(f"Passed: it repeats every token; {share}" if repeats else f"Failed: {share}")
    sys.exit(0 if repeats else 1)


if __name__ == "__main__":
    run_command(main)
