from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.data.data_helpers import texts
from trainer.data.learn_tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real tokenizer of 320 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(texts(400)), 320, folder)
    return folder
