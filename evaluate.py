"""Print what a checkpoint is worth: `uv run evaluate.py runs/a-to-a`.

Its loss, perplexity and bits per byte or, with --choices or --tasks, its scores on benchmarks.
"""

from rungs.common.command import begin_command, importing, run_command

if __name__ == "__main__":
    begin_command()

from pathlib import Path
from typing import Any

import click

from rungs.commands.options import DATASETS_DIR_OPTION, WEIGHTS_OPTION


@click.command()
@click.argument("checkpoint")
@click.option("--dataset", metavar="NAME", help="Default: the dataset the model was trained on.")
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
def main(**options: Any) -> None:
    """Print what CHECKPOINT (a run folder, a checkpoint or a model.safetensors) is worth: its loss,
    perplexity and bits per byte on the validation split of a dataset, or its scores on benchmarks,
    which the run folder keeps in evaluations.jsonl.

    Uses the number of validation tokens that `validation_tokens` in train.json says.
    """
    with importing():
        from rungs.commands.evaluate import evaluate
    evaluate(**options)


if __name__ == "__main__":
    run_command(main)
