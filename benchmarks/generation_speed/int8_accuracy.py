"""What rounding the matrices to 8 bits costs: the loss of a trained RUN with and without it.

Predicts validation tokens of the run's first dataset, in windows of the model's context, as
generation does: in float32, with int8 weights and, for comparison, in bfloat16. Prints the mean
loss, the mean and the largest difference of a token's, and how often the most likely token is
another one.
"""

from rungs.common.command import run_command

from pathlib import Path
from typing import NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np

from rungs.checkpointing.checkpoint_folder import find_weights
from rungs.checkpointing.load import load_model
from rungs.common.shown_text import align_columns
from rungs.config.run_config import load_run
from rungs.data.catalog import find_datasets_dir, open_dataset
from rungs.data.tokens.dataset import VALIDATION
from rungs.model.decoding import Decoder, Prompts, states_of
from rungs.model.generation import row_keys
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.model.weight_formats import WeightFormat
from rungs.parallel import jax_setup

FORMS: dict[str, tuple[str, WeightFormat]] = {
    "float32": ("float32", "dtype"),
    "bfloat16": ("bfloat16", "dtype"),
    "int8": ("float32", "int8"),
}
BATCH = 8
HEADING = ("", "loss, nats", "÷ float32", "of a token: mean", "largest", "other first choice")


class Predictions(NamedTuple):
    """Of each target."""

    losses: np.ndarray
    choices: np.ndarray


@click.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.option("--windows", default=64, show_default=True, type=click.IntRange(1))
def main(run: Path, windows: int) -> None:
    """Print a line for each form of the weights of RUN's best checkpoint."""
    jax_setup.enable_compilation_cache()
    model = load_model(find_weights(str(run)))
    first, *_ = load_run(run).train.datasets
    dataset = open_dataset(first, find_datasets_dir())
    length = model.config.context_length
    tokens = np.asarray(dataset.tokens(VALIDATION)[: windows * length], np.int32)
    texts = tokens[: len(tokens) // length * length].reshape(-1, length)
    click.echo(f"{texts.size:,} tokens in {len(texts)} windows")
    found = {name: predict(model, texts, *form) for name, form in FORMS.items()}
    exact = found["float32"]
    rows = [
        (
            name,
            f"{own.losses.mean():.5f}",
            f"{own.losses.mean() / exact.losses.mean():.5f}",
            f"{np.abs(own.losses - exact.losses).mean():.5f}",
            f"{np.abs(own.losses - exact.losses).max():.4f}",
            f"{(own.choices != exact.choices).mean():.2%}",
        )
        for name, own in found.items()
    ]
    click.echo(align_columns([HEADING, *rows]))


def predict(model: GPT, texts: np.ndarray, dtype: str, weight_format: WeightFormat) -> Predictions:
    """Return the predictions of each token of texts_BS but the first ones."""
    decoder = Decoder(model, jnp.dtype(dtype), weight_format)
    weights = decoder.weights(states_of(model))

    @jax.jit
    def of_batch(tokens_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, length = tokens_BS.shape
        nothing_B = jnp.zeros(rows, jnp.int32)
        prompts = Prompts(tokens_BS, nothing_B, nothing_B > 0, row_keys(0, rows), 0)
        state = decoder.initial_state(prompts, slots=length)
        logits_BSV, _ = decoder.all_logits(weights, state, tokens_BS, None)
        logits_BSV = logits_BSV[:, :-1]
        return target_losses(logits_BSV, tokens_BS[:, 1:]), logits_BSV.argmax(axis=-1)

    batches = [of_batch(jnp.asarray(texts[at : at + BATCH])) for at in range(0, len(texts), BATCH)]
    parts = zip(*batches, strict=True)
    losses, choices = (np.concatenate([np.asarray(one) for one in part]) for part in parts)
    return Predictions(losses.astype(np.float64), choices)


if __name__ == "__main__":
    run_command(main)
