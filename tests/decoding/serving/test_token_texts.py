"""Scores name tokens by their bytes: first spaces, parts of characters, offsets in the text."""

import pytest

from decoding.engine.detokenize import text_after
from decoding.engine.likelihood import TokenScore
from decoding.engine.params import Result, Stats
from decoding.serving.chats import Chat
from decoding.serving.protocol import Completion
from tests.support.tokenizers import llama2

LLAMA = llama2()
TEXT = "Paris and\n    漢x Rome"


def asked(kind, **fields):
    given = {"messages": [{"role": "user", "content": "a"}]} if kind is Chat else {"prompt": "def"}
    return kind(**given, **fields)


def scored(request, echo=False):
    prompt = LLAMA("def").input_ids
    ids = LLAMA(TEXT, add_special_tokens=False).input_ids
    scores = [TokenScore(-1.0, [(i, -1.0), (ids[0], -2.0)]) for i in (prompt + ids)[1:]]
    text = text_after(LLAMA, prompt, ids)
    found = request.answer_scores(prompt, Result(text, ids, "eos", Stats()), scores, LLAMA)
    return ids, text, found


def test_the_bytes_of_a_chat_s_tokens_are_the_answer():
    _, text, found = scored(asked(Chat, logprobs=True, top_logprobs=2))
    tokens = found["content"]
    assert text == " " + TEXT
    assert bytes(b for t in tokens for b in t["bytes"]).decode() == text
    assert tokens[0]["token"] == tokens[0]["top_logprobs"][0]["token"] == " Paris"
    halves = [t["bytes"] for t in tokens if t["token"] == "\ufffd"]
    assert halves == [[b] for b in "漢".encode()]
    assert halves[0] != [*"\ufffd".encode()]  # as it was


@pytest.mark.parametrize("echo", [False, True])
def test_a_completion_s_tokens_lie_at_their_offsets(echo):
    ids, text, found = scored(asked(Completion, logprobs=2, echo=echo))
    text, start = ("def" + text, len(LLAMA("def").input_ids)) if echo else (text, 0)
    assert len(found["tokens"]) == len(ids) + start
    for token, at in zip(found["tokens"], found["text_offset"]):
        if token == "\ufffd":  # a character lies where its first token does
            assert "漢" in text[at - 1 : at + 1]
        elif token != "<s>" and at:  # the prompt's first token has lost its space
            assert text.startswith(token, at)
    best = found["top_logprobs"]
    assert all(token in at for token, at in zip(found["tokens"], best) if at)
    alone = [LLAMA.decode([i]) for i in ids]  # as it was
    assert " Paris" not in alone
    assert alone.count("\ufffd") == 3
