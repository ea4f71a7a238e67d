"""`generate` of transformers with a drafter: the same arguments and output distribution."""

import functools
import os
from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, TopKLogitsWarper
from transformers.generation.streamers import BaseStreamer

from decoding import custom_generate
from decoding.engine.params import SamplingParams
from decoding.engine.warp import preceding, warp
from decoding.samplers import deer
from decoding.samplers.plain import PlainSampler
from tests.support import tiny
from tests.support.drafters import PROMPTS, V, padded, target, write_drafter

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 6, "top_p": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_drafter(tmp_path_factory.mktemp("drafter") / "export", target()))


@pytest.fixture(scope="module")
def drafted(folder):
    """As `model.generate`, but with the drafter."""
    return functools.partial(custom_generate.generate, deer.METHOD, drafter=folder)


def plain(model, **values):
    """Token ids of parade's plain sampler."""
    sampler = PlainSampler(model, tiny.tokenizer(V))
    return [r.token_ids for r in sampler.generate(PROMPTS, SamplingParams(**values))]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"eos_token_id": [4, 9], "pad_token_id": 7},
        {"eos_token_id": 9, "repetition_penalty": 1.4},
        {"max_length": 11, "max_new_tokens": None},
    ],
)
def test_greedy_is_generate_itself(drafted, arguments):
    model, arguments = target(), {"max_new_tokens": 16, "do_sample": False} | arguments
    expected = model.generate(**padded(), **arguments)
    assert torch.equal(drafted(model, **padded(), **arguments), expected)
    assert len(set(expected[0].tolist())) > 3


def test_sampling_is_the_plain_sampler_with_that_seed(drafted):
    model = target(eos_token_id=10)
    out = drafted(model, **padded(), **SAMPLED, max_new_tokens=16, seed=5)
    expected = plain(
        model, max_new_tokens=16, seed=5, **{k: v for k, v in SAMPLED.items() if k != "do_sample"}
    )
    width = max(map(len, expected))
    start = max(map(len, PROMPTS))
    assert len({len(answer) for answer in expected}) > 1
    assert out[:, start:].tolist() == [a + [10] * (width - len(a)) for a in expected]
    other = drafted(model, **padded(), **SAMPLED, max_new_tokens=16, seed=9)
    assert other.tolist() != out.tolist()


def test_torchs_seed_repeats_a_call(drafted):
    call = functools.partial(drafted, target(), **padded(), do_sample=True, max_new_tokens=12)
    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert torch.equal(call(), first)
    assert not torch.equal(first, second)


def test_greedy_leaves_torchs_generator_alone(drafted):
    model, state = target(), torch.get_rng_state()
    drafted(model, **padded(), max_new_tokens=2)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_targets_own_defaults_count(drafted):
    model = target()
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3)
    out = drafted(model, **padded(), max_new_tokens=8, seed=2)
    start = max(map(len, PROMPTS))
    answers = plain(model, max_new_tokens=8, seed=2, temperature=0.5, top_k=3)
    assert out[:, start:].tolist() == answers


class Asked:
    """A stub of a sampler: records what it is asked for."""

    def __init__(self, target, tokenizer, drafter, **arguments):
        pass

    def stream(self, prompts, params, text):
        self.params = params
        raise StopAsking(params)
        yield


class StopAsking(Exception):
    pass


@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_k": 4},
        {"do_sample": True, "top_p": 0.7, "min_p": 0.1, "top_k": 0},
        {"do_sample": True, "temperature": 1.3, "repetition_penalty": 1.5, "top_p": 0.8},
        {"do_sample": True, "temperature": 0.7, "renormalize_logits": True},
    ],
)
def test_the_law_asked_for_is_that_of_transformers_own_processors(folder, arguments):
    model, ids, prepared = target(), torch.tensor([PROMPTS[0]]), {}

    def peek(model, input_ids, logits_processor, **rest):
        prepared["processors"] = logits_processor
        return input_ids

    model.generate(ids, custom_generate=peek, max_new_tokens=2, **arguments)
    with pytest.raises(StopAsking) as asked:
        custom_generate.generate(
            replace(deer.METHOD, sampler=Asked),
            model,
            drafter=folder,
            inputs=ids,
            max_new_tokens=2,
            **arguments,
        )
    torch.manual_seed(0)
    logits = 3 * torch.randn(1, V)
    expected = prepared["processors"](ids, logits.clone()).softmax(-1)
    params, sizes = asked.value.args[0], torch.tensor([[0], [ids.shape[1]]])
    known = preceding(params, ids, *sizes, ids[:, :0], V)
    found = warp(logits[:, None], params, known).softmax(-1)[0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert (found == 0).equal(expected == 0)


def test_num_return_sequences_has_a_seed_each(drafted):
    out = drafted(
        target(), inputs=torch.tensor([[3, 1]]), do_sample=True, max_new_tokens=8,
        num_return_sequences=3, seed=1,
    )  # fmt: skip
    assert out.shape == (3, 10)
    assert len({tuple(row) for row in out.tolist()}) == 3


class Collect(BaseStreamer):
    def __init__(self):
        self.seen, self.ended = [], False

    def put(self, value):
        self.seen += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_the_prompt_and_every_token(drafted):
    streamer = Collect()
    out = drafted(target(), inputs=torch.tensor([[3, 1]]), max_new_tokens=9, streamer=streamer)
    assert streamer.seen == out[0].tolist()
    assert streamer.ended


def test_drafts_are_accepted_and_the_drafter_is_loaded_once(drafted, folder, monkeypatch):
    model, loads, passes = target(), [], []
    load = custom_generate.causal.load
    monkeypatch.setattr(
        custom_generate.causal, "load", lambda *a, **k: loads.append(a) or load(*a, **k)
    )
    model.register_forward_hook(lambda *_: passes.append(1))
    for _ in range(2):
        drafted(model, **padded(), max_new_tokens=12)
    assert len(loads) == 1
    assert len(passes) < 2 * 12  # of plain decoding: drafts were accepted
    config = os.path.join(folder, "config.json")
    os.utime(config, ns=(1, os.stat(config).st_mtime_ns + 1))
    drafted(model, **padded(), max_new_tokens=1)
    assert len(loads) == 2  # trained again: not the old weights


@pytest.mark.parametrize("training", [True, False])
def test_the_targets_mode_stays(drafted, training):
    model = target().train(training)
    drafted(model, **padded(), max_new_tokens=2)
    assert model.training is training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "beam search is not supported"),
        ({"logits_processor": LogitsProcessorList([TopKLogitsWarper(3)])}, "logits_processor is"),
        ({"stopping_criteria": [lambda ids, scores: True]}, "stopping_criteria is not"),
        ({"prefix_allowed_tokens_fn": lambda row, ids: [1]}, "prefix_allowed_tokens_fn is not"),
        ({"assistant_model": "a model"}, "assistant_model is not supported"),
        ({"prompt_lookup_num_tokens": 2}, "assisted generation is not"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate is not"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor is not"),
        ({"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper is not"),
        ({"min_new_tokens": 2, "eos_token_id": 4}, "MinLengthLogitsProcessor is not"),
        ({"bad_words_ids": [[3]]}, "NoBadWordsLogitsProcessor is not"),
        ({"max_time": 1.0}, "MaxTimeCriteria is not supported"),
        ({"stop_strings": ["x"]}, "stop_strings is not supported"),
        ({"past_key_values": object()}, "past_key_values is not supported"),
        ({"synced_gpus": True}, "synced_gpus is not supported"),
        ({"streamer": Collect()}, "a streamer with more than one row is not"),
        ({"do_sample": True, "temperature": 0.0}, "strictly positive"),
        ({"max_new_tokens": 600}, "more than the target's context of 512"),
        ({"temprature": 1}, "temprature"),
        ({"verify": "hope"}, "verify='hope' is not allowed"),
        ({"drafter": "nowhere/at/all"}, "there is no such folder"),
    ],
)
def test_what_cannot_be_kept_is_refused(drafted, arguments, message):
    with pytest.raises(ValueError) as error:
        drafted(target(), **padded(), **({"max_new_tokens": 4} | arguments))
    assert message in str(error.value)


def test_empty_lists_ask_for_nothing(drafted):
    nothing = {"logits_processor": LogitsProcessorList(), "stopping_criteria": []}
    out = drafted(target(), **padded(), max_new_tokens=4, synced_gpus=False, **nothing)
    assert torch.equal(out, target().generate(**padded(), max_new_tokens=4))


def test_a_drafter_must_be_named():
    with pytest.raises(ValueError, match="which drafter"):
        custom_generate.generate(deer.METHOD, target(), **padded())


def test_a_drafter_is_no_target(drafted, folder):
    drafter = custom_generate.causal.load(folder)
    with pytest.raises(ValueError, match=r"load its target 'org/target'"):
        drafted(drafter, **padded(), max_new_tokens=4)


def test_a_plain_model_is_no_drafter(tmp_path):
    target().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="names no target"):
        custom_generate.generate(
            deer.METHOD, target(), drafter=str(tmp_path), **padded(), max_new_tokens=4
        )


def test_another_vocabulary_is_refused(drafted):
    with pytest.raises(ValueError, match=r"14 tokens, the target 2000.*'org/target'"):
        drafted(tiny.causal_lm(2000).float(), **padded(), max_new_tokens=4)


def test_attention_that_takes_no_boolean_mask_is_refused(drafted):
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        drafted(target(attn_implementation="eager"), **padded(), max_new_tokens=4)


@pytest.mark.parametrize("full", [0, 1])
def test_a_text_goes_on_past_a_sliding_window(drafted, full):
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": full}
    model = tiny.causal_lm(V, kind="qwen2", scale=4.0, **window).float()
    expected = model.generate(**padded(), max_length=24, do_sample=False)
    assert torch.equal(drafted(model, **padded(), max_length=24, do_sample=False), expected)
    model.config.sliding_window = 5  # the control: our masks are of the config's window
    assert not torch.equal(drafted(model, **padded(), max_length=24, do_sample=False), expected)


def test_a_length_that_transformers_assumes_is_cut_at_the_context(drafted):
    model = target()
    free = model.generate(**padded(), do_sample=False)  # of 20 tokens
    assert torch.equal(drafted(model, **padded(), do_sample=False), free)
    width = padded()["input_ids"].shape[1]
    model.config.max_position_embeddings = context = width + 5
    cut = model.generate(**padded(), do_sample=False)
    assert cut.shape[1] == context
    assert torch.equal(drafted(model, **padded(), do_sample=False), cut)
    for given in ({"max_new_tokens": 20}, {"max_length": width + 20}):
        with pytest.raises(ValueError, match="together more than the target's context"):
            drafted(model, **padded(), do_sample=False, **given)
    # Of other limits of a text transformers knows nothing.
    model.config.max_position_embeddings, model.config.max_sequence_length = 512, context
    found = drafted(model, **padded(), do_sample=False)
    for row, whole, prompt in zip(found, free, PROMPTS):
        kept = slice(width, width + context - len(prompt))
        assert torch.equal(row[kept], whole[kept])
    with pytest.raises(ValueError, match="no room for an answer"):
        drafted(model, inputs=torch.ones(1, context, dtype=torch.long), do_sample=False)
