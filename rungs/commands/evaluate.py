"""Measure a checkpoint: its loss, perplexity and bits per byte, or its scores on benchmarks."""

import math
from pathlib import Path

import click

from rungs.checkpointing import checkpoint_folder, load, weights_file
from rungs.common.errors import RunFailure, UserError
from rungs.common.shown_text import align_columns
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data import catalog, loader, overlap, provenance
from rungs.evaluation import checkpoint_scores, harness
from rungs.parallel import jax_setup, sharding
from rungs.run.records import Evaluation
from rungs.step.eval_step import make_evaluation_step, validation_losses

_MAX_UNTRAINED_LENGTH = 1024
"""Longest sequence in tokens for imported weights, which have no train.json to take it from."""


def evaluate(
    checkpoint: str,
    dataset: str | None,
    choices: Path | None,
    tasks: str | None,
    task_files: Path | None,
    few_shot: int | None,
    limit: int | None,
    batch_size: int,
    datasets_dir: Path | None,
    averaged: str | None,
) -> None:
    """Do what the options of `evaluate.py` ask for. Raises UserError if the checkpoint, a dataset
    or a file is missing or unreadable, RunFailure if the model's output is not finite."""
    jax_setup.enable_compilation_cache()
    if sum(map(bool, (dataset, choices, tasks))) > 1:
        raise click.UsageError("--dataset, --choices and --tasks do not go together; choose one")
    if not tasks and (task_files or few_shot is not None):
        raise click.UsageError("--task-files and --few-shot are for --tasks")
    folder = catalog.find_datasets_dir(datasets_dir)
    if averaged:
        checkpoint = str(checkpoint_folder.find_averaged_weights(checkpoint))
    if choices:
        print_scores(_find(checkpoint, batch_size, folder).on_choices(choices, limit))
    elif tasks:
        harness.check_installed()
        asked = harness.Tasks(tuple(tasks.split(",")), task_files, few_shot, limit)
        print_scores(_find(checkpoint, batch_size, folder).on_tasks(asked))
    else:
        print_loss(checkpoint, dataset, folder)


def _find(checkpoint: str, batch_size: int, folder: Path) -> checkpoint_scores.Measured:
    """Return the checkpoint to score, and print the tokens that it puts before each text."""
    measured = checkpoint_scores.Measured.find(checkpoint, batch_size, folder)
    if begin := measured.tokenizer.begin:
        click.echo(f"texts begin with {measured.tokenizer.names(begin)}", err=True)
    return measured


def print_scores(evaluations: list[Evaluation]) -> None:
    """Print a table of metrics."""
    rows = [("task", "metric", "items", "value", "")]
    rows += [
        (one.task, one.metric, f"{one.items:,}", f"{one.value:.4f}", _reach(one))
        for one in evaluations
    ]
    click.echo(align_columns(rows, left=2))


def _reach(one: Evaluation) -> str:
    if one.low is not None and one.high is not None:
        return f"{one.low:.4f} to {one.high:.4f} (95 %)"
    return "" if one.standard_error is None else f"± {one.standard_error:.4f}"


def print_loss(checkpoint: str, dataset: str | None, folder: Path) -> None:
    """Print loss, perplexity and bits per byte on a validation split."""
    weights = weights_file.Weights(checkpoint_folder.find_weights(checkpoint))
    train = _train_config(weights, dataset)
    datasets, others = (
        catalog.open_datasets(names, folder, update=False)
        for names in (train.datasets, train.validation_datasets)
    )
    provenance.check_same_tokenizer(datasets | others, train.tokenizer, weights.tokenizer)
    sets = loader.ValidationSets.of(RunConfig(weights.header.model, train), datasets, others)
    if (validation := sets.own) is None:
        raise UserError(
            f"dataset {', '.join(datasets)}: has no validation split to evaluate on; choose another"
            " with --dataset"
        )
    tokenizer = load.load_tokenizer(checkpoint, folder)
    model, evaluation_step = load.load_model(checkpoint), make_evaluation_step(train)
    loss, by_dataset = validation_losses(model, evaluation_step, sets, sharding.one_device())
    assert loss is not None
    if not math.isfinite(loss):
        raise RunFailure(f"{weights.path}: the loss is {loss}; use another checkpoint")
    tokens, text_bytes = validation.count_bytes(tokenizer)
    has_pairs = any(dataset.holds_pairs for dataset in datasets.values())
    click.echo(
        f"dataset        {', '.join(datasets)}: {tokens:,} validation tokens"
        + " (of pairs, only the answers)" * has_pairs
    )
    for note in overlap.notes({name: one.folder for name, one in (datasets | others).items()}):
        click.echo(f"overlap        {note}")
    for note in provenance.notes_on_beginnings(datasets | others, tokenizer):
        click.echo(f"beginning      {note}")
    click.echo(f"loss           {loss:.4f} nats per token")
    for name, own_loss in by_dataset.items():
        click.echo(f"  {name:13}{own_loss:.4f}")
    click.echo(f"perplexity     {math.exp(loss) if loss < 700 else math.inf:.2f}")
    if text_bytes:
        click.echo(f"bits per byte  {loss / math.log(2) * tokens / text_bytes:.4f}")


def _train_config(weights: weights_file.Weights, dataset: str | None) -> TrainConfig:
    """Return the train.json that the model was trained with, if need be for another dataset."""
    model, train, tokenizer, _ = weights.header
    if isinstance(train, TrainConfig):
        return train.model_copy(
            update={"dataset": dataset, "start_val_token": 0, "validation_datasets": ()}
            if dataset
            else {}
        )
    if dataset is None:
        raise UserError(f"{weights.path}: has not been trained on a dataset, so choose a --dataset")
    return TrainConfig(
        dataset=dataset,
        sequence_length=min(model.context_length, _MAX_UNTRAINED_LENGTH),
        tokenizer=tokenizer,
        microbatch_size=1,
        learning_rate=1.0,  # required but unused
        checkpoint_interval=1,
    )
