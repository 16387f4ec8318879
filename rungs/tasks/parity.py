"""The task `parity`: is the number of ones in the prompt odd? Learned from scratch in "How
reinforcement learning after next-token prediction facilitates learning" (arXiv 2510.11495), where
worked answers become more frequent and longer."""

import itertools
from operator import xor

from rungs.config.reinforce_config import ParitySettings
from rungs.tasks.task import Draws, Item, short

ALPHABET = "01:="


def draw(settings: ParitySettings, draws: Draws) -> Item:
    """Return an item such as `0110:` with the answer `0`. All lengths are equally likely."""
    bits = draws.text("01", draws.between(settings.min_bits, settings.max_bits))
    return Item(f"{bits}:", str(bits.count("1") % 2), {"bits": bits})


def worked(item: Item) -> str:
    """Return the parities of the first bit, the first two etc., then the answer."""
    parities = itertools.accumulate(map(int, item.info["bits"]), xor)
    return "".join(map(str, parities)) + short(item)
