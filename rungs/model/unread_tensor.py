"""A parameter that is read from where it is stored while it is converted, part by part, so that it
is never in memory as a whole in the form in which it is stored."""

import abc

import numpy as np


class UnreadTensor(abc.ABC):
    """What a parameter can hold in place of its array, for generation only."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @abc.abstractmethod
    def read(self, *part: slice) -> np.ndarray:
        """Return it, or a part of its first axes."""
