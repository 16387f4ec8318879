"""Measure a checkpoint: its loss, perplexity and bits per byte, or its scores on benchmarks."""

from rungs.common.command import importing

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rungs.cli.options import DATASETS_DIR_OPTION, WEIGHTS_OPTION
from rungs.common.errors import RunFailure, UserError
from rungs.common.shown_text import align_columns
from rungs.config.option_values import UNTRAINED_LENGTH

if TYPE_CHECKING:
    from rungs.checkpointing.weights_file import Weights
    from rungs.config.train_config import TrainConfig
    from rungs.evaluation.scoring import TextScore
    from rungs.run.records import Evaluation


@click.command()
@click.argument("checkpoint")
@click.option("--dataset", metavar="NAME", help="Default: the dataset the model was trained on.")
@click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Loss, perplexity and bits per byte on a UTF-8 text instead of a dataset.",
)
@click.option(
    "--sequence-length",
    type=click.IntRange(1),
    metavar="N",
    help=f"With --text: tokens in a window.  [default: as in training, or {UNTRAINED_LENGTH:,}]",
)
@click.option(
    "--choices",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help='Accuracy on multiple-choice items instead, JSON lines {"prompt": "…", "choices": ["…",'
    ' "…"], "answer": 0}.',
)
@click.option(
    "--tasks",
    metavar="NAMES",
    help="Tasks of the lm-evaluation-harness instead, such as hellaswag,arc_easy; needs the extra"
    " eval.",
)
@click.option(
    "--task-files",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --tasks: a folder with tasks of your own, in the harness's YAML.",
)
@click.option("--few-shot", type=click.IntRange(0), help="With --tasks: examples before an item.")
@click.option("--limit", type=click.IntRange(1), help="Items at most, of a file or of each task.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Texts at once, for --choices and --tasks.",
)
@WEIGHTS_OPTION
@DATASETS_DIR_OPTION
def main(
    checkpoint: str,
    dataset: str | None,
    text: Path | None,
    sequence_length: int | None,
    choices: Path | None,
    tasks: str | None,
    task_files: Path | None,
    few_shot: int | None,
    limit: int | None,
    batch_size: int,
    datasets_dir: Path | None,
    averaged: str | None,
) -> None:
    """Print what CHECKPOINT (a run folder, a checkpoint or a model.safetensors) is worth: its loss,
    perplexity and bits per byte on the validation split of a dataset or on a text, or its scores on
    benchmarks, which the run folder keeps in evaluations.jsonl.

    Uses the number of validation tokens that `validation_tokens` in train.json says.
    """
    if sum(map(bool, (dataset, text, choices, tasks))) > 1:
        raise click.UsageError(
            "--dataset, --text, --choices and --tasks do not go together; choose one"
        )
    if sequence_length and not text:
        raise click.UsageError("--sequence-length is for --text")
    if not tasks and (task_files or few_shot is not None):
        raise click.UsageError("--task-files and --few-shot are for --tasks")
    with importing():
        from rungs.checkpointing.checkpoint_folder import find_averaged_weights
        from rungs.data.catalog import find_datasets_dir
        from rungs.evaluation import harness
        from rungs.evaluation.checkpoint_scores import Measured
        from rungs.parallel import jax_setup

    jax_setup.enable_compilation_cache()
    folder = find_datasets_dir(datasets_dir)
    if averaged:
        checkpoint = str(find_averaged_weights(checkpoint))
    if not (text or choices or tasks):
        print_loss(checkpoint, dataset, folder)
        return
    if tasks:
        harness.check_installed()
    measured = Measured.find(checkpoint, batch_size, folder)
    if begin := measured.tokenizer.begin:
        click.echo(f"texts begin with {measured.tokenizer.names(begin)}", err=True)
    if text:
        print_text_loss(text, *measured.on_text(text, sequence_length))
    elif choices:
        print_scores(measured.on_choices(choices, limit))
    elif tasks:
        asked = harness.Tasks(tuple(tasks.split(",")), task_files, few_shot, limit)
        print_scores(measured.on_tasks(asked))


def print_scores(evaluations: "list[Evaluation]") -> None:
    """Print a table of metrics."""
    rows = [("task", "metric", "items", "value", "")]
    for one in evaluations:
        reach = "" if one.standard_error is None else f"± {one.standard_error:.4f}"
        if one.low is not None and one.high is not None:
            reach = f"{one.low:.4f} to {one.high:.4f} (95 %)"
        rows.append((one.task, one.metric, f"{one.items:,}", f"{one.value:.4f}", reach))
    click.echo(align_columns(rows, left=2))


def print_text_loss(file: Path, score: "TextScore", length: int) -> None:
    """Print loss, perplexity and bits per byte of a text."""
    click.echo(f"text           {file}: {score.tokens:,} tokens, in windows of {length:,}")
    print_figures(score.loss)
    click.echo(f"bits per byte  {score.bits_per_byte:.4f}")


def print_figures(loss: float, by_dataset: Mapping[str, float] = {}) -> None:
    """Print a loss, and the perplexity."""
    click.echo(f"loss           {loss:.4f} nats per token")
    for name, own_loss in by_dataset.items():
        click.echo(f"  {name:13}{own_loss:.4f}")
    click.echo(f"perplexity     {math.exp(loss) if loss < 700 else math.inf:.2f}")


def print_loss(checkpoint: str, dataset: str | None, folder: Path) -> None:
    """Print loss, perplexity and bits per byte on a validation split."""
    from rungs.checkpointing import load
    from rungs.checkpointing.checkpoint_folder import find_weights
    from rungs.checkpointing.weights_file import Weights
    from rungs.config.run_config import RunConfig
    from rungs.data import catalog, overlap, provenance
    from rungs.data.tokens import loader
    from rungs.objectives.next_token import NextToken
    from rungs.parallel.sharding import one_device
    from rungs.step.eval_step import make_evaluation_step, validation_losses

    weights = Weights(find_weights(checkpoint))
    weights.header.model.require_next_token()
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
    model, step = load.load_model(checkpoint), make_evaluation_step(NextToken(train), train)
    loss, by_dataset = validation_losses(model, step, sets, one_device())
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
    print_figures(loss, by_dataset)
    if text_bytes:
        click.echo(f"bits per byte  {loss / math.log(2) * tokens / text_bytes:.4f}")


def _train_config(weights: "Weights", dataset: str | None) -> "TrainConfig":
    """Return the train.json that the model was trained with, if need be for another dataset."""
    from rungs.config.train_config import TrainConfig

    model, train, tokenizer, *_ = weights.header
    if isinstance(train, TrainConfig):
        other = {"dataset": dataset, "start_val_token": 0, "validation_datasets": ()}
        return train.model_copy(update=other if dataset else {})
    if dataset is None:
        raise UserError(f"{weights.path}: has not been trained on a dataset, so choose a --dataset")
    return TrainConfig(
        dataset=dataset,
        sequence_length=min(model.context_length, UNTRAINED_LENGTH),
        tokenizer=tokenizer,
        microbatch_size=1,
        learning_rate=1.0,  # required but unused
        checkpoint_interval=1,
    )
