"""Whitespace as tokens: every text of known characters comes back, before and after saving."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from data.text.tokenizer import fingerprint, train_tokenizer
from data.text.whitespace import WHITESPACE, with_whitespace
from tests.support import subsets

PLAIN = subsets.xlnet_tokenizer()
MAPPED = with_whitespace(PLAIN)
TEXTS = st.text(" \n\tadefrtu'\"<>():", max_size=30) | st.lists(
    st.sampled_from(["\n", "\t", " ", "  ", "   ", "    ", "def", "''", "<cls>", "<unk>"]),
    max_size=12,
).map("".join)


def ids(text, tokenizer=MAPPED):
    return tokenizer(text)["input_ids"]


@settings(deadline=None, max_examples=300)
@given(TEXTS)
def test_a_text_comes_back(text):
    assert MAPPED.decode(ids(text)) == text
    assert MAPPED.decode(ids(text), skip_special_tokens=True) == text


@settings(deadline=None, max_examples=50)
@given(TEXTS)
def test_a_beginning_of_the_tokens_is_a_beginning_of_the_text(text):
    for n in range(len(ids(text))):
        assert text.startswith(MAPPED.decode(ids(text)[:n]))


def test_without_the_mapping_whitespace_is_lost():
    """Negative control."""
    assert PLAIN.decode(ids("def f:\n    a", PLAIN), skip_special_tokens=True) == "def f: a"


def test_tokens_by_hand():
    tokens = MAPPED.convert_ids_to_tokens(ids("def f:\n    return a\n\tu"))
    body = ["▁def", "▁f", ":", "\n", "   ", "▁", "▁return", "▁a", "\n", "\t", "▁u"]
    assert tokens == body
    assert MAPPED.convert_ids_to_tokens(ids("\n a \n")) == ["\n", "▁", "▁a", "▁", "\n"]


def test_whitespace_takes_the_special_tokens_ids():
    for text, token in WHITESPACE.items():
        assert ids(text) == [PLAIN.convert_tokens_to_ids(token)]
    words = "def return a"
    assert ids(words) == PLAIN(words, add_special_tokens=False)["input_ids"]
    assert len(MAPPED) == len(PLAIN)


def test_eos_and_mask_keep_their_ids():
    assert MAPPED.eos_token_id == PLAIN.eos_token_id
    assert MAPPED.mask_token_id == PLAIN.mask_token_id
    assert MAPPED.decode([MAPPED.eos_token_id], skip_special_tokens=True) == ""


def test_an_export_carries_it(tmp_path):
    MAPPED.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(a):\n    return ''\n"
    assert ids(text, loaded) == ids(text)
    assert loaded.decode(ids(text)) == text
    assert fingerprint(loaded) == fingerprint(MAPPED) != fingerprint(PLAIN)


def test_a_tokenizer_without_these_tokens_is_refused():
    with pytest.raises(ValueError, match="<cls>, <pad>, <sep>, <unk>") as error:
        with_whitespace(train_tokenizer(["ab"], 260))
    assert "\n" not in str(error.value)
