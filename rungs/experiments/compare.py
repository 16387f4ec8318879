"""`"kind": "compare"`: which variants are better than the base."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from rungs.common.strict_json import check
from rungs.experiments.experiment import (
    BASE,
    Changes,
    Comparison,
    Experiment,
    NumberOfSeeds,
    Outcomes,
    Seeds,
    Trial,
    compare_by_seed,
    folder_name,
)
from rungs.experiments.verdict import AnyNumber, FixedNumber, Sampling

WITHOUT = "without "


class Compare(Experiment):
    """Variants and a base, paired by seed."""

    kind: Literal["compare"] = "compare"
    variants: Annotated[dict[str, dict[str, Any] | str], Field(min_length=1)]
    """By name, what each variant changes: keys of `model.json` and `train.json` with new values, or
    another run folder."""
    ladder: bool = False
    """Whether each variant builds on the one before: it has its changes, too, and is compared with
    it. Run folders are taken as they are."""
    leave_one_out: bool = False
    """With ladder: also train the last variant without the changes of each."""
    seeds: NumberOfSeeds | Seeds = 3
    """Runs of each variant: a number, or `{"from": 3, "to": 12}` for as many as a verdict takes."""

    @check
    def _names_differ(self) -> Iterator[str]:
        names = [BASE, *self.variants]
        folders = [folder_name(name) for name in names]
        for name, folder in zip(names, folders, strict=True):
            if not folder or folders.count(folder) > 1:
                yield f"variants: {name!r} would have the folders of another one; rename it"

    @check
    def _can_leave_out(self) -> Iterator[str]:
        if not self.leave_one_out:
            return
        if not self.ladder:
            yield "leave_one_out: needs ladder"
        if any(isinstance(changes, str) for changes in self.variants.values()):
            yield "leave_one_out: needs variants that are changes, not run folders"

    @property
    def may_look_often(self) -> bool:
        return isinstance(self.seeds, Seeds)

    @property
    def sampling(self) -> Sampling:
        return AnyNumber() if self.may_look_often else FixedNumber()

    @property
    def pairs(self) -> dict[str, str]:
        """What each group is compared with."""
        names = [BASE, *self.variants]
        pairs = {name: names[at] if self.ladder else BASE for at, name in enumerate(self.variants)}
        left_out = {f"{WITHOUT}{name}": names[-1] for name in self._left_out}
        return pairs | left_out

    @property
    def _left_out(self) -> Sequence[str]:
        """The last one left out is the variant before it, which is there."""
        return [*self.variants][:-1] if self.leave_one_out else []

    def changes_of(self, group: str) -> tuple[str | None, Changes]:
        """Return the run folder that a group copies, if not the base, and its changes."""
        own = self.variants.get(group, {})
        if isinstance(own, str):
            return own, {}
        if group == BASE or not self.ladder:
            return None, own
        names = [*self.variants]
        if group in self.variants:
            names = names[: names.index(group) + 1]
        else:
            names.remove(group.removeprefix(WITHOUT))
        return None, {
            key: value for name in names for key, value in _keys(self.variants[name]).items()
        }

    def trials(self, outcomes: Outcomes) -> list[Trial]:
        groups = [BASE, *self.pairs]
        if isinstance(self.seeds, int):
            return self._of_seeds(groups, range(self.seeds))
        found = self._of_seeds(groups, range(self.seeds.first))
        for seed in range(self.seeds.first, self.seeds.to):
            if any(trial.name not in outcomes for trial in found):
                break
            known = Outcomes({name: one for name, one in outcomes.items() if one.seed < seed})
            undecided = [one for one in self.comparisons(known) if not one.verdict.is_decided]
            needed = {name for one in undecided for name in (one.group, one.against)}
            found += self._of_seeds([group for group in groups if group in needed], [seed])
        return found

    def most_runs(self) -> int:
        return (1 + len(self.pairs)) * (
            self.seeds if isinstance(self.seeds, int) else self.seeds.to
        )

    def comparisons(self, outcomes: Outcomes) -> list[Comparison]:
        if isinstance(self.seeds, int) and not self.has_ended(outcomes):
            return []  # to look earlier would be to look more than once
        return compare_by_seed(self, outcomes, self.pairs, self.sampling)

    def _of_seeds(self, groups: Sequence[str], seeds: Sequence[int]) -> list[Trial]:
        return [self._trial(group, seed) for seed in seeds for group in groups]

    def _trial(self, group: str, seed: int) -> Trial:
        origin, changes = self.changes_of(group)
        return self.trial(group, seed, changes, origin)


def _keys(changes: Mapping[str, Any] | str) -> Mapping[str, Any]:
    return {} if isinstance(changes, str) else changes
