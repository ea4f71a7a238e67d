"""Shared by the tests of data/: one tiny tokenizer, and the standard library read once."""

import pytest

from data.corpora.stdlib import stdlib_documents
from data.text.tokenizer import train_tokenizer
from tests.support.tokenizers import CHATML

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "for index in range(10):\n    print(index, 'hello world')\n",
]


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=300)


@pytest.fixture
def chat_tokenizer():
    """ChatML turns: the header and the end of a turn are special tokens."""
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def heldout_library():
    return stdlib_documents("heldout")
