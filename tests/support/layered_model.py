"""A small model with layers and random weights, with a tokenizer of single bytes, as a command
loads it."""

from pathlib import Path
from typing import Any

import numpy as np

from rungs.checkpointing.weights_file import WeightsHeader, write_weights
from rungs.data.text.tokenizer import TOKENIZER_FILE, train_bpe
from rungs.step.state import named_arrays
from tests.support.configs import ONE_FILE
from tests.support.tiny_model import random_model

BYTES = 257


def write_model(folder: Path, **changes: Any) -> Path:
    """Write the model to a new folder with config keys changed; return the folder."""
    model = random_model(**{"vocab_size": BYTES, "context_length": 64} | changes)
    weights = {name: np.asarray(array) for name, array in named_arrays(model).items()}
    folder.mkdir(parents=True)
    write_weights(folder, weights, WeightsHeader(model.config, None, "bytes"), ONE_FILE)
    train_bpe([], BYTES).save(folder / TOKENIZER_FILE)
    return folder
