"""Says the same to environments and tools twice, and shows what differs or fails."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from rungs.common.errors import UserError
from rungs.common.shown_text import counted
from rungs.common.strict_json import format_value as quoted
from rungs.config.run_config import ReinforceRunConfig
from rungs.reinforcement.policy_learner import PolicyInputs
from rungs.reinforcement.rollout_files import Prompt, Turn, read
from rungs.reinforcement.sampling import TRAINING, Prompts, answered, longest_prompt, seed_of
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.learner import Kind
from rungs.training.start import start_of

_PROMPTS, _TURNS = 4, 3


def check_environment(run: RunFolder, config: ReinforceRunConfig, kind: Kind) -> tuple[str, int]:
    """Return what the environments and tools of a run reply to turns of the newest step, or to the
    right answer before the first; to a wrong one and then the right one; and to wrong ones alone;
    what differs the second time; and the exit code, 1 if anything does or fails. Raises UserError
    if no task has turns."""
    if not any(task.has_turns for task in config.train.tasks):
        raise UserError("--check-environment: no task has an environment or tools")
    with ExitStack() as stack:
        inputs = kind.open_inputs(start_of(run, config, StartOptions(extend=True), None), stack)
        assert isinstance(inputs, PolicyInputs)
        said = list(_said(run, inputs))
        first, second = ([_turns(inputs, *one) for one in said] for _ in range(2))
    lines = []
    for (prompt, *_), turns, again in zip(said, first, second, strict=True):
        lines.append(f"prompt {quoted(prompt.item.prompt)}")
        for turn, other in zip(turns, again, strict=False):
            differs = "" if turn == other else f"; ! the second time {_told(other)}"
            lines.append(f"  {quoted(turn.wrote)} got {_told(turn)}{differs}")
    failed = sum(turns[-1].status != "ok" for turns in first)
    rewards = [reward for turns in first for turn in turns for reward in turn.rewards.values()]
    if not failed and max(rewards, default=0) <= 0:
        lines.append("nothing that was said is rewarded, so what right answers get is not checked")
    if failed:
        lines.append(f"! failed on {failed} of {counted(len(first), 'text')}")
    if first != second or not failed:
        lines.append("the same both times" if first == second else "! not the same both times")
    return "\n".join(lines), int(first != second or failed > 0)


def _told(turn: Turn) -> str:
    rewards = ", ".join(f"{name} {reward:g}" for name, reward in turn.rewards.items())
    parts = [quoted(turn.reply), rewards, "over" * turn.over, turn.message]
    return "; ".join(filter(None, parts))


def _said(run: RunFolder, inputs: PolicyInputs) -> Iterator[tuple[Prompt, int, Sequence[str]]]:
    """Yield prompts, each with a seed and what to say."""
    config, train = inputs.config, inputs.config.train
    prompts = Prompts(inputs.tasks, train, inputs.formats, longest_prompt(config))
    newest = max(run.rollouts.glob("step-*.jsonl"), default=None)
    step = int(newest.stem.removeprefix("step-")) if newest else 0
    recorded = {one.place: one.answered_turns for one in read(newest)} if newest else {}
    first = prompts.of_step(step)[:_PROMPTS]
    for place, prompt in enumerate(first):
        seed, task = seed_of(train.seed, TRAINING, step, place), inputs.tasks[prompt.task]
        turns, right = recorded.get(place), task.worked(prompt.item)
        others = [task.short(one.item) for one in first if one.task == prompt.task]
        wrong = next((text for text in others if text != task.short(prompt.item)), "")
        yield prompt, seed, [turn.wrote for turn in turns] if turns else [right] * _TURNS
        if wrong != right:
            yield prompt, seed, [wrong, *[right] * (_TURNS - 1)]
            yield prompt, seed, [wrong] * _TURNS


def _turns(inputs: PolicyInputs, prompt: Prompt, seed: int, texts: Sequence[str]) -> list[Turn]:
    turns = list[Turn]()
    episode = inputs.environments[prompt.task].begin(prompt.item, seed)
    try:
        for text in texts:
            turns.append(answered(episode, inputs.formats[prompt.task], text, 0))
            if turns[-1].over:
                break
    finally:
        episode.close()
    return turns
