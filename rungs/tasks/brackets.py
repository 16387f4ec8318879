"""The task `brackets`: close the prompt's open brackets in the right order."""

from rungs.config.reinforce_config import BracketsSettings
from rungs.tasks.task import Draws, Item, short
from rungs.tasks.verifiers.built_in import PAIRS, open_brackets

ALPHABET = "()[]{}<>:="


def draw(settings: BracketsSettings, draws: Draws) -> Item:
    """Return an item such as `([]{:` with the answer `})`. At least one bracket is open."""
    brackets = _brackets(settings, draws)
    while not (still_open := open_brackets(brackets)):
        brackets = _brackets(settings, draws)
    answer = "".join(PAIRS[bracket] for bracket in reversed(still_open))
    return Item(f"{brackets}:", answer, {"brackets": brackets, "open": still_open})


def _brackets(settings: BracketsSettings, draws: Draws) -> str:
    """Return brackets, none closed wrongly; about a third close the last open one."""
    text, still_open = "", ""
    for _ in range(draws.between(settings.min_length, settings.max_length)):
        if still_open and draws.below(3) == 0:
            text += PAIRS[still_open[-1]]
            still_open = still_open[:-1]
        else:
            text += (bracket := draws.one_of(list(PAIRS)[: settings.kinds]))
            still_open += bracket
    return text


def worked(item: Item) -> str:
    """Return the brackets that are still open, then the answer."""
    return f"{item.info['open']}{short(item)}"
