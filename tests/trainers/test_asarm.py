"""The joint loss by hand, the gradient of a whole step, and the recipe from fit to filled holes."""

import json
import math
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf
from transformers import XLNetConfig, XLNetLMHeadModel

from data.corruption.orders import binary_lattice, order_index, two_streams
from decoding.engine.params import SamplingParams
from decoding.loading import load, load_tokenizer
from models import causal
from recipes.compose import compose
from tests.support import subsets, tiny
from tests.support.files import write_jsonl
from tests.support.lab import SMALL
from trainers.asarm import JointDensity
from trainers.base import Optimization
from trainers.fit import assemble, build_module, fit
from trainers.losses.asarm import joint

pytestmark = pytest.mark.usefixtures("forked")

V = 4


def batch(given, tokens):
    index = order_index(binary_lattice(given), given.sum(-1))
    streams = two_streams(tokens, index, torch.ones_like(given), V)
    return {**streams, "target": tokens, "masked": ~given}


def test_the_loss_by_hand():
    logits = torch.tensor([[[0.0, 0.0], [0.0, math.log(3)], [math.log(4), 0.0]]])
    loss, weight = joint(logits, torch.tensor([[0, 1, 1]]), torch.tensor([[False, True, True]]))
    assert loss[0].tolist() == pytest.approx([math.log(2), math.log(4 / 3), math.log(5)])
    assert weight.tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("make", [subsets.network, subsets.xlnet])
def test_the_loss_is_minus_the_joint_density(make):
    """Up to the mask token, which a sampler excludes and the loss does not."""
    model = make(V)
    module = JointDensity(model, None, Optimization(1e-3), draft="assd", block_size=3)
    given = torch.tensor([[True, False, False, True], [False, True, False, False]])
    tokens = torch.tensor([[1, 2, 3, 0], [0, 3, 1, 1]])
    with torch.no_grad():
        loss, weight = module.losses(batch(given, tokens))
    assert torch.equal(weight, module.weight(batch(given, tokens)))
    for b in range(2):
        prompt = [(p, int(t)) for p, t in enumerate(tokens[b]) if given[b, p]]
        rest = [(p, int(t)) for p, t in enumerate(tokens[b]) if not given[b, p]]
        expected = 0.0
        for i, (p, t) in enumerate(rest):
            expected -= subsets.one_position(model, prompt, rest[:i], p).log_softmax(-1)[t].item()
        # Losses are float32.
        assert (loss * weight)[b].sum().item() == pytest.approx(expected, rel=1e-5)


def test_training_learns_a_joint_that_parallel_marginals_cannot():
    """Two hidden tokens that are equal: the joint loss goes to log 2, not to 2 log 2."""
    torch.manual_seed(0)
    model = tiny.causal_lm(V + 1, scale=0.5).float().train()
    module = JointDensity(model, None, Optimization(1e-3), draft="assd", block_size=3)
    given = torch.tensor([[True, False, False]])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        total = 0.0
        for x in (0, 1):
            loss, weight = module.losses(batch(given, torch.tensor([[3, x, x]])))
            total = total + (loss * weight).sum() / 2
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert total.item() == pytest.approx(math.log(2), abs=0.05)


@pytest.fixture(scope="module")
def export(lab):
    return lab.fit("asarm_joint")


@pytest.mark.parametrize("setting", ["draft=foo", "block_size=0"])
def test_an_export_that_could_not_be_decoded_is_not_trained(lab, setting):
    with pytest.raises(ValueError, match=r"draft 'foo'|block_size=0"):
        lab.fit("asarm_joint", "name=refused", f"module.{setting}")
    assert not (lab.runs / "asarm_joint" / "refused").exists()


def test_the_recipe_trains_exports_and_fills_holes(lab, export):
    config = json.loads((export / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["parade"]["method"] == "asarm"
    assert "<hole:12>" in (export / "README.md").read_text()
    sampler = load(str(export))
    assert type(sampler).__name__ == "AsarmSampler"
    texts = {
        sampler.generate(["def <hole:6>\n    return <hole:3>"], params)[0].text
        for params in (SamplingParams(seed=2, draft=d) for d in sampler.drafts)
    }
    assert len(texts) == 1
    rows = (lab.runs / "asarm_joint" / "metrics.csv").read_text()
    assert "val_loss" in rows


@pytest.mark.processes
def test_generate_prints_the_filled_text(export):
    command = [sys.executable, "-m", "decoding.generate", f"model={export}", "seed=1"]
    done = subprocess.run([*command, "prompt=def <hole:4> self"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def")
    assert done.stdout.count("def") == done.stdout.split("\n\n")[0].count("def")
    assert "<hole" not in done.stdout
    assert "4 tokens in" in done.stdout
    bad = subprocess.run([*command, "prompt=def"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert "error: the prompt has no hole" in bad.stderr


def test_the_bench_of_continuations_refuses_an_infiller(export):
    from decoding.bench.text import Bench, measure

    with pytest.raises(ValueError, match=r"python -m decoding\.bench\.infill"):
        measure(Bench(model=str(export)))


def test_validation_hides_the_same_share_all_along(lab, export, tmp_path):
    arguments = lab.arguments("asarm_joint", "data.corruption.curriculum=1000")
    config = compose(arguments, "fit")
    module = build_module(config)
    _, (train, validation), _ = assemble(config, module, tmp_path, 0)
    shares = []
    for first in (next(iter(train)), next(iter(validation))):
        present = first["document"][:, : first["masked"].shape[1]] >= 0
        shares.append((first["masked"].sum() / present.sum()).item())
    assert shares == pytest.approx([0.15, 0.95], abs=0.02)


def test_xlnet_trains_exports_and_loads(lab, export, tmp_path):
    """The paper's network class, tiny and random in place of the public weights."""
    folder = tmp_path / "xlnet"
    tokenizer = load_tokenizer(str(export))
    size = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}
    XLNetLMHeadModel(XLNetConfig(vocab_size=len(tokenizer), **size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = compose(lab.arguments("asarm_joint", "name=xlnet", "module.draft=assd"), "fit")
    OmegaConf.set_struct(config, False)
    config.tokenizer = {"_target_": "decoding.loading.load_tokenizer", "path": str(folder)}
    config.network = {"_target_": "models.causal.pretrained", "path": str(folder)}
    sampler = load(str(fit(config)))
    (result,) = sampler.generate(["def <hole:6> self"], SamplingParams(seed=0))
    assert len(result.token_ids) == 6
    assert result.stats.target_passes <= 6


def test_code_at_paper_scale_keeps_its_whitespace(tmp_path):
    folder, source = tmp_path / "xlnet", tmp_path / "code.jsonl"
    tokenizer = subsets.xlnet_tokenizer()
    tokenizer.save_pretrained(folder)
    size = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}
    XLNetLMHeadModel(XLNetConfig(vocab_size=len(tokenizer), **size)).save_pretrained(folder)
    rows = [{"content": f"def f{i}(a):\n    return a + {i}\n"} for i in range(200)]
    write_jsonl(source, rows)
    words = [
        *("recipe=asarm_code", "scale=paper", f"runs={tmp_path}", f"source={source}"),
        *(f"tokenizer.tokenizer.path={folder}", f"network.path={folder}"),
        *("data.train.length=48", "data.validation.length=48", "data.corruption.curriculum=2"),
        *(
            "trainer.workers=0",
            "trainer.compile=false",
            *(w for w in SMALL if "acceptance" not in w),
        ),
    ]
    sampler = load(str(fit(compose(words, "fit"))))
    assert "\n" in sampler.tokenizer.get_vocab()
    before, after = "def f(a):\n    ", "\n\treturn a\n"
    (result,) = sampler.generate([f"{before}<hole:4>{after}"], SamplingParams(seed=0))
    assert len(result.token_ids) == 4
    assert result.text.startswith(before)
    assert result.text.endswith(after)


def test_flex_attention_of_xlnet_is_refused_in_one_line(tmp_path):
    subsets.xlnet(V).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="flex_attention") as error:
        causal.load(str(tmp_path), attention="flex_attention")
    assert "\n" not in str(error.value)
