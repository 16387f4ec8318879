"""The `reward` function of reasoning-gym's items. Some of its scorers run `eval` on a completion,
so it runs like a user's function: its source is given to a `RewardProcess`."""

from typing import Any

from reasoning_gym.factory import get_score_answer_fn


def reward(prompt: str, completion: str, answer: str, info: dict[str, Any]) -> float:
    """Return the library's score of a completion, from 0 to 1."""
    entry = {"question": prompt, "answer": answer, "metadata": info}
    try:
        return float(get_score_answer_fn(info["source_dataset"])(completion.strip(), entry))
    except Exception:  # some raise on texts that don't look like an answer
        return 0.0
