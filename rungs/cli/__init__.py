"""The commands, a file for each: its options, and what it does.

    options            declares options that several commands have; loads Click only
    start_command      checks those that train and reinforce share, and locks the run
    charts             redraw charts, compare runs, show the page of runs
    checkpointing      list and verify checkpoints
    download_dataset   build or download a dataset
    evaluate           loss, perplexity and scores of a checkpoint
    experiment         conduct an experiment: several runs and a verdict
    generate           continue prompts or chat
    model              show the model of a run as it is built
    mup                the coordinate check of muP
    new                make a run folder; only `rungs new`, as `train.py --like` makes one, too
    plan               estimate what a run needs, or propose a ladder of runs
    pretrained         import, export and upload Hugging Face models
    serve              answer over HTTP
    reinforce          train by reinforcement learning, replay a step, audit
    train              train or resume a run, replay a failed step

A command imports what is slow inside its functions, so `--help` loads only Click. Most defaults
and choices in help are in `rungs/config/option_values.py`."""

from rungs.common.command import begin_command, run_command

import importlib

from rungs.common import signals

COMMANDS = {
    "Train": ("new", "train", "experiment", "reinforce"),
    "Data": ("download-dataset",),
    "Use a model": ("generate", "serve", "evaluate", "pretrained"),
    "Look at runs": ("charts", "model", "checkpointing"),
    "Before you train": ("plan", "mup"),
}
"""Commands of `rungs` by what people come to do. Files here and scripts at the root have _ in place
of -; `new` has no script."""


def run(name: str) -> None:
    """Run a command, such as `train`, with the arguments of the process, and end the process."""
    begin_command()
    if name in ("train", "reinforce"):
        signals.exit_on_signal()  # before the slow imports
    run_command(importlib.import_module(f"rungs.cli.{name}").main)
