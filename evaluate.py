"""Loss, perplexity and bits per byte of a checkpoint: `uv run evaluate.py runs/a-to-a`."""

import math
from pathlib import Path

import click

import runtime
from checkpoint import TOKENIZER_FILE, Weights
from checkpointing import find_weights, load_model, load_tokenizer
from data import ValidationData
from dataset import find_datasets_dir, open_dataset
from errors import UserError, run_command
from provenance import refuse_other_tokenizers
from sharding import create_mesh
from step import make_evaluation_step, mean_loss


@click.command()
@click.argument("checkpoint")
@click.option("--dataset", metavar="NAME", help="Another dataset than the model was trained on.")
@click.option(
    "--datasets-dir", type=click.Path(path_type=Path), help="Where datasets lie, or will."
)
def main(checkpoint: str, dataset: str | None, datasets_dir: Path | None) -> None:
    """Evaluate CHECKPOINT (a run folder, a checkpoint or a model.safetensors) on a dataset's
    validation tokens, as many as `validation_tokens` says."""
    runtime.cache_compiled_code()
    folder = find_datasets_dir(datasets_dir)
    weights = Weights(find_weights(checkpoint))
    train = weights.train.model_copy(
        update={"dataset": dataset, "start_val_token": 0} if dataset else {}
    )
    datasets = {name: open_dataset(name, folder, update=False) for name in train.datasets}
    validation = ValidationData.of(train, weights.model, datasets)
    if validation is None:
        raise UserError(f"dataset {', '.join(datasets)}: no validation split to evaluate on")
    tokenizer = load_tokenizer(checkpoint, folder)
    own = weights.path.with_name(TOKENIZER_FILE)
    model_tokenizer = own.read_bytes() if own.is_file() else None
    refuse_other_tokenizers(datasets, weights.train.tokenizer, model_tokenizer)
    model, evaluation_step = load_model(checkpoint), make_evaluation_step(train)
    loss = mean_loss(model, evaluation_step, validation.batches(), create_mesh((1, 1)))
    targets = [batch.targets_BS[: batch.real_rows] for batch in validation.batches()]
    text_bytes = sum(tokenizer.byte_count(row) for rows in targets for row in rows)
    click.echo(f"dataset        {', '.join(datasets)}: {validation.tokens:,} validation tokens")
    click.echo(f"loss           {loss:.4f} nats per token")
    click.echo(f"perplexity     {math.exp(loss):.2f}")
    click.echo(f"bits per byte  {loss / math.log(2) * validation.tokens / text_bytes:.4f}")


if __name__ == "__main__":
    run_command(main)
