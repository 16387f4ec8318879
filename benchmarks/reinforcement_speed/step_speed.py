"""Seconds of a step of reinforcement learning, compared with TRL's GRPOTrainer (PyTorch, on CPUs).

Both start from the same weights, those that a run starts from, and take the same steps: the same
prompts of parity, as many completions of at most as many tokens, one update in as many microbatches
in float32. The sides take turns. PyTorch, `transformers` and TRL run in a process of their own: uv
downloads them, unless `--torch-python` names a Python that has them. Train `runs/parity-pretrain`
first.
"""

from rungs.common.command import run_command

import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.report import spread
from benchmarks.side_process import Side, SideProcess, start
from rungs.config.run_config import ReinforceRunConfig, load_reinforcement_run
from rungs.huggingface.exporting import Export
from rungs.reinforcement.policy_learner import PolicyLearner, Sampled, reinforcement
from rungs.reinforcement.rerun import open_learner
from rungs.run.folder import RunFolder, find_run

TRL = Path(__file__).with_name("trl_side.py")
WARM_UP = 2


@click.command()
@click.argument("run", default="parity-rl")
@click.option("--steps", default=60, show_default=True, type=click.IntRange(1))
@click.option("--torch-python", help="A Python with torch and trl, instead of uv's.")
def main(run: str, steps: int, torch_python: str | None) -> None:
    """Print seconds of a step, ours by phase and TRL's, and their ratio."""
    folder = RunFolder(find_run(run))
    config = load_reinforcement_run(folder.path)
    python = [torch_python] if torch_python else ["uv", "run", "--no-project", "--script"]
    with ExitStack() as stack:
        exported = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        exported.mkdir()
        Export(config.train.start_from).write(exported)
        learner, _ = open_learner(stack, folder, config, None, reinforcement(trust_verifier=False))
        settings = trl_settings(config, learner, WARM_UP + steps)
        command = [*python, str(TRL), str(exported), json.dumps(settings)]
        theirs = stack.enter_context(start(Side("TRL", command)))
        turns = [take_turn(learner, theirs, step) for step in range(WARM_UP + steps)]
    report(config, turns[WARM_UP:])


class Turn(NamedTuple):
    """The same step on both sides."""

    seconds: float
    phases: Sampled
    trl_seconds: float
    trl_correct: float

    @property
    def correct(self) -> float:
        completions = self.phases.completions
        return sum(completion.correct for completion in completions) / len(completions)


def take_turn(learner: PolicyLearner, theirs: SideProcess, step: int) -> Turn:
    began = time.perf_counter()
    phases = learner.retake(step)
    return Turn(time.perf_counter() - began, phases, *theirs.ask("step"))


def report(config: ReinforceRunConfig, turns: list[Turn]) -> None:
    train = config.train
    click.echo(
        f"{train.prompts_per_step} prompts × {train.samples_per_prompt} completions of at most"
        f" {train.max_new_tokens} tokens, {train.microbatches_per_step} microbatches;"
        f" {len(turns)} steps\n"
    )
    phases = [turn.phases for turn in turns]
    tokens = [sum(len(c.tokens) for c in each.completions) for each in phases]
    figures = {
        "Rungs, seconds per step": [turn.seconds for turn in turns],
        "  sampling": [each.seconds.sampling for each in phases],
        "  verifying": [each.seconds.verifying for each in phases],
        "  updating": [each.updated.seconds for each in phases],
        "TRL, seconds per step": [turn.trl_seconds for turn in turns],
        "TRL ÷ Rungs": [turn.trl_seconds / turn.seconds for turn in turns],
    }
    rates = {
        "Rungs, sampled tokens/s": [
            count / each.seconds.sampling for count, each in zip(tokens, phases, strict=True)
        ],
        "Rungs, tokens of completions updated on/s": [
            count / each.updated.seconds for count, each in zip(tokens, phases, strict=True)
        ],
    }
    for name, values in figures.items():
        click.echo(f"{name:42} {spread(values)}")
    for name, values in rates.items():
        click.echo(f"{name:42} {spread(values, 0)}")
    own = statistics.fmean(turn.correct for turn in turns)
    other = statistics.fmean(turn.trl_correct for turn in turns)
    click.echo(f"correct completions: {own:.1%} Rungs, {other:.1%} TRL")


def trl_settings(
    config: ReinforceRunConfig, learner: PolicyLearner, steps: int
) -> dict[str, object]:
    """Return what the other side needs to take the same steps."""
    train = config.train
    items = [
        {"prompt": prompt.item.prompt, "answer": prompt.item.answer}
        for step in range(steps)
        for prompt in learner.prompts.of_step(step)
    ]
    return {
        "threads": os.cpu_count(),
        "microbatch_size": train.microbatch_size,
        "microbatches": train.microbatches_per_step,
        "samples": train.samples_per_prompt,
        "new_tokens": train.max_new_tokens,
        "steps": steps,
        "learning_rate": train.learning_rate,
        "items": items,
    }


if __name__ == "__main__":
    run_command(main)
