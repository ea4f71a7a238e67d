"""Texts that go on: first spaces, halves of characters, tokens, and stop strings of all kinds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.text.tokenizer import train_tokenizer
from data.text.whitespace import with_whitespace
from decoding.bench.baselines import HuggingFace
from decoding.engine.detokenize import Detokenizer, text_after, token_bytes, token_text
from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Sampler
from tests.support import tiny
from tests.support.subsets import xlnet_tokenizer
from tests.support.tokenizers import llama2

LLAMA = llama2()
KINDS = {
    "strip": LLAMA,
    "metaspace": llama2(kind="metaspace"),
    "bytes": train_tokenizer(["def f(x):\n    return x\nParis 漢字"] * 9, 300),
    "whitespace": with_whitespace(xlnet_tokenizer()),
}
TEXTS = ["Paris and Rome", "def f(x):\n    return x", "\n\n  a  b", " ", "a"]


def whole(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


def without(tokenizer, ids):
    return [i for i in ids if i not in tokenizer.all_special_ids]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_wherever_a_text_is_cut_its_parts_are_the_whole(kind, text):
    tokenizer = KINDS[kind]
    ids = tokenizer(text).input_ids
    for cut in range(len(ids) + 1):
        before = whole(tokenizer, ids[:cut])
        if "\ufffd" in before:
            continue
        assert before + text_after(tokenizer, ids[:cut], ids[cut:]) == whole(tokenizer, ids)
        # In pieces of one token too.
        told = Detokenizer(tokenizer, ids[:cut])
        for i in ids[cut:]:
            told.extend([i])
        assert before + told.text == whole(tokenizer, ids)


@pytest.mark.parametrize("kind", ["strip", "metaspace", "whitespace"])
def test_a_part_decoded_as_a_whole_text_would_be_seen(kind):
    tokenizer = KINDS[kind]
    ids = tokenizer("Paris and Rome").input_ids
    cuts = range(1, len(ids))
    parts = (whole(tokenizer, ids[:cut]) + whole(tokenizer, ids[cut:]) for cut in cuts)
    assert any(text != whole(tokenizer, ids) for text in parts)


def test_special_tokens_alone_are_no_beginning():
    """The window before the answer has special tokens only: the text before them counts."""
    word = LLAMA("Paris", add_special_tokens=False).input_ids
    special = [LLAMA.convert_tokens_to_ids("<|im_end|>")] * 20
    assert text_after(LLAMA, [*word, *special], word) == " Paris"
    assert text_after(LLAMA, special, word) == "Paris"  # nothing comes before it


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_bytes_in_any_pieces_say_the_same(data):
    """Also where half of a character follows a whole one, which a run of byte tokens spoils."""
    letters = [*"a漢🙂é".encode(), 0xFF]
    ids = [LLAMA.convert_tokens_to_ids(f"<0x{b:02X}>") for b in letters]
    drawn = st.lists(st.lists(st.sampled_from(ids), max_size=9), max_size=8)
    pieces, before = data.draw(drawn), data.draw(st.lists(st.sampled_from(ids), max_size=12))
    said = b"".join(token_bytes(LLAMA, i) for i in before).decode(errors="replace")
    if said.endswith("\ufffd"):
        before = []
    text, all_ids, shown = Detokenizer(LLAMA, before), [], ""
    for piece in pieces:
        text.extend(piece)
        all_ids += piece
        assert text.text == b"".join(token_bytes(LLAMA, i) for i in all_ids).decode(
            errors="replace"
        )
        sure = text.text.rstrip("\ufffd")
        assert sure.startswith(shown) or shown.startswith(sure)  # what was shown stays
        shown = max(shown, sure, key=len)
    assert text_after(LLAMA, before, all_ids) == text.text


def test_the_tokenizer_spoils_a_run_of_bytes():
    """The negative control of the test above: a whole character is lost with half of the next."""
    ids = [LLAMA.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "漢字".encode()[:4]]
    assert whole(LLAMA, ids) == "\ufffd" * 4
    assert text_after(LLAMA, [], ids) == "漢\ufffd"


@pytest.mark.parametrize("kind", ["strip", "metaspace", "bytes"])
def test_the_bytes_of_tokens_are_the_text(kind):
    tokenizer = KINDS[kind]
    text = "Paris and\n    漢🙂" if kind != "metaspace" else "Paris and"
    ids = without(tokenizer, tokenizer(text).input_ids)
    said = b"".join(token_bytes(tokenizer, i) for i in ids).decode()
    assert said in (text, " " + text)  # with the space that the tokenizer puts first
    if kind == "strip":
        assert [token_bytes(tokenizer, i) for i in ids[-4:]] == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
        alone = "".join(tokenizer.decode([i]) for i in ids)  # as it was
        assert "\ufffd" in alone


def test_a_special_token_says_its_name():
    for tokenizer in (LLAMA, KINDS["metaspace"]):
        assert token_text(tokenizer, tokenizer.eos_token_id) == "</s>"
    assert token_text(KINDS["bytes"], 0) == "<eos>"


class Says(Sampler):
    """Says given tokens, some at a time."""

    def __init__(self, tokenizer, ids, size=1, eos=None):
        super().__init__(tiny.causal_lm(len(tokenizer), layers=1, eos_token_id=eos), tokenizer)
        self.ids, self.size = ids, size

    def begin(self, batch, params):
        self.prefill(batch, "target", self.cached_target(batch))
        self.said = 0

    def margin(self, params):
        return 16

    def cycle(self, batch, params):
        new = self.ids[self.said :][: self.size]
        self.said += len(new)
        return torch.tensor([new]), torch.tensor([len(new)])


def ids_of(text):
    return LLAMA(text, add_special_tokens=False).input_ids


USER = LLAMA.convert_tokens_to_ids(["<|im_end|>", *"user"])
ANSWER = [*ids_of("Paris\n"), *USER, *ids_of("and Rome")]
STOPS = [
    ((" Paris",), ""),
    (("<|im_end|>",), " Paris\n"),
    (("\n<|im_end|>",), " Paris"),
    (("x", "is\n<|im_end|>us"), " Par"),
    (("<|im_end|>user", "and"), " Paris\n"),
    (("er and", "<|im_start|>"), " Paris\nus"),
]


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize(("stop", "said"), STOPS)
def test_a_stop_string_matches_what_is_written(stop, said, size):
    """First spaces, special tokens, and both with text around them; the stream shows no more."""
    params = SamplingParams(max_new_tokens=len(ANSWER), stop=stop, ignore_eos=True)
    [result] = Says(LLAMA, ANSWER, size).generate(["def f"], params)
    assert (result.text, result.finish_reason) == (said, "stop")
    chunks = [*Says(LLAMA, ANSWER, size).stream(["def f"], params)]
    assert "".join(c.text for c in chunks) == said
    assert chunks[-1].result.token_ids == result.token_ids


@pytest.mark.parametrize(
    "stop", ["Paris<|im_end|>", "<|im_end|>x", "<|im_start|>", "\n<|im_end|>\n"]
)
def test_other_stop_strings_match_nothing(stop):
    params = SamplingParams(max_new_tokens=len(ANSWER), stop=(stop,), ignore_eos=True)
    chunks = [*Says(LLAMA, ANSWER, 3).stream(["def f"], params)]
    assert chunks[-1].result.finish_reason == "length"
    assert "".join(c.text for c in chunks) == text_after(LLAMA, ids_of("def f"), ANSWER)


def test_an_answer_keeps_its_indentation_after_the_prompt():
    """A program of HumanEval: its prompt ends with a line break, four spaces follow."""
    prompt, body = "def f(x):\n", "    return x"
    ids = LLAMA(prompt + body).input_ids
    cut = len(LLAMA(prompt).input_ids)
    assert ids[:cut] == LLAMA(prompt).input_ids
    params = SamplingParams(max_new_tokens=len(ids) - cut)
    [result] = Says(LLAMA, ids[cut:], 4).generate([prompt], params)
    assert prompt + result.text == prompt + body
    assert prompt + whole(LLAMA, ids[cut:]) == prompt + body[1:]  # three spaces, as it was


def test_transformers_own_answers_go_on_too():
    sampler = Says(LLAMA, [1])
    params = SamplingParams(max_new_tokens=6, temperature=0)
    [result] = HuggingFace(sampler).generate([ids_of("Paris")], params, seeds=[0])
    assert result.text == text_after(LLAMA, ids_of("Paris"), result.token_ids)
