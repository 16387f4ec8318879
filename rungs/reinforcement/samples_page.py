"""`samples.md`: what a run says to a few held-out prompts, at each checkpoint."""

from collections.abc import Sequence

from rungs.common import disk
from rungs.reinforcement.rollout_files import Completion, RolloutFiles, read
from rungs.run.folder import RunFolder

_PROMPTS = 6
_MOST_CHARACTERS = 400


def write_samples(run: RunFolder, files: RolloutFiles, last: int) -> None:
    """Write the page anew from the validations up to that after step `last`; raises RunFailure."""
    validations = [(name, _by_prompt(read(path))) for name, path in files.validations(last)]
    if not validations:
        return
    lines = [
        "# Samples",
        "",
        "Completions of the first held-out prompts in each validation: the best and the worst of"
        " those sampled, by reward.",
    ]
    for place in sorted(validations[0][1])[:_PROMPTS]:
        lines += _section(place, validations)
    content = "\n".join(lines) + "\n"
    run.check()
    with disk.writing(run.samples, "samples.md", len(content)):
        disk.replace_file(run.samples, content)


def _by_prompt(completions: Sequence[Completion]) -> dict[int, list[Completion]]:
    groups: dict[int, list[Completion]] = {}
    for completion in completions:
        groups.setdefault(completion.place, []).append(completion)
    return groups


def _section(
    place: int, validations: Sequence[tuple[str, dict[int, list[Completion]]]]
) -> list[str]:
    first = validations[0][1][place][0]
    lines = ["", f"## {_code(first.prompt)}", "", f"Answer: {_code(first.answer)}", ""]
    lines += ["| after step | correct | reward | best | worst |", "|---|---|---|---|---|"]
    for name, groups in validations:
        group = sorted(groups.get(place, []), key=lambda completion: completion.verdict.total)
        if not group:
            continue
        correct = f"{sum(c.correct for c in group)} of {len(group)}"
        step = name if name == "start" else f"{int(name):,}"
        mean = sum(c.verdict.total for c in group) / len(group)
        best, worst = _code(group[-1].text), _code(group[0].text)
        lines.append(f"| {step} | {correct} | {mean:.2f} | {best} | {worst} |")
    return lines


def _code(text: str) -> str:
    """Return a text in a form that fits one cell of a Markdown table."""
    shown = text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "…"
    escaped = shown.replace("\n", "⏎").replace("|", "\\|").replace("`", "ˋ")
    return f"`{escaped}`" if escaped.strip() else "(empty)"
