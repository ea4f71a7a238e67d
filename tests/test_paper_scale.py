"""What the numbers of every recipe at scale=paper mean, beside the papers' own statements.

`make paper-scale` prints, for every recipe: how many samples, tokens and epochs a run sees, the
warm-up that it uses, and the bytes that weights, optimizer, logits and caches take
on the GPUs of the command at the recipe's head. Nothing is downloaded: models are built without
weights from their published sizes, and of data sets only the published number of examples is used.
"""

import inspect
import re
import shlex
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hydra.utils import get_object
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from models import eagle3, redrafter
from models.dflash_init import from_target
from recipes.compose import RECIPES, build, compose, names
from tests.support import tiny
from trainers.base import Optimization

COMMAND = {r: OmegaConf.load(RECIPES / "recipe" / f"{r}.yaml").command for r in names("recipe")}
PAPER = [r for r in COMMAND if "paper" in OmegaConf.load(RECIPES / "recipe" / f"{r}.yaml").scales]
GB = 1e9

_QWEN3 = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936}
# The sizes of public models, as their config.json has them.
MODELS = {
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", {
        **_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8,
    }),
    "Qwen/Qwen3-8B": ("qwen3", {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    }),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
    }),
    "fredzzp/open-dcoder-0.5B": ("qwen2", {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
    }),
    "Qwen/Qwen2.5-Coder-7B-Instruct": ("qwen2", {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    }),
    "xlnet/xlnet-base-cased": ("xlnet", {
        "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072, "vocab_size": 32000,
    }),
}  # fmt: skip
# Their published numbers of parameters, in billions: what is built from the sizes must have them.
BILLIONS = {"Qwen/Qwen3-30B-A3B": 30.5, "Qwen/Qwen3-8B": 8.2, "Qwen/Qwen2.5-0.5B-Instruct": 0.49,
            "fredzzp/open-dcoder-0.5B": 0.49, "Qwen/Qwen2.5-Coder-7B-Instruct": 7.61,
            "xlnet/xlnet-base-cased": 0.117}  # fmt: skip
# Of recipes that start from another one's export.
STARTS = {
    "deer_stage1": "fredzzp/open-dcoder-0.5B",
    "deer_stage2": "fredzzp/open-dcoder-0.5B",
    "deer_math_stage1": "Qwen/Qwen2.5-0.5B-Instruct",
    "deer_math_stage2": "Qwen/Qwen2.5-0.5B-Instruct",
    "pcllm_round2": "Qwen/Qwen2.5-Coder-7B-Instruct",
    "spiffy_calibrate": "Qwen/Qwen3-8B",  # of dllm_block; LLaDA-8B has as many
}
# Published numbers of examples, and of tokens where there is one (OpenWebText: GPT-2's).
EXAMPLES = {
    "nvidia/OpenCodeInstruct": 5_000_000,
    "Skylion007/openwebtext": 8_013_769,
    "stingning/ultrachat": 1_470_000,
    "starcoderdata/python": 12_866_649,
    "imagenet/train": 1_281_167,
    "mlabonne/open-perfectblend": 1_420_909,
}
TOKENS = {"Skylion007/openwebtext": 9.0e9}
# The GPUs that each paper states, in GB; of our own recipes those of the drafters' paper.
GPU = {"asarm_joint": 48, "asarm_code": 48}
GPU |= {r: 80 for r in PAPER if r not in GPU}


@cache
def skeleton(name):
    kind, sizes = MODELS[name]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


def parameters(network):
    return sum(p.numel() for p in network.parameters())


def recipe_at_paper_scale(recipe, *overrides):
    return compose([f"recipe={recipe}", "scale=paper", *overrides], COMMAND[recipe])


def launch(recipe):
    """(devices, strategy) of the command at the recipe's head that runs it at scale=paper."""
    head = (RECIPES / "recipe" / f"{recipe}.yaml").read_text().split("\ncommand:")[0]
    head = re.sub(r"\\\n#\s*", "", head)
    lines = [x for x in head.splitlines() if "scale=paper" in x]
    line = lines[0] if lines else ""
    devices = re.search(r"(?:trainer\.devices=|--nproc-per-node )(\d+)", line)
    strategy = re.search(r"strategy=(\w+)", line)
    return int(devices[1]) if devices else 1, strategy[1] if strategy else "auto"


def network_of(recipe, config):
    if recipe in STARTS:
        return skeleton(STARTS[recipe])
    if "mar_size" in config.network:
        with torch.device("meta"):
            return build(config.network)
    source = skeleton(config.network.get("path") or config.network.source.path)
    new, n = config.network._target_, config.network
    with torch.device("meta"):
        if new == "models.dflash_init.from_target":
            return from_target(source, tiny.tokenizer(2), n.layers, n.states)
        if new == "models.eagle3.from_target":
            ids = torch.arange(n.draft_ids["count"], device="meta")
            return eagle3.from_target(source, tiny.tokenizer(2), n.states, ids)
        if new == "models.redrafter.from_target":
            ids = torch.arange(n.draft_ids["count"], device="meta")
            return redrafter.from_target(source, tiny.tokenizer(2), n.states, n.width, ids)
    return source


def source_of(config):
    """The data set at the start of a recipe's data."""
    train = config.data.train
    if "questions" in config:
        return config.questions
    if train._target_.endswith((".answers", "trajectories.rows")):
        recipe = str(train.source if isinstance(train.source, str) else train.source[0])
        recipe = recipe.removeprefix("runs/").partition("/")[0]
        return recipe_at_paper_scale(recipe).prompts.source
    return train.source


def examples_of(config):
    """How many examples one pass over the training set has, before a part is held out."""
    train = config.data.train
    if train.get("prompts") is not None:
        return train.prompts
    if train._target_.endswith("PromptRows"):
        return train.count
    if train._target_.endswith("trajectories.rows"):
        return recipe_at_paper_scale("pcllm_trajectories").prompts.count
    return EXAMPLES[source_of(config)]


def longest(config):
    """The most tokens that a row, or an answer with its prompt, brings."""
    train = config.data.train
    if train._target_.endswith("trajectories.rows"):
        made = recipe_at_paper_scale("pcllm_trajectories")
        return made.prompts.length + made.collector.max_new_tokens
    if train._target_.endswith(".answers"):
        made = recipe_at_paper_scale("deer_answers")
        return made.prompts.length + made.collector.max_new_tokens
    if train._target_.endswith("images.rows"):
        return (config.network.size // config.network.patch) ** 2
    return train.length


@dataclass
class Facts:
    """What a recipe's numbers mean.

    Attributes:
        samples: Rows that a run sees, where its length is given in steps.
        tokens: (sign, number): '=' exactly, '<=' at most, '' unknown.
        epochs: (sign, number): '=' exactly, '>=' at least, '~' by a published count of tokens.
        warmup: Steps.
        gpu: Bytes on one GPU, by what they are for.
    """

    samples: float | None
    tokens: tuple[str, float]
    epochs: tuple[str, float]
    warmup: int | None
    gpu: dict[str, float]


def facts(recipe, *overrides):
    config = recipe_at_paper_scale(recipe, *overrides)
    devices, strategy = launch(recipe)
    if COMMAND[recipe] == "collect":
        return collected(config)
    if recipe == "spiffy_calibrate":  # nothing is trained
        weights = 2 * parameters(network_of(recipe, config))
        samples = config.trainer.max_steps * config.trainer.batch_size
        epochs = ("=", samples / config.data.train.count)
        return Facts(samples, ("", 0), epochs, 0, {"weights": weights})
    strategy = next((o.partition("=")[2] for o in overrides if o.startswith("strategy=")), strategy)
    return trained(recipe, config, devices, strategy)


def trained(recipe, config, devices, strategy):
    t, steps = config.trainer, config.trainer.max_steps
    packed = config.data.train._target_.startswith("data.rows.documents")
    row = config.data.train.length if packed else longest(config)
    most = examples_of(config) * longest(config)
    if steps is None:
        samples, epochs = None, ("=", t.max_epochs)
        tokens = ("", 0) if config.data.train._target_.endswith("documents.documents") else (
            "<=", t.max_epochs * most
        )  # fmt: skip
        if not packed:
            samples = t.max_epochs * examples_of(config)
    else:
        samples = steps * t.batch_size
        tokens = ("=", samples * row)
        if not packed:
            epochs = ("=", samples / examples_of(config))
        elif source_of(config) in TOKENS:
            epochs = ("~", tokens[1] / TOKENS[source_of(config)])
        elif config.data.train._target_.endswith(".answers"):
            epochs = (">=", tokens[1] / most)
        else:
            epochs = ("", 0)
    optimization = Optimization(**config.optimization)
    warmup = optimization.warmup(steps) if steps else optimization.warmup_steps
    return Facts(samples, tokens, epochs, warmup, memory(recipe, config, devices, strategy))


def memory(recipe, config, devices, strategy):
    """Bytes on one GPU in training, without activations."""
    network = network_of(recipe, config)
    shards = devices if strategy in ("fsdp2", "deepspeed_3") else 1
    # float32 weights and gradients, two states of AdamW, and their average.
    each = 4 + 4 + 8 + (4 if config.optimization.ema else 0)
    found = {"weights and optimizer": each * parameters(network) / shards}
    rows, corruption = config.trainer.micro_batch_size, config.data.corruption
    predicted = config.data.train.get("length", longest(config))
    if corruption and "anchors" in corruption:
        predicted = corruption.anchors * corruption.length
    if config.data.train._target_.endswith("trajectories.rows"):
        predicted = (
            longest(config) + recipe_at_paper_scale("pcllm_trajectories").collector.max_new_tokens
        )  # every block noisy and clean
    if hasattr(network.config, "vocab_size"):
        # float32 logits, their log-softmax and gradient.
        found["logits"] = 3 * 4 * rows * predicted * network.config.vocab_size
    if config.target in MODELS and config.acceptance.prompts:
        share = devices if config.device_map == "auto" else 1
        found["target"] = 2 * parameters(skeleton(config.target)) / share
    return found


def collected(config):
    model = skeleton(config.target)
    c, prompts = model.config, config.prompts
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    slots = prompts.length + config.collector.max_new_tokens + config.collector.get("block_size", 1)
    token = 2 * 2 * c.num_hidden_layers * c.num_key_value_heads * head  # bfloat16 keys and values
    count = prompts.count or EXAMPLES[prompts.source]
    rows = min(config.shard_size, config.collector.get("at_once") or config.shard_size)
    gpu = {"weights": 2 * parameters(model), "cache": rows * slots * token}
    return Facts(count, ("<=", count * slots), ("=", 1), None, gpu)


def shown(recipe, found):
    """One line of the printed table."""
    devices, strategy = launch(recipe)
    sign, tokens = found.tokens
    parts = [
        f"{recipe}: {devices} x {GPU[recipe]} GB, strategy={strategy}",
        f"samples {found.samples:.3g}" if found.samples else "samples as packed",
        f"tokens {sign}{tokens / GB:.3g}e9" if sign else "tokens of the data set",
        f"epochs {found.epochs[0]}{found.epochs[1]:.3g}" if found.epochs[0] else "epochs unknown",
        f"warm-up {found.warmup} steps" if found.warmup is not None else "no training",
        ", ".join(f"{what} {size / GB:.1f} GB" for what, size in found.gpu.items()),
    ]
    return "; ".join(parts)


@pytest.mark.parametrize("recipe", PAPER)
def test_what_the_numbers_mean(recipe):
    found = facts(recipe)
    print(shown(recipe, found))
    # Activations are not counted: they want room too.
    assert sum(found.gpu.values()) < 0.95 * GPU[recipe] * GB
    if found.epochs[0] == ">=":
        assert found.epochs[1] <= 1.01, "more passes over the data than anyone has asked for"


def test_what_did_not_fit_is_seen_not_to_fit():
    """The known mistakes of before, through the same functions."""
    whole = facts("deer_answers", "collector.at_once=null").gpu  # 256 answers together
    assert whole["cache"] == pytest.approx(77.3e9, rel=0.01)
    assert sum(whole.values()) > 80 * GB
    assert sum(facts("pcllm_round1", "strategy=ddp").gpu.values()) > 80 * GB
    whole = facts("deer_stage1", "device_map=null").gpu
    assert whole["target"] == pytest.approx(61.1e9, rel=0.01)  # on every GPU
    before = facts("deer_stage1", "trainer.max_steps=40000", "+data.train.prompts=100000")
    assert before.epochs[0] == ">="
    assert before.epochs[1] > 34
    rows_as_examples = facts("deer_stage2", "trainer.max_steps=1600")
    assert rows_as_examples.epochs[1] > 1.3


@pytest.mark.parametrize("name", MODELS)
def test_the_models_have_their_published_sizes(name):
    assert parameters(skeleton(name)) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


@dataclass
class Statement:
    """What a paper says of a recipe, and what the recipe has.

    Attributes:
        recipe: Its name.
        key: A key of its config, or a field of its `Facts`, or 'devices'.
        paper: The paper's value.
        where: The place in the paper.
        ours: The recipe's value, where that is another one.
        why: The reason.
    """

    recipe: str
    key: str
    paper: Any
    where: str
    ours: Any = None
    why: str = ""


def asarm(recipe, where, devices, samples, batch, lr, warmup, rates, start):
    values = {
        "samples": samples, "trainer.batch_size": batch, "trainer.micro_batch_size": 16,
        "devices": devices, "optimization.lr": lr, "warmup": warmup,
        "optimization.schedule": "linear", "data.train.length": 512,
        "data.corruption.rates": rates, "data.corruption.start": start,
        "data.corruption.curriculum": warmup,
    }  # fmt: skip
    return [Statement(recipe, key, value, where) for key, value in values.items()]


def said(recipe, where, **values):
    return [Statement(recipe, k.replace("__", "."), v, where) for k, v in values.items()]


S = "Qwen/Qwen3-30B-A3B"
STATEMENTS = [
    *asarm("asarm_joint", "AS-ARM E.1-E.3", 5, 2.4e7, 320, 1e-4, 5000, [0.9, 0.99], 0.15),
    *asarm("asarm_code", "AS-ARM E.7", 6, 3.2e7, 384, 1.2e-4, 20000, [0.15, 0.99], 0.05),
    Statement("asarm_code", "trainer.max_steps", 75000, "AS-ARM E.7: where the run crashed",
              83333, "the schedule's own length, 3.2e7 samples"),
    *said("deer_answers", "DEER 4.1", target=S, prompts__source="nvidia/OpenCodeInstruct",
          collector__temperatures=[0.6], prompts__count=None),
    *said("deer_stage1", "DEER appendix A, code", epochs=1, optimization__lr=1e-4, devices=8,
          target=S),
    *said("deer_stage2", "DEER appendix A, code", epochs=1, optimization__lr=5e-5, devices=8,
          data__train__prompts=100_000, data__corruption__length=96, module__alpha=1.01,
          module__soft=0.0),
    *said("diffusion_adapt", "DEER 4.1 and appendix A, code",
          network__source__path="fredzzp/open-dcoder-0.5B", module__shifted=True),
    *said("deer_math_stage1", "DEER appendix A, math", epochs=5, optimization__lr=1e-4, devices=8),
    *said("deer_math_stage2", "DEER appendix A, math", epochs=1, optimization__lr=1e-4, devices=8,
          data__corruption__length=96, data__corruption__schedule__shortest=1, module__alpha=1.01),
    *said("deer_math_answers", "DEER 4.1 and 4.6", target=S, collector__temperatures=[0.6],
          prompts__source="stingning/ultrachat"),
    *said("pcllm_trajectories", "pcLLM 4.1", target="Qwen/Qwen2.5-Coder-7B-Instruct",
          prompts__source="nvidia/OpenCodeInstruct", prompts__count=450_000,
          prompts__where="average_test_score>=1", collector__block_size=16,
          collector__max_new_tokens=2048),
    *said("pcllm_round1", "pcLLM 3.1 and 4.1", optimization__lr=1e-6, devices=8,
          data__corruption__window=16, data__corruption__order="linear",
          trainer__max_steps=400_000),
    *said("pcllm_round1", "the authors' README, MR", module__sampling__block_size=64,
          module__sampling__blocks=2, module__sampling__spawn_ratio=0.85,
          module__sampling__pool_size=4),
    *said("pcllm_round2", "pcLLM 4.1", optimization__lr=1e-6, devices=8,
          data__corruption__window=8, module__sampling__block_size=64),
    *said("dflash", "DFlash (v2) 5", target="Qwen/Qwen3-8B", network__states=5,
          data__train__prompts=800_000),
    *said("dflash", "DFlash (v2) 4.2 and A.1", epochs=6, optimization__lr=6e-4,
          optimization__schedule="cosine", trainer__gradient_clip=1.0, data__train__length=3072,
          module__gamma=7.0, module__soft=0.0),
    Statement("dflash", "network.layers", 5, "DFlash (v2) 5: layers of the drafter",
              [0, 1, 2, 3, 35], "five, that begin as copies of these layers of the target"),
    Statement("dflash", "module.block_size", 16, "DFlash (v2) 5", 15,
              "tokens drafted: the paper counts the last committed token, which begins a block"),
    Statement("dflash", "data.corruption.anchors", 512, "DFlash (v2) A.1: of each sequence", 512,
              "of each packed row, which may hold several sequences"),
    Statement("dflash", "warmup", 0.04, "DFlash (v2) A.1: of the steps", 100,
              "steps, as fit.yaml has them: not compared"),
    Statement("dflash", "answers", "Nemotron Post-Training Dataset V2 and CodeAlpaca",
              "DFlash (v2) 5: prompts, answered by the target", "runs/deer_answers",
              "DEER's prompts, answered by the target: one collection for both drafters"),
    *said("drafter", "DSpark, as NeMo AutoModel's recipe states it",
          questions="mlabonne/open-perfectblend", network__states=5, network__markov_rank=256,
          network__context="fused", module__block_size=7, module__gamma=4.0, module__soft=0.9,
          module__teacher="target", module__teacher_loss="total_variation", epochs=10,
          trainer__batch_size=512, optimization__lr=6e-4, optimization__weight_decay=0.0,
          data__train__length=4096, data__corruption__anchors=512),
    Statement("drafter", "network.layers", 5, "the same: layers of the drafter",
              [0, 1, 2, 3, 35], "five, that begin as copies of these layers of the target"),
    Statement("drafter", "warmup", 0.04, "the same: of the steps", 100,
              "steps, as fit.yaml has them: not compared"),
    *said("eagle3", "EAGLE-3 4: entries of ShareGPT and of UltraChat-200K",
          data__train__prompts=68_000 + 464_000),
    *said("spiffy_calibrate", "Spiffy, appendices C and D", samples=50,
          module__max_new_tokens=256, module__nodes=10, module__objective="degree1", module__top=3,
          model="GSAI-ML/LLaDA-8B-Instruct"),
    *said("cspd_draft", "CSpD 3.2 and Table 1", module__gamma=32, module__prefill=0.05),
    *[s for r in ("cspd_target", "cspd_draft") for s in said(
        r, "MAR's public settings (CSpD trains nothing)", optimization__lr=8e-4,
        optimization__weight_decay=0.02, optimization__betas=[0.9, 0.95], optimization__ema=0.9999,
        optimization__schedule="constant_with_warmup", trainer__batch_size=2048,
        trainer__gradient_clip=3.0, data__corruption__no_class=0.1, data__corruption__repeats=4,
        data__train__flips=True)],
]  # fmt: skip


def value_of(statement):
    config = recipe_at_paper_scale(statement.recipe)
    if statement.key == "devices":
        return launch(statement.recipe)[0]
    if statement.key in Facts.__annotations__:
        found = getattr(facts(statement.recipe), statement.key)
        return found[1] if isinstance(found, tuple) else found
    found = OmegaConf.select(config, statement.key, throw_on_missing=True)
    if found is None and statement.key.startswith(
        ("data.", "module.")
    ):  # or the default of what the node names
        parent, _, leaf = statement.key.rpartition(".")
        given = inspect.signature(get_object(OmegaConf.select(config, parent)._target_)).parameters
        return given[leaf].default
    return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found


def agrees(statement):
    wanted = statement.paper if not statement.why else statement.ours
    found = value_of(statement)
    number = isinstance(wanted, (int, float)) and not isinstance(wanted, bool)
    return found == pytest.approx(wanted, rel=1e-4) if number else found == wanted


@pytest.mark.slow
@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda s: f"{s.recipe}-{s.key}")
def test_the_recipe_has_what_the_paper_says(statement):
    other = f", ours {statement.ours}: {statement.why}" if statement.why else ""
    print(f"{statement.recipe} {statement.key}: {statement.paper} ({statement.where}){other}")
    assert agrees(statement), f"the recipe has {value_of(statement)}"


def test_another_value_is_noticed():
    assert agrees(Statement("deer_stage1", "epochs", 1, ""))
    assert not agrees(Statement("deer_stage1", "epochs", 34, ""))
    assert not agrees(Statement("pcllm_round1", "module.sampling.block_size", 128, ""))
    assert not agrees(Statement("deer_stage2", "data.train.prompts", 102_400, ""))
    assert not agrees(Statement("cspd_target", "optimization.ema", None, ""))
    assert not agrees(Statement("dflash", "module.gamma", 4.0, ""))
    assert not agrees(Statement("dflash", "epochs", 3, ""))


def test_round_2_is_collected_in_the_blocks_of_the_paper():
    config = recipe_at_paper_scale("pcllm_round2")
    (command,) = (need.command for need in config.needs if "trajectories" in need.path)
    assert "collector.block_size=32" in command  # pcLLM 4.1


def test_the_math_drafter_is_converted_as_in_the_paper():
    config = recipe_at_paper_scale("deer_math_stage1")
    (command,) = (need.command for need in config.needs if need.path == config.drafter)
    made = compose(shlex.split(command)[3:], "fit")  # DEER 4.6
    assert made.network.source.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (made.trainer.max_epochs, made.data.train.source) == (40, "stingning/ultrachat")
    assert not made.module.shifted


def test_every_recipe_of_a_paper_has_a_statement():
    ours = {"ar_drafter", "ar_target", "dllm_block", "redrafter"}  # no paper has their numbers
    assert {s.recipe for s in STATEMENTS} == {*PAPER} - ours


def test_acceptance_is_measured_on_prompts_like_those_of_the_training():
    for recipe in PAPER:
        config = recipe_at_paper_scale(recipe)
        if COMMAND[recipe] == "fit" and config.acceptance.prompts:
            sources = config.data.train.source
            assert config.acceptance.source in ([sources] if isinstance(sources, str) else sources)
