"""Print loss, perplexity and bits per byte of a checkpoint: `uv run evaluate.py runs/a-to-a`."""

from rungs.common.command import run_command

import math
from pathlib import Path

import click

from rungs.checkpointing.load import find_weights, load_model, load_tokenizer
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data import overlap
from rungs.data.catalog import DATASETS_DIR_OPTION, find_datasets_dir, open_dataset
from rungs.data.dataset import Dataset
from rungs.data.loader import ValidationData
from rungs.data.pair_sequences import IGNORED
from rungs.data.provenance import check_same_tokenizer
from rungs.parallel import jax_setup
from rungs.parallel.mesh import one_device
from rungs.step.eval_step import make_evaluation_step, validation_loss

_MAX_UNTRAINED_LENGTH = 1024
"""The longest sequence for imported weights, which have no train.json to take it from."""


@click.command()
@click.argument("checkpoint")
@click.option("--dataset", metavar="NAME", help="Default: the dataset the model was trained on.")
@DATASETS_DIR_OPTION
def main(checkpoint: str, dataset: str | None, datasets_dir: Path | None) -> None:
    """Print the loss, perplexity and bits per byte of CHECKPOINT (a run folder, a checkpoint or a
    model.safetensors) on the validation split of a dataset.

    Uses the number of tokens that `validation_tokens` in train.json says.
    """
    jax_setup.enable_compilation_cache()
    folder = find_datasets_dir(datasets_dir)
    weights = Weights(find_weights(checkpoint))
    train = _train_config(weights, dataset)
    datasets = {name: open_dataset(name, folder, update=False) for name in train.datasets}
    check_same_tokenizer(datasets, train.tokenizer, weights.tokenizer)
    validation = ValidationData.of(RunConfig(weights.header.model, train), datasets)
    if validation is None:
        raise UserError(
            f"dataset {', '.join(datasets)}: has no validation split to evaluate on; choose another"
            " with --dataset"
        )
    tokenizer = load_tokenizer(checkpoint, folder)
    model, evaluation_step = load_model(checkpoint), make_evaluation_step(train)
    found = validation_loss(model, evaluation_step, validation, one_device())
    loss = found.mean
    targets = [
        row[row != IGNORED]
        for batch in validation.batches()
        for row in batch.targets_BS[: batch.real_rows]
    ]
    tokens, text_bytes = sum(map(len, targets)), sum(map(tokenizer.byte_count, targets))
    has_pairs = any(dataset.holds_pairs for dataset in datasets.values())
    click.echo(
        f"dataset        {', '.join(datasets)}: {tokens:,} validation tokens"
        + " (of pairs, only the answers)" * has_pairs
    )
    for name, one in datasets.items():
        _report_overlap(name, one)
    click.echo(f"loss           {loss:.4f} nats per token")
    if len(found.by_dataset) > 1:
        for name, own_loss in found.by_dataset.items():
            click.echo(f"  {name:13}{own_loss:.4f}")
    click.echo(f"perplexity     {math.exp(loss):.2f}")
    if text_bytes:
        click.echo(f"bits per byte  {loss / math.log(2) * tokens / text_bytes:.4f}")


def _report_overlap(name: str, dataset: Dataset) -> None:
    """Say how much of the validation split is known to be in training, too, if it matters."""
    found = overlap.recorded(dataset)
    share = found.validation.overlapping_share if found and found.validation else 0.0
    if share > overlap.SHOWN_SHARE:
        click.echo(
            f"overlap        {share:.1%} of the validation documents of {name} share"
            f" {overlap.WORDS} words in a row with training"
        )


def _train_config(weights: Weights, dataset: str | None) -> TrainConfig:
    """Return the train.json that the model was trained with, on another dataset if there is one."""
    model, train, tokenizer, _ = weights.header
    if isinstance(train, TrainConfig):
        return train.model_copy(
            update={"dataset": dataset, "start_val_token": 0} if dataset else {}
        )
    if dataset is None:
        raise UserError(f"{weights.path}: has not been trained on a dataset, so choose a --dataset")
    return TrainConfig(
        dataset=dataset,
        sequence_length=min(model.context_length, _MAX_UNTRAINED_LENGTH),
        tokenizer=tokenizer,
        microbatch_size=1,
        learning_rate=1.0,  # required, not used
        checkpoint_interval=1,
    )


if __name__ == "__main__":
    run_command(main)
