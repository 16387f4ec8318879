"""Verdicts on the completions of a step."""

import json
from collections.abc import Callable, Sequence

from rungs.common.signals import Interrupted
from rungs.parallel.processes import broadcast_from_first
from rungs.reinforcement.prompts import Prompt
from rungs.tasks.verifiers.opening import Verifier
from rungs.tasks.verifiers.verdict import Verdict


def verify(
    verifiers: Sequence[Verifier],
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Verdict]:
    """Return the verdict on each text. Of several processes, the first one asks the verifiers.

    Args:
        verifiers: of each task.
        prompts: of each text.
        should_stop: called before each text.

    Raises:
        Interrupted: `should_stop` returned True.
    """

    def ask() -> str:
        verdicts = []
        for prompt, text in zip(prompts, texts, strict=True):
            if should_stop():
                return ""
            verdict = verifiers[prompt.task](prompt.item, text)
            verdicts.append([verdict.rewards, verdict.status, verdict.message])
        return json.dumps(verdicts)

    answer = broadcast_from_first(ask)
    if not answer:
        raise Interrupted
    return [Verdict(*verdict) for verdict in json.loads(answer)]
