"""What a client gets of what the engine delivers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rungs.data.bpe import train_bpe
from rungs.serving.answering import _Choice
from rungs.serving.engine import Delivery
from rungs.serving.protocol import Body, ChatBody, CompletionBody
from rungs.serving.slots import LogProbs

ASK: dict[str, Any] = {"model": "m"}


@pytest.mark.parametrize(
    ("body", "entries"),
    [
        (CompletionBody(**ASK, prompt="a", logprobs=1), 3),
        (ChatBody(**ASK, messages=[], logprobs=True), 2),
    ],
)
def test_completions_name_the_token_that_ends_them(body: Body, entries: int) -> None:
    """The lm-evaluation-harness leaves out the last token, which it asked for beyond the text."""
    served: Any = SimpleNamespace(tokenizer=train_bpe([], 257))
    one = LogProbs(np.array(-1.0), np.array([-1.0]), np.array([65]))
    choice = _Choice(served, body, [65], 0)
    text, found = choice.add(Delivery([65, 66], [one] * 3, "stop", stop_token=[0]))
    assert len(found or []) == entries
    assert (choice.count, choice.finish) == (2, "stop")
    assert len(text) == 2
