"""Every command ends an answer where the model's files, its tokenizer or its template say so."""

import pytest

from decoding import SamplingParams, load
from decoding.collectors.teachers import end_ids
from decoding.harness import ParadeLM
from decoding.loading import load_tokenizer
from decoding.samplers.plain import PlainSampler
from decoding.serving.scheduler import Scheduler
from tests.support import tiny
from tests.support.tokenizers import CHATML, llama2

NAMES = ("<|im_start|>", "</s>", "<|im_end|>")  # of the configuration, tokenizer and template


def write(folder, after=""):
    """Write a model whose files name three ends."""
    tokenizer = llama2(after=after)
    tokenizer.chat_template = CHATML
    model = tiny.causal_lm(len(tokenizer), layers=1, eos_token_id=None).float()
    ids = tokenizer.convert_tokens_to_ids([*NAMES])
    model.config.eos_token_id = model.generation_config.eos_token_id = ids[0]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer, ids


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "m")


def test_the_ends_of_all_files_are_ends(folder, tmp_path):
    _, ids = write(folder)
    assert load(folder).eos == {*ids}
    assert end_ids(folder, load_tokenizer(folder)) == sorted(ids)  # of other engines
    assert PlainSampler(load(folder).target, load_tokenizer(folder)).eos == {*ids}
    # Without generation_config.json, config.json says it.
    (tmp_path / "m" / "generation_config.json").unlink()
    assert load(folder).eos == {*ids} == {*end_ids(folder, load_tokenizer(folder))}


@pytest.mark.parametrize("name", NAMES)
def test_each_of_them_ends_a_teacher_s_answer(folder, name):
    tokenizer, _ = write(folder)
    sampler = load(folder)
    end = tokenizer.convert_tokens_to_ids(name)

    def forward(*args, real=sampler.target.forward, **kwargs):
        output = real(*args, **kwargs)
        output.logits[..., end] = 99  # the best one at every position
        return output

    sampler.target.forward = forward
    [result] = sampler.generate(["def"], SamplingParams(max_new_tokens=5, temperature=0))
    assert (result.finish_reason, result.token_ids, result.text) == ("eos", [end], "")
    ignored = SamplingParams(max_new_tokens=5, temperature=0, ignore_eos=True)
    assert len(sampler.generate(["def"], ignored)[0].token_ids) == 5


def test_all_commands_ask_for_a_prompt_s_ids_in_one_place(folder):
    """A tokenizer that ends every text puts no end between prompt and answer."""
    tokenizer, _ = write(folder, after=" </s>")
    assert tokenizer("Paris").input_ids[-1] == tokenizer.eos_token_id  # as it was
    sampler = load(folder)
    ids = sampler.encode("Paris", SamplingParams())
    assert ids == [tokenizer.bos_token_id, *tokenizer("Paris", add_special_tokens=False).input_ids]
    assert ParadeLM(sampler).tok_encode("Paris") == ids
    scheduler = Scheduler({"m": sampler}, at_once=1, waiting=1, longest=64)
    try:
        assert scheduler.prepared("m", "Paris", SamplingParams(max_new_tokens=2))[0] == ids
    finally:
        scheduler.close()
