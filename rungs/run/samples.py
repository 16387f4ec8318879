"""What a model says to the prompts of its run, at each checkpoint: `samples.jsonl`."""

import itertools

from rungs.common.strict_json import StrictModel
from rungs.run import json_records
from rungs.run.folder import RunFolder

KINDS = ("greedy", "sampled")


class Sample(StrictModel):
    """How a checkpoint continues a prompt."""

    time: str
    """When it was sampled, in UTC."""
    step: int
    checkpoint: str
    """Name of its folder."""
    prompt: str
    temperature: float
    """0: greedy."""
    seed: int
    text: str
    """The continuation, without the prompt."""
    tokens: int
    """Number of tokens of the continuation."""
    ended: bool
    """Whether the model ended the text itself."""

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return KINDS[self.temperature > 0]


def read(run: RunFolder) -> list[Sample]:
    """Return the samples of a run, by step. Of two of the same prompt and kind after a step the
    later one counts."""
    found = json_records.read(run.prompt_samples, Sample)
    distinct = {(one.step, one.prompt, one.kind): one for one in found}
    return sorted(distinct.values(), key=lambda one: one.step)


def append(run: RunFolder, found: list[Sample]) -> None:
    """Add samples; raises RunFailure."""
    json_records.append(run, run.prompt_samples, found)


def drop_after(run: RunFolder, step: int) -> None:
    """Remove the samples of later steps, which a start goes back behind; raises RunFailure."""
    found = read(run)
    kept = [one for one in found if one.step <= step]
    if len(kept) < len(found):
        json_records.write(run.prompt_samples, kept)


def as_text(samples: list[Sample]) -> str:
    """Return samples for a terminal: for each prompt and kind, what each checkpoint said."""
    by_prompt = sorted(samples, key=lambda one: (one.prompt, one.kind))
    lines: list[str] = []
    for (prompt, kind), group in itertools.groupby(by_prompt, lambda one: (one.prompt, one.kind)):
        lines += ["", f"{prompt!r}, {kind}"]
        lines += [f"  step {one.step:>8,}  {one.text!r}" for one in group]
    return "\n".join(lines[1:])
