"""Defaults and choices of the commands' options. Imports no libraries, so that `--help` is fast."""

from typing import Literal

DATASETS_VARIABLE = "RUNGS_DATASETS_DIR"
"""Environment variable that sets the datasets folder."""

ChartStyle = Literal["plain", "hand-drawn"]
GGUFDtype = Literal["f16", "bf16", "q8_0", "f32"]
"""Dtypes of the matrices in a GGUF file."""

CHAT_TEMPLATES = "gemma, llama3, chatml"
"""The built-in chat templates: files in `rungs/data/text/chat_templates/`."""
MAX_RESTARTS = 10
"""Crashes without a new checkpoint in between after which --supervise gives up."""

NEW_TOKENS, NEW_TOKENS_OF_A_CHAT = 64, 512
"""Most new tokens that `generate.py` adds to a text, and to an answer in a chat."""

LEAST_SCALE, MOST_SCALE = 1e-6, 1e6
"""Range of temperature and repetition penalty. Beyond it, float32 logits divided by them overflow
or become equal."""

VOCAB_SIZE = 4096
"""Vocabulary size of a tokenizer trained on a dataset's text."""
LARGEST_VOCAB = 2**24
"""Largest vocabulary to train; the library that trains it allocates all of it at once."""
TOKEN_DTYPES = ("uint16", "uint32", "uint64", "int32", "int64")
"""Types of token ids in files that don't say theirs."""
UNTRAINED_LENGTH = 1024
"""Longest sequence in tokens for imported weights, which have no train.json to take it from."""
VALIDATION_PERCENT = 5
"""Percentage of text for validation."""
DOCUMENTS_VALIDATION_PERCENT = 1.0
"""Percentage of documents for validation; files of documents are larger."""

LADDER_RUNGS = 5
"""Runs that `plan.py --ladder` proposes."""
UTILIZATION_PERCENT = 40.0
"""Assumed percentage of the devices' peak FLOP/s if nothing was measured."""

MOST_DEVICES = 2**20
"""Largest number of devices along a mesh axis that `model.py` shows."""

COORDINATE_CHECK_STEPS = 5
COORDINATE_CHECK_SEEDS = 3
"""The initial weights of a single seed change the exponents by up to 0.2."""
COORDINATE_CHECK_LEARNING_RATE = 0.002
"""Small enough to keep activations stable over a few steps; otherwise noise hides the exponents."""
