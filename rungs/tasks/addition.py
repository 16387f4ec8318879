"""The task `add`: the sum of two numbers."""

from rungs.config.reinforce_config import AddSettings
from rungs.tasks.task import Draws, Item, short

ALPHABET = "0123456789+>,:="


def draw(settings: AddSettings, draws: Draws) -> Item:
    """Return an item such as `57+68:` with the answer `125`."""
    left, right = (draws.number(settings.min_digits, settings.max_digits) for _ in range(2))
    return Item(f"{left}+{right}:", str(left + right), {"terms": [left, right]})


def worked(item: Item) -> str:
    """Return the sums of the columns from the right, `7+8+0>15,5+6+1>12`, each with both digits and
    the carry, then the answer."""
    left, right = item.info["terms"]
    carry, columns = 0, []
    for place in range(max(len(str(left)), len(str(right)))):
        digits = left // 10**place % 10, right // 10**place % 10
        total = sum(digits) + carry
        columns.append(f"{digits[0]}+{digits[1]}+{carry}>{total}")
        carry = total // 10
    return ",".join(columns) + short(item)
