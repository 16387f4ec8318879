"""`"kind": "grid"`: every combination of some values."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from matplotlib.figure import Figure
from pydantic import Field

from rungs.common.shown_text import counted
from rungs.common.strict_json import check
from rungs.config.base import Size
from rungs.config.run_config import load_any_run
from rungs.experiments.experiment import (
    Changes,
    Experiment,
    Outcomes,
    Trial,
    folder_name,
    shown_changes,
    values_of,
)
from rungs.planning import mup
from rungs.run.folder import find_origin

MOST_CELLS = 1000
WIDTH = "emb_dim"


class Grid(Experiment):
    """A run for each combination of values."""

    kind: Literal["grid"]
    grid: Annotated[dict[str, list[Any]], Field(min_length=1)]
    """Keys of `model.json` or `train.json`, with the values to try: `{"learning_rate": [0.001,
    0.003], "weight_decay": [0, 0.1]}`. The last one varies fastest."""
    widths: list[Size] | None = None
    """Also vary the width: emb_dim with the number of heads and ffn_dim, as muP does. With `mup` in
    the base, the best learning rate should be the same at each."""
    seeds: Annotated[int, Field(ge=1, le=1000)] = 1
    """Runs of each combination."""

    @check
    def _cells_differ(self) -> Iterator[str]:
        names = [folder_name(name) for name in self.cells]
        if len(set(names)) < self._count:
            yield "grid: two combinations would have one folder; a value is there twice"

    @check
    def _not_too_many(self) -> Iterator[str]:
        if any(not values for values in self._axes.values()):
            yield "grid: a key has no values"
        if self._count > MOST_CELLS:
            yield f"grid: {self._count:,} combinations are more than {MOST_CELLS:,}"

    @property
    def ranks(self) -> bool:
        return True

    @property
    def _count(self) -> int:
        return math.prod(map(len, self._axes.values()))

    @property
    def _axes(self) -> dict[str, list[Any]]:
        """All keys with their values."""
        return ({WIDTH: self.widths} if self.widths is not None else {}) | self.grid

    @property
    def cells(self) -> dict[str, Changes]:
        """The combinations by name."""
        found = itertools.islice(itertools.product(*self._axes.values()), MOST_CELLS)
        combinations = [dict(zip(self._axes, values, strict=True)) for values in found]
        return {shown_changes(chosen): chosen for chosen in combinations}

    def trials(self, _: Outcomes) -> list[Trial]:
        return [
            self.trial(name, seed, self._keys(changes))
            for seed in range(self.seeds)
            for name, changes in self.cells.items()
        ]

    def _keys(self, changes: Changes) -> Changes:
        """Return a combination's keys, with those that grow with the width."""
        if WIDTH not in changes:
            return changes
        model = load_any_run(find_origin(self.base)).model
        return {**changes, **mup.keys_for_width(model, changes[WIDTH])}

    def means(self, outcomes: Outcomes) -> dict[str, float]:
        """Return the mean of each combination that has a result."""
        found = {name: [*values_of(self, outcomes, name).values()] for name in self.cells}
        return {name: sum(values) / len(values) for name, values in found.items() if values}

    def conclusions(self, outcomes: Outcomes) -> list[str]:
        means = self.means(outcomes)
        if not means:
            return []
        best = self.better(means)
        ends = [
            f"{key} {value} is at an end of its values: try others beyond it."
            for key, values in self.grid.items()
            if _is_at_an_end(value := self.cells[best][key], values)
        ]
        return [
            f"The best of {counted(len(means), 'combination')} is {best} with {means[best]:.4f}."
            " The best of several is partly luck: compare it with the base in an experiment of its"
            " own, with other seeds.",
            *ends,
        ]

    def charts(self, outcomes: Outcomes) -> dict[str, Callable[[Any], Figure]]:
        from rungs.experiments.charts import heat_map

        axes = list(self._axes.items())
        if len(axes) != 2:
            return {}
        means = self.means(outcomes)
        cells = [
            [
                means.get(shown_changes({axes[0][0]: row, axes[1][0]: column}))
                for column in axes[1][1]
            ]
            for row in axes[0][1]
        ]
        return {"heat-map.png": functools.partial(heat_map, axes=axes, cells=cells)}


def _is_at_an_end(value: Any, values: list[Any]) -> bool:
    """Return whether a number is the least or the largest of at least three."""
    numbers = [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    return len(numbers) >= 3 and value in (min(numbers), max(numbers))
