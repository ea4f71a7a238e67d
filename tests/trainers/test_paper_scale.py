"""scale=paper on tiny random models of the published classes and small local data sets."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

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


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Qwen3 target, a Qwen2.5 source with another padding, and chats and code as JSONL."""
    root = tmp_path_factory.mktemp("hub")
    texts = [f"def f{i}(x):\n    return x + {i}\n" for i in range(200)]
    tokenizer = train_tokenizer(texts, 300)
    for name, kind, vocabulary in (("source", "qwen2", 320), ("target", "qwen3", 304)):
        model = tiny.causal_lm(vocabulary, kind=kind, eos_token_id=0).float()
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        # Both Qwens have one tokenizer class, which transformers chooses by the model's type.
        tokenizer = AutoTokenizer.from_pretrained(root / name)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(root / name)
    chats = [
        {"id": f"c{i}", "messages": [{"role": "user", "content": f"write f{i}"},
                                     {"role": "assistant", "content": t}]}
        for i, t in enumerate(texts)
    ]  # fmt: skip
    code = [{"id": f"o{i}", "input": f"write f{i}", "output": t} for i, t in enumerate(texts)]
    write_jsonl(root / "chats.jsonl", chats)
    write_jsonl(root / "code.jsonl", code)
    return root


def arguments(hub, recipe, source=None):
    small = [a for a in SMALL if not a.startswith("acceptance")]
    found = [
        f"recipe={recipe}", "scale=paper", f"runs={hub / 'runs'}", *small,
        "trainer.workers=0", "trainer.compile=false", "acceptance.prompts=0",
        "data.train.length=64", "data.validation.length=64",
    ]  # fmt: skip
    if source:
        found += [f"data.{s}.source={hub / source}" for s in ("train", "validation")]
        found += ["data.train.split=train", "data.validation.split=heldout"]
    return found


def test_the_published_chain_runs_on_local_models(hub):
    target = f"target={hub / 'target'}"
    fit(
        compose(
            [*arguments(hub, "diffusion_adapt", "chats.jsonl"), *BLOCKS, target,
             f"network.source.path={hub / 'source'}"], "fit",
        )
    )  # fmt: skip
    collect(
        compose(
            ["recipe=deer_answers", "scale=paper", f"runs={hub / 'runs'}",
             f"collector.teacher={hub / 'target'}", "collector.max_new_tokens=12",
             "collector.device=cpu", "collector.dtype=float32", "prompts.count=100",
             "prompts.length=40", "shard_size=25", f"prompts.source={hub / 'code.jsonl'}"],
            "collect",
        )
    )  # fmt: skip
    fit(compose([*arguments(hub, "deer_stage1"), *BLOCKS, target], "fit"))
    few = "data.train.prompts=null"  # of the published 100,000
    export = fit(compose([*arguments(hub, "deer_stage2"), *BLOCKS, target, few], "fit"))
    network = AutoModelForCausalLM.from_pretrained(export)
    assert type(network).__name__ == "Qwen2ForCausalLM"
    # 320 rows hold all tokens and the two draft tokens: nothing was resized.
    assert network.config.vocab_size == 320
    sampler = load(str(export), dtype="float32")
    assert type(sampler.target).__name__ == "Qwen3ForCausalLM"
    params = SamplingParams(max_new_tokens=16, temperature=1.0, seed=2)
    as_plain(sampler, ["def f3(x):"], params)
    layers = ["network.layers=[0,1]", "network.states=[0]", "then=[]"]
    export = fit(compose([*arguments(hub, "drafter"), *BLOCKS, target, *layers], "fit"))
    assert json.loads((export / "config.json").read_text())["architectures"] == ["Qwen3DSparkModel"]
    as_plain(load(str(export), dtype="float32"), ["def f3(x):"], params)


@pytest.mark.slow
def test_the_math_drafter_learns_from_both_collections(hub):
    """Two collections, a length in epochs, acceptance on the collections' own prompts."""
    target, runs = f"target={hub / 'target'}", f"runs={hub / 'math'}"
    fit(
        compose(
            [*arguments(hub, "diffusion_adapt", "chats.jsonl"), *BLOCKS, target, runs, "name=math",
             "module.shifted=false", f"network.source.path={hub / 'source'}"], "fit",
        )
    )  # fmt: skip
    for more in ([], ["name=sharegpt", "seed=1"]):
        collect(
            compose(
                ["recipe=deer_math_answers", "scale=paper", runs, target, *more,
                 f"prompts.source={hub / 'chats.jsonl'}", "prompts.length=40",
                 "collector.max_new_tokens=12", "collector.device=cpu", "collector.dtype=float32"],
                "collect",
            )
        )  # fmt: skip
    measured = ["acceptance.prompts=2", "acceptance.max_new_tokens=6", "acceptance.dtype=float32"]
    length = ["trainer.max_steps=null", "trainer.max_epochs=0.1"]
    rows = {}
    for recipe in ("deer_math_stage1", "deer_math_stage2"):
        export = fit(
            compose([*arguments(hub, recipe), *BLOCKS, target, runs, *measured, *length], "fit")
        )
        story = json.loads((export.parent / "provenance.json").read_text())
        rows[recipe] = story["data"]["train"]["rows"]
        assert "acceptance_length_t0.6" in (export.parent / "metrics.csv").read_text()
    one = fit(
        compose(
            [*arguments(hub, "deer_math_stage1"), *BLOCKS, target, runs, "name=one",
             "data.train.source=${answers[0]}"], "fit",
        )
    )  # fmt: skip
    story = json.loads((one.parent / "provenance.json").read_text())
    assert rows["deer_math_stage1"] > 1.5 * story["data"]["train"]["rows"]


def test_fine_tuning_a_target(hub):
    export = fit(
        compose(
            [*arguments(hub, "ar_target", "code.jsonl"), f"tokenizer.path={hub / 'target'}",
             f"network.path={hub / 'target'}"], "fit",
        )
    )  # fmt: skip
    assert type(AutoModelForCausalLM.from_pretrained(export)).__name__ == "Qwen3ForCausalLM"


def test_nothing_is_built_silently(hub, tmp_path):
    with pytest.raises(ValueError, match=r"It is made by: python -m .*recipe=deer_answers"):
        fit(compose([*arguments(hub, "deer_stage2"), f"runs={tmp_path}"], "fit"))
