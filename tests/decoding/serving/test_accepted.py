"""Which text of an answer is said to be accepted drafts, however passes and pieces lie."""

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from decoding.engine.answer import Answer
from decoding.engine.params import SamplingParams, Stats
from decoding.samplers.plain import PlainSampler
from decoding.serving.accepted import AcceptedText
from tests.support import tiny


@pytest.fixture(scope="module")
def sampler():
    """One whose tokens are bytes; its network never runs."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    sampler = PlainSampler(tiny.causal_lm(len(alphabet)), tokenizer)
    sampler.eos = frozenset(tokenizer("$")["input_ids"])
    return sampler


def told(sampler, sizes, text, pieces_are_passes=False, **params):
    """(text, what is said to be accepted drafts) of each piece of an answer.

    Args:
        sampler: Makes the pieces.
        sizes: Tokens of each pass.
        text: What the passes say.
        pieces_are_passes: A wrong rule: a piece has one pass.
        params: Of the request.
    """
    ids, sizes = sampler.tokenizer(text)["input_ids"], iter(sizes)
    answer = Answer(0, [], SamplingParams(**params), sampler.tokenizer)
    accepted, lengths, chunk = AcceptedText(sampler.tokenizer), [], None
    while ids and (chunk is None or chunk.result is None):
        size = next(sizes)
        chunk, ids = sampler.commit(answer, ids[:size], text=True), ids[size:]
        if chunk is None:
            continue
        lengths.append(len(chunk.token_ids))
        wrong = Stats(emitted=lengths, beyond=answer.stats.beyond)
        yield chunk.text, accepted.of(chunk, wrong if pieces_are_passes else answer.stats)


def marked(*given, **more):
    """The pieces of an answer, with brackets around what is said to be accepted drafts."""
    pieces = []
    for text, accepted in told(*given, **more):
        piece, at = "", 0
        for start, end in accepted.parts:
            piece += f"{text[at:start]}[{text[start:end]}]"
            at = end
        pieces.append(piece + text[at:])
    return pieces


@pytest.mark.parametrize(
    ("sizes", "text", "params", "pieces"),
    [
        ([3, 1, 2], "abcdef", {}, ["[ab]c", "d", "[e]f"]),
        ([1, 1, 1], "abc", {}, ["a", "b", "c"]),
        # What may begin a stop string is shown later, or never.
        ([2, 3], "abcde", {"stop": ("bcx",)}, ["[a]", "b[cd]e"]),
        ([3, 1], "abcd", {"stop": ("bcx",)}, ["[a]", "[b]cd"]),
        ([2, 1, 2], "abcde", {"stop": ("bcx",)}, ["[a]", "bc[d]e"]),
        ([2, 2], "abcd", {"stop": ("bc",)}, ["[a]", ""]),
        # Where the answer's end cuts a pass, all that is left of it was drafted.
        ([5], "abcde", {"stop": ("d",)}, ["[abc]"]),
        ([2, 4], "abcdef", {"max_new_tokens": 4}, ["[a]b", "[cd]"]),
        ([2, 2], "abcd", {"max_new_tokens": 4}, ["[a]b", "[c]d"]),
        ([4], "ab$c", {}, ["[ab$]"]),
        ([3], "ab$", {}, ["[ab]$"]),
        # Characters of two and three tokens, which passes cut.
        ([3, 3], "éaéb", {}, ["[é]a", "[é]b"]),
        ([2, 2, 2], "aébcd", {}, ["[a]", "[é]b", "[c]d"]),
        ([2, 1, 3], "aébcd", {}, ["[a]", "é", "[bc]d"]),
        ([2, 1, 2], "€ab", {}, ["€", "[a]b"]),
    ],
)
def test_all_tokens_of_a_pass_but_its_last_are_accepted(sampler, sizes, text, params, pieces):
    assert marked(sampler, sizes, text, **params) == pieces


def test_pieces_taken_for_passes_fail_the_same_test(sampler):
    given = sampler, [2, 1, 2], "abcde"
    assert marked(*given, pieces_are_passes=True, stop=("bcx",)) == ["[a]", "b[cd]e"]


@pytest.mark.parametrize(
    ("sizes", "text", "params", "counts"),
    [
        ([3, 1, 2], "abcdef", {}, [[2], [0], [1]]),
        ([2, 3], "abcde", {"stop": ("bcx",)}, [[1], [2]]),
        ([2, 1, 2], "abcde", {"stop": ("bcx",)}, [[1], [0, 1]]),  # the second pass shows nothing
        ([2, 1, 2], "€ab", {}, [[1, 0], [1]]),  # nor does the first
        ([1, 1, 1], "€", {}, [[0, 0, 0]]),
        # Where the answer's end cuts a pass, all that is left of it was drafted.
        ([2, 4], "abcdef", {"max_new_tokens": 4}, [[1], [2]]),
        ([4], "ab$c", {}, [[3]]),
        ([3], "ab$", {}, [[2]]),
    ],
)
def test_a_piece_says_how_many_drafts_each_of_its_passes_accepted(
    sampler, sizes, text, params, counts
):
    assert [accepted.counts for _, accepted in told(sampler, sizes, text, **params)] == counts
