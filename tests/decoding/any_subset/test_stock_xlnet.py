"""A plain transformers XLNet folder, without an entry of ours, fills holes by the real commands."""

import csv
import json
import random
import shutil

import pytest
import torch
from transformers import XLNetConfig, XLNetLMHeadModel

from data.text.tokenizer import train_tokenizer
from decoding import SamplingParams, load
from decoding.bench import infill
from decoding.generate import run as generate
from decoding.samplers.asarm import DRAFTS
from tests.support import subsets, tiny
from tests.support.files import write_jsonl

PROMPT = "def a(<hole:4>):return<hole:3>"
SIZE = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """XLNet as the Hub has it: weights, config and tokenizer of stock classes."""
    folder = tmp_path_factory.mktemp("models") / "xlnet"
    tokenizer = subsets.xlnet_tokenizer()
    torch.manual_seed(0)
    model = XLNetLMHeadModel(XLNetConfig(vocab_size=len(tokenizer), **SIZE))
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_every_way_fills_the_same_text(folder):
    assert "parade" not in json.loads((folder / "config.json").read_text())
    texts, passes = set(), {}
    for draft in DRAFTS:
        sampler = load(str(folder), sampler=["method=asarm", f"draft={draft}", "block_size=3"])
        assert (sampler.draft, sampler.block_size, sampler.mask_id) == (draft, 3, 6)
        (result,) = sampler.generate([PROMPT], SamplingParams(seed=1))
        texts.add(result.text)
        passes[draft] = result.stats.target_passes
    assert len(texts) == 1
    assert passes["sequential"] == 7 >= max(passes.values())
    (other,) = sampler.generate([PROMPT], SamplingParams(seed=2))
    assert other.text not in texts


def test_its_method_needs_no_name(folder, tmp_path):
    sampler = load(str(folder))
    assert (sampler.draft, sampler.block_size) == ("assd_fused", 5)
    tiny.causal_lm(5).save_pretrained(tmp_path)
    tiny.tokenizer(5).save_pretrained(tmp_path)
    assert load(str(tmp_path)).continues


def test_a_folder_with_nothing_but_a_tokenizer_file(folder, tmp_path):
    """The Hub's repository has no tokenizer_config.json: its class follows from config.json."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path)
    results = [load(str(f)).generate([PROMPT], SamplingParams(seed=1)) for f in (folder, tmp_path)]
    assert results[0][0].text == results[1][0].text


def test_generate(folder, capsys):
    for sampler in ("", "sampler=[method=asarm,draft=sequential]"):
        generate([f"model={folder}", f"prompt={PROMPT}", "seed=1", *sampler.split()])
    first, second = (s.splitlines()[0] for s in capsys.readouterr().out.split("def a(")[1:])
    assert first == second


def test_the_bench(folder, tmp_path, capsys):
    draw = random.Random(0)
    texts = [" ".join(draw.choices(["def", "return", "if", "a", "u"], k=40)) for _ in range(4)]
    source = tmp_path / "texts.jsonl"
    write_jsonl(source, [{"prompt": text} for text in texts])
    judge = tmp_path / "judge"
    tokenizer = train_tokenizer(texts, 259)
    tiny.causal_lm(len(tokenizer)).save_pretrained(judge)
    tokenizer.save_pretrained(judge)
    infill.run(
        [
            *(f"model={folder}", f"judge={judge}", f"source={source}", f"out={tmp_path / 'out'}"),
            *("samples=3", "length=16", "hidden=0.5", "dtype=float32", "block_sizes=[3]"),
            "sampler=[method=asarm,mask_id=6]",
        ]
    )
    lines = list(csv.DictReader((tmp_path / "out" / "infill.csv").open()))
    assert [line["draft"] for line in lines] == list(DRAFTS)
    assert float(lines[0]["calls / sequential"]) == 1


@pytest.mark.parametrize(
    "knob", ["mask_id=99", "mask_id=-1", "draft=x", "block_size=0", "block_size=x"]
)
def test_mistakes_are_one_line(folder, knob):
    with pytest.raises(ValueError, match=knob.partition("=")[0]) as error:
        load(str(folder), sampler=["method=asarm", knob])
    assert "\n" not in str(error.value)


def test_a_model_without_a_mask_token_is_refused(tmp_path):
    tiny.causal_lm(5).save_pretrained(tmp_path)
    tiny.tokenizer(5).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mask_id="):
        load(str(tmp_path), sampler=["method=asarm"])
    assert load(str(tmp_path), sampler=["method=asarm", "mask_id=4"]).mask_id == 4
