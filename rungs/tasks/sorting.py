"""The task `sort`: the prompt's digits in ascending order."""

from rungs.config.reinforce_config import SortSettings
from rungs.tasks.task import Draws, Item, short

ALPHABET = "0123456789,:="


def draw(settings: SortSettings, draws: Draws) -> Item:
    """Return an item such as `302:` with the answer `023`. All lengths are equally likely."""
    digits = draws.text("0123456789", draws.between(settings.min_digits, settings.max_digits))
    return Item(f"{digits}:", "".join(sorted(digits)), {"digits": digits})


def worked(item: Item) -> str:
    """Return the steps of a selection sort, `032,23,3`, then the answer. Each step has the smallest
    remaining digit, then the others in order."""
    digits, steps = item.info["digits"], []
    while digits:
        smallest = min(digits)
        digits = digits.replace(smallest, "", 1)
        steps.append(smallest + digits)
    return ",".join(steps) + short(item)
