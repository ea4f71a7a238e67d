"""scale=small: the one key target= makes a drafter for tiny random models of several classes."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
)

from data.text.tokenizer import train_tokenizer
from decoding.collect import collect
from decoding.engine.params import SamplingParams
from decoding.loading import load
from recipes.compose import compose
from tests.support import tiny
from tests.support.files import write_jsonl
from tests.support.lab import BLOCKS, SMALL, TEMPLATE
from tests.support.results import as_plain
from trainers.fit import fit

TEXTS = [f"def f{i}(x):\n    return x + {i}\n" for i in range(200)]
GEMMAS = {"gemma": (GemmaConfig, GemmaForCausalLM), "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM)}

SHORT = ["data.train.length=64", "data.validation.length=64"]


def sources(file):
    return [f"data.{split}.source={file}" for split in ("train", "validation")]


def gemma(kind, vocabulary):
    """A Gemma-style model: scaled and tied embeddings, and sliding windows in the third version."""
    configuration, network = GEMMAS[kind]
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return network(configuration(vocab_size=vocabulary, eos_token_id=0, **sizes, **heads))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"id": f"p{i}", "prompt": f"write f{i}", "answer": text} for i, text in enumerate(TEXTS)
    ]
    write_jsonl(file, rows)
    return file


OWN = [(kind, "separator") for kind in ("qwen2", "qwen3", *GEMMAS)] + [("llama", "pard")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), OWN)
def test_a_target_of_one_s_own_is_one_key(kind, layout, pairs, tmp_path):
    target = tmp_path / "target"
    make = gemma if kind in GEMMAS else lambda kind, v: tiny.causal_lm(v, kind=kind, layers=8)
    size = 304 if layout == "separator" else 300
    make(kind, size).float().save_pretrained(target)
    train_tokenizer(TEXTS, 300).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    if kind != "qwen2":  # which has no template: prompts are asked as they stand
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    # The rest is smaller data, fewer steps and this machine: no key is about the target.
    where = ["scale=small", f"runs={tmp_path / 'runs'}", f"target={target}"]
    more = ["collector.max_new_tokens=12", "prompts.count=100", f"prompts.source={pairs}"]
    collect(compose(["recipe=deer_answers", *where, *more, "shard_size=50"], "collect"))
    few = [*where, *SMALL, *BLOCKS, f"acceptance.source={pairs}", *SHORT, f"layout={layout}"]
    fit(compose(["recipe=diffusion_adapt", *few, *sources(pairs)], "fit"))
    fit(compose(["recipe=deer_stage1", *few], "fit"))
    schedule = "data.corruption.schedule.shortest=4"
    export = fit(compose(["recipe=deer_stage2", *few, schedule], "fit"))
    sampler = load(str(export), dtype="float32")
    assert sampler.drafter.config.num_hidden_layers == 7
    assert sampler.draft_ids is not None
    assert len(sampler.draft_ids) <= 300
    if layout == "pard":  # an ordinary causal LM over the target's tokens, and its mask
        stock = AutoModelForCausalLM.from_pretrained(export)
        assert stock.config.vocab_size == len(AutoTokenizer.from_pretrained(export)) == 300
        assert stock.config.pard_token == sampler.mask_id < 300
        assert sampler.sep_id is None
        known = stock.lm_head.weight.abs().sum(-1).nonzero().flatten()
        assert known.tolist() == sorted(sampler.draft_ids.tolist())
        with pytest.raises(ValueError, match="layout=pard"):
            fit(compose(["recipe=deer_stage2", *few[:-1], schedule, "name=other"], "fit"))
    for verify in ("coupled", "tree"):
        params = SamplingParams(max_new_tokens=16, temperature=1.0, seed=2, verify=verify)
        as_plain(sampler, ["def f3(x):"], params)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model in the place of SmolLM2-135M-Instruct: a Llama with tied embeddings."""
    folder = tmp_path_factory.mktemp("model")
    tiny.causal_lm(304, layers=2, tie_word_embeddings=True).float().save_pretrained(folder)
    train_tokenizer(TEXTS, 300).save_pretrained(folder)
    return folder


def little(recipe, runs, *more):
    small = [a for a in SMALL if not a.startswith("acceptance")]
    arguments = [f"recipe={recipe}", "scale=small", f"runs={runs}", *small, *more]
    return fit(compose([*arguments, "trainer.micro_batch_size=2", "trainer.max_steps=2"], "fit"))


def test_pcllm_on_a_model_of_one_s_own(model, pairs, tmp_path):
    where = ["scale=small", f"runs={tmp_path}", f"target={model}"]
    more = ["collector.max_new_tokens=32", "prompts.count=100", f"prompts.source={pairs}"]
    collect(compose(["recipe=pcllm_trajectories", *where, *more, "shard_size=50"], "collect"))
    text = f"data.train.text={pairs}"
    asked = ["acceptance.prompts=2", "acceptance.max_new_tokens=6", f"acceptance.source={pairs}"]
    export = little("pcllm_round1", tmp_path, f"model={model}", text, *asked)
    sampler = load(str(export), dtype="float32")
    as_plain(sampler, ["def f3(x):"], SamplingParams(max_new_tokens=16, temperature=0.8, seed=2))


def test_masked_diffusion_and_spiffy_on_a_model_of_one_s_own(model, pairs, tmp_path):
    text = sources(pairs)
    little("dllm_block", tmp_path, f"start={model}", *text, *SHORT, "module.block_size=8")
    asked = [*text, "data.train.count=4", "data.validation.count=2", "module.max_new_tokens=8"]
    export = little("spiffy_calibrate", tmp_path, *asked, "trainer.batch_size=2")
    (result,) = load(str(export)).generate(["def f3(x):"], SamplingParams(max_new_tokens=8))
    assert result.token_ids


def test_infilling_on_a_model_of_one_s_own(model, pairs, tmp_path):
    export = little("asarm_joint", tmp_path, f"start={model}", *sources(pairs), *SHORT)
    (result,) = load(str(export)).generate(["def f3(<hole:3>):"], SamplingParams(seed=1))
    assert len(result.token_ids) == 3
