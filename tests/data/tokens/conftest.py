"""Fixtures of the tests of batches."""

import pytest

from rungs.data.tokens.dataset import Dataset
from tests.support.token_datasets import small_datasets


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """Text "x", "y" and "z", and pairs "p"."""
    return small_datasets(tmp_path_factory.mktemp("datasets"))
