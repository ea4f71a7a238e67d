"""What a reader of the stream sees: whole characters, no stop string, in the end the same text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.text.tokenizer import train_tokenizer
from decoding.engine.detokenize import Detokenizer
from decoding.engine.params import SamplingParams
from decoding.engine.sampler import Sampler
from decoding.samplers.deer import DeerSampler
from decoding.samplers.plain import PlainSampler
from tests.support import tiny

LETTERS = "ab é漢🙂👩\n"
TOKENIZER = train_tokenizer(["ab ab aba 🙂🙂 é漢 bé a🙂b\n"] * 20, 265)
EOS = TOKENIZER.eos_token_id
TARGET = tiny.causal_lm(len(TOKENIZER), layers=1, eos_token_id=EOS).float()


class Scripted(Sampler):
    """Commits given tokens in cycles of given sizes: every way that a text can arrive in."""

    def __init__(self, scripts, sizes):
        super().__init__(TARGET, TOKENIZER)
        self.scripts, self.sizes = scripts, sizes

    def margin(self, params):
        return 16

    def begin(self, batch, params):
        self.prefill(batch, "target", self.cached_target(batch))
        self.done, self.cycles = [0] * len(self.scripts), [0] * len(self.scripts)

    def cycle(self, batch, params):
        tokens, counts = torch.full((len(batch.requests), 8), EOS), []
        for b, row in enumerate(batch.requests):
            size = self.sizes[(row + self.cycles[row]) % len(self.sizes)]
            new = self.scripts[row][self.done[row] :][:size] or [EOS]
            self.done[row], self.cycles[row] = self.done[row] + len(new), self.cycles[row] + 1
            tokens[b, : len(new)] = torch.tensor(new)
            counts.append(len(new))
        return tokens, torch.tensor(counts)


def encode(text):
    return TOKENIZER(text)["input_ids"]


def read(sampler, params, rows=1):
    """The chunks and the result of every row; checks what holds for any stream."""
    chunks, results = [[] for _ in range(rows)], [None] * rows
    for chunk in sampler.stream([[1]] * rows, params):
        assert results[chunk.request] is None, "a chunk after the row's end"
        chunks[chunk.request].append(chunk)
        results[chunk.request] = chunk.result
    for parts, result in zip(chunks, results):
        assert "".join(c.text for c in parts) == result.text
        assert [t for c in parts for t in c.token_ids] == result.token_ids
        assert all(c.text for c in parts[:-1]), "an empty chunk"
    return chunks, results


def cut_by_hand(tokens, params):
    """(text, tokens, reason) of tokens that come one by one."""
    for n in range(1, params.max_new_tokens + 1):
        text = TOKENIZER.decode(tokens[:n], skip_special_tokens=True)
        at = [text.find(s) for s in params.stop if s in text]
        if at:
            return text[: min(at)], tokens[:n], "stop"
        if tokens[n - 1] == EOS:
            return text, tokens[:n], "eos"
    return text, tokens[:n], "length"


texts = st.text(LETTERS, max_size=14)
sizes = st.lists(st.integers(1, 6), min_size=1, max_size=4)
stops = st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=3).map(tuple)


@settings(deadline=None, max_examples=200)
@given(texts, sizes, stops, st.integers(1, 60))
def test_any_text_in_any_cycles(text, sizes, stop, most):
    tokens = [*encode(text), EOS]
    params = SamplingParams(max_new_tokens=most, stop=stop)
    [chunks], [result] = read(Scripted([tokens], sizes), params)
    assert (result.text, result.token_ids, result.finish_reason) == cut_by_hand(
        tokens + [EOS] * most, params
    )
    assert sum(result.stats.emitted) == len(result.token_ids)
    assert all("�" not in c.text for c in chunks[:-1])
    assert result.finish_reason == "length" or "�" not in result.text
    if result.finish_reason != "length":
        assert text.startswith(result.text)
    shown = ""
    for chunk in chunks:
        shown += chunk.text
        assert not any(s in shown for s in stop)


@settings(deadline=None, max_examples=30)
@given(st.lists(texts, min_size=2, max_size=4), sizes, stops)
def test_interleaved_rows_are_what_each_is_alone(texts, sizes, stop):
    scripts = [[*encode(t), EOS] for t in texts]
    params = SamplingParams(max_new_tokens=64, stop=stop)
    _, together = read(Scripted(scripts, sizes), params, rows=len(scripts))
    for script, result in zip(scripts, together):
        _, [alone] = read(Scripted([script], [1]), params)
        assert (result.text, result.token_ids) == (alone.text, alone.token_ids)
        assert result.finish_reason == alone.finish_reason


def shown(text, stop, size=1):
    [chunks], _ = read(Scripted([[*encode(text), EOS]], [size]), SamplingParams(stop=stop))
    return [c.text for c in chunks]


def test_a_character_waits_for_its_last_byte():
    """'語' is three tokens here: nothing is shown before the third."""
    assert len(encode("語")) == 3
    chunks, _ = read(Scripted([[*encode("語a"), EOS]], [1]), SamplingParams())
    assert [c.text for c in chunks[0]] == ["語", "a", ""]
    assert [len(c.token_ids) for c in chunks[0]] == [3, 1, 1]


def test_a_stop_string_is_held_back_until_it_is_decided():
    assert encode("b\n") == [*encode("b"), *encode("\n")]
    assert shown("é\nb\n\nb", ("\n\n",)) == ["é", "\nb", ""]
    # Not completed: what was held back comes with the end.
    assert "".join(shown("é\n", ("\n\n",))) == "é\n"


def test_the_text_does_not_depend_on_how_tokens_arrive():
    """'bc' ends the text, though one cycle also brings the 'd' that completes 'abcd'."""
    for size in (1, 2, 4, 6):
        assert "".join(shown("abcd", ("abcd", "bc"), size)) == "a"


def test_a_stop_that_is_completed_after_the_eos_does_not_count():
    tokens = [*encode("a"), EOS, *encode("b")]
    _, [result] = read(Scripted([tokens], [4]), SamplingParams(stop=("ab",)))
    assert (result.text, result.finish_reason) == ("a", "eos")


def test_eos_and_stop_at_the_very_last_token_allowed():
    tokens = [*encode("a\nb"), EOS]
    n = len(tokens)
    for size in (1, 3, 8):
        _, [result] = read(Scripted([tokens], [size]), SamplingParams(max_new_tokens=n))
        assert (result.finish_reason, result.token_ids) == ("eos", tokens)
        _, [result] = read(Scripted([tokens], [size]), SamplingParams(max_new_tokens=n - 1))
        assert (result.finish_reason, result.token_ids) == ("length", tokens[:-1])
        params = SamplingParams(max_new_tokens=n - 1, stop=("b",))
        _, [result] = read(Scripted([tokens], [size]), params)
        assert (result.finish_reason, result.text) == ("stop", "a\n")


def test_ignore_eos_goes_on_to_the_limit():
    params = SamplingParams(max_new_tokens=7, ignore_eos=True)
    _, [result] = read(Scripted([[*encode("a"), EOS, *encode("b")]], [3]), params)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 7)
    assert result.text == "ab"  # special tokens are not text


def real_samplers():
    drafter = tiny.causal_lm(len(TOKENIZER) + 2, seed=1, layers=1).float()
    n = len(TOKENIZER)
    return [
        PlainSampler(TARGET, TOKENIZER),
        DeerSampler(TARGET, TOKENIZER, drafter, block_size=4, mask_id=n, sep_id=n + 1),
    ]


@pytest.mark.parametrize("stop", [(), ("a", " ")])
def test_real_samplers_stream_what_they_generate(stop):
    """Random bytes of a random model: half characters galore."""
    prompts = ["ab", "🙂", "a\n漢", "é"]
    params = SamplingParams(max_new_tokens=48, seed=3, stop=stop)
    texts = []
    for sampler in real_samplers():
        results = sampler.generate(prompts, params)
        streamed = ["", "", "", ""]
        for chunk in sampler.stream(prompts, params):
            streamed[chunk.request] += chunk.text
        assert streamed == [r.text for r in results]
        assert not any(s in r.text for s in stop for r in results)
        texts.append(streamed)
    assert texts[0] == texts[1]
    assert any(texts[0])


def two_streams():
    sampler = PlainSampler(TARGET, TOKENIZER)
    params = SamplingParams(max_new_tokens=8, seed=3, ignore_eos=True)
    return sampler, params, sampler.stream([[1]], params), sampler.stream([[2]], params)


class TestModes:
    """Nothing of torch's thread-wide modes is left changed between two chunks."""

    def test_two_streams_take_turns_and_close_in_any_order(self):
        sampler, params, first, second = two_streams()
        next(first), next(second), next(first)
        assert not torch.is_inference_mode_enabled()
        first.close()  # the older one first
        rest = [chunk.text for chunk in second]
        assert not torch.is_inference_mode_enabled()
        (whole,) = sampler.generate([[2]], params)
        assert whole.text.endswith("".join(rest))

    def test_a_reader_may_train(self):
        layer = torch.nn.Linear(2, 1)
        _, _, stream, other = two_streams()
        for _ in stream:
            layer(torch.ones(1, 2)).sum().backward()
        assert layer.weight.grad is not None
        other.close()

    def test_a_mode_across_a_yield_would_be_seen(self):
        """What this is held against: the mode that a generator enters is the reader's, too."""

        def stream():
            with torch.inference_mode():
                yield 1
                yield 2

        reading = stream()
        next(reading)
        assert torch.is_inference_mode_enabled()
        reading.close()
        assert not torch.is_inference_mode_enabled()


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self):
        self.decoded = 0

    def decode(self, ids, **options):
        self.decoded += len(ids)
        return TOKENIZER.decode(ids, **options)


class TestDetokenizer:
    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=9), max_size=12))
    def test_pieces_say_what_the_whole_says(self, pieces):
        """Any bytes in any pieces: half characters, special tokens, nothing."""
        text, ids = Detokenizer(TOKENIZER), []
        for piece in pieces:
            before, kept = text.text, text.extend(piece)
            ids += piece
            assert text.text == TOKENIZER.decode(ids, skip_special_tokens=True)
            assert text.text[:kept] == before[:kept]

    def test_it_costs_a_few_tokens_each(self):
        tokenizer, n = Counting(), 2000
        text = Detokenizer(tokenizer)
        for token in TOKENIZER("ab é漢" * n)["input_ids"][:n]:
            text.extend([token])
        assert tokenizer.decoded < 30 * n

    def test_whole_texts_would_be_seen(self):
        tokenizer, ids = Counting(), []
        for token in TOKENIZER("ab" * 2000)["input_ids"][:500]:
            ids.append(token)
            tokenizer.decode(ids)
        assert tokenizer.decoded > 30 * 500


def test_logits_that_are_no_numbers_are_an_error():
    broken = tiny.causal_lm(len(TOKENIZER), layers=1, eos_token_id=EOS).float()
    params = SamplingParams(max_new_tokens=4, temperature=0)
    PlainSampler(broken, TOKENIZER).generate([[1, 2]], params)
    with torch.no_grad():
        broken.model.norm.weight[0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        PlainSampler(broken, TOKENIZER).generate([[1, 2]], params)
