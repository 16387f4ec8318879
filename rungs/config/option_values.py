"""Defaults and choices of the commands' options, which their help shows.

A module of its own, and without imports of libraries, because `--help` should not wait for them.
"""

from typing import Literal

DATASETS_VARIABLE = "RUNGS_DATASETS_DIR"
"""Environment variable that sets the datasets folder."""

ChartStyle = Literal["plain", "hand-drawn"]
LinenFamily = Literal["gemma", "gpt2", "llama"]
"""Families whose Flax Linen checkpoints can be imported."""

MAX_RESTARTS = 10
"""Crashes without a new checkpoint after which --supervise gives up."""

NEW_TOKENS, NEW_TOKENS_OF_A_CHAT = 64, 512
"""The most that `generate.py` adds to a text, and to a conversation at a time."""

LEAST_SCALE, MOST_SCALE = 1e-6, 1e6
"""Range of temperature and repetition penalty. Logits that are divided by much less or more than
these overflow or become equal in float32."""

VOCAB_SIZE = 4096
"""Vocabulary size of a tokenizer trained on a dataset's text."""
LARGEST_VOCAB = 2**24
"""The library that trains it takes memory for all tokens at once."""
VALIDATION_PERCENT = 5
"""Share of text for validation."""
DOCUMENTS_VALIDATION_PERCENT = 1.0
"""The same for files of documents, which are larger."""

LADDER_RUNGS = 5
"""Runs that `plan.py --ladder` proposes."""
UTILIZATION_PERCENT = 40.0
"""Share of the devices' peak FLOP/s assumed where nothing has been measured."""

MOST_DEVICES = 2**20
"""Devices along an axis of the mesh that `model.py` shows."""

COORDINATE_CHECK_STEPS = 5
MIN_COORDINATE_CHECK_STEPS = 4
"""muP's logits before training shrink with the square root of the width; it takes this many steps
until that no longer shows."""
COORDINATE_CHECK_LEARNING_RATE = 0.002
"""Small enough that a few steps leave the activations stable; otherwise noise hides the
exponents."""
