"""Block drafters: the target's distribution is taken at the right positions."""

import json
from functools import partial

import pytest
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from data.corruption.draft_blocks import DraftBlocks, SuffixNoise
from data.text.tokenizer import train_tokenizer, with_draft_tokens
from decoding import SamplingParams, load
from decoding.engine import vocabulary
from models.diffusion import draft_logits, from_causal_lm
from models.hidden_states import capture
from recipes.compose import compose
from tests.support import tiny
from tests.support.results import as_plain
from trainers.base import DISTRIBUTIONS, HIDDEN_STATES, Optimization
from trainers.deer import Refinement
from trainers.fit import give_target
from trainers.losses.diffusion import soft_nll, token_nll, total_variation
from trainers.soft_targets import TEACHER_LOSSES


@pytest.fixture(scope="module")
def tokenizer():
    return with_draft_tokens(train_tokenizer(["return value"], 258))


def module_of(tokenizer, soft, config=None, **more):
    target = tiny.causal_lm(257, seed=1, **config or {})
    network = from_causal_lm(tiny.causal_lm(257, seed=2, **config or {}), tokenizer)
    return Refinement(
        network, tokenizer, Optimization(lr=1e-3), target,
        method="deer", block_size=3, target_name="x", alpha=1.5, soft=soft, **more,
    )  # fmt: skip


def batch_of(tokenizer):
    """Two documents in a row, and padding."""
    generator = torch.Generator().manual_seed(0)
    row = {
        "input_ids": torch.randint(1, 250, (14,), generator=generator),
        "document": torch.tensor([0] * 7 + [1] * 6 + [-1]),
        "position": torch.tensor([*range(7), *range(6), 0]),
        "trained": torch.tensor([1] * 13 + [0]),
    }
    sample = DraftBlocks(5, 3, SuffixNoise(), tokenizer)(row, generator)
    return row, {name: x[None] for name, x in sample.items()}


def windows_of(size):
    """The config of layers with a window of `size` tokens, and of full ones."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    return {"kind": "qwen3", "sliding_window": size, **layers}


@pytest.mark.parametrize("config", [None, windows_of(4)], ids=["full", "windows"])
def test_the_teachers_logits_are_those_of_the_true_prefix(tokenizer, config):
    module = module_of(tokenizer, soft=1.0, config=config)
    row, batch = batch_of(tokenizer)
    found = module.target_states(batch).logits
    checked = 0
    for a, i in batch["masked"][0].nonzero().tolist():
        at = int(batch["start"][0, a]) + i  # the token that is drafted
        first = 7 if at >= 7 else 0
        prefix = row["input_ids"][first:at][None]
        expected = module.target(prefix).logits[0, -1]
        torch.testing.assert_close(found[0, a, i], expected, rtol=0, atol=1e-9)
        checked += 1
    assert checked >= 5


def test_a_block_wider_than_a_window_is_one_line(tokenizer):
    """A block of three tokens and their separator."""
    module_of(tokenizer, soft=1.0, config=windows_of(4))
    with pytest.raises(ValueError, match=r"block_size=3 .*window of 3 tokens .*at most 2"):
        module_of(tokenizer, soft=1.0, config=windows_of(3))


def test_hidden_states_are_those_of_the_true_prefix_and_come_with_the_logits(
    tokenizer, monkeypatch
):
    module = module_of(tokenizer, soft=1.0)
    row, batch = batch_of(tokenizer)
    states = module.target_states(batch, (1, 0))
    assert torch.equal(states.logits, module.target_states(batch).logits)
    for first, end in ((0, 7), (7, 13)):
        with torch.no_grad(), capture(module.target, (1, 0)) as expected:
            module.target(row["input_ids"][first:end][None])
        for found, wanted in zip(states.hidden_states, expected, strict=True):
            torch.testing.assert_close(found[:, first:end], wanted, rtol=0, atol=1e-9)
    # Negative control: of the whole row, without its two documents' mask.
    with torch.no_grad(), capture(module.target, (1, 0)) as mixed:
        module.target(row["input_ids"][None])
    assert (states.hidden_states[0][0, 7:13] - mixed[0][0, 7:13]).abs().max() > 1e-3
    monkeypatch.setattr(module.target, "lm_head", None)  # nobody asks for it
    without = module.target_states(batch, (0,), logits=False)
    assert without.logits is None
    assert torch.equal(without.hidden_states[0], states.hidden_states[1])


class Reader(Refinement):
    target_layers = (1,)

    def draft_logits(self, batch, states):
        self.read = states
        return super().draft_logits(batch, states)


@pytest.mark.parametrize("soft", [0.0, 1.0])
def test_one_forward_of_the_target_gives_all_that_is_needed(tokenizer, soft, monkeypatch):
    _, batch = batch_of(tokenizer)
    monkeypatch.setattr("tests.trainers.test_drafter.Refinement", Reader)
    module, passes = module_of(tokenizer, soft), []
    module.target.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    module.losses(batch)
    assert len(passes) == 1
    assert len(module.read.hidden_states) == 1
    assert (module.read.logits is None) == (not soft)


@pytest.mark.parametrize("soft", [0.0, 0.5])
def test_a_bidirectional_drafter_has_the_same_losses(tokenizer, soft):
    """Only the logits differ: the weights, the tokens and the teacher are those of any drafter."""
    _, batch = batch_of(tokenizer)
    causal, full = (
        module_of(tokenizer, soft, attention=a) for a in ("prefix_causal", "bidirectional")
    )
    found, expected = full.losses(batch), causal.losses(batch)
    assert torch.equal(found[1], expected[1])
    kept = found[1] > 0
    assert (found[0] - expected[0])[kept].abs().max() > 1e-3
    logits = draft_logits(full.network, batch, attention="bidirectional")
    hard = token_nll(logits, batch["target"])
    taught = soft_nll(logits, full.target_states(batch).logits)
    torch.testing.assert_close(found[0], torch.lerp(hard, taught, soft))
    assert full.export_config()["attention"] == "bidirectional"
    assert "shifted" not in full.export_config()
    with pytest.raises(ValueError, match=r"attention 'both'.*'bidirectional'"):
        module_of(tokenizer, soft, attention="both")


@pytest.mark.filterwarnings("ignore:the drafter to start from")
def test_a_recipe_trains_a_drafter_without_a_cache(lab):
    """Its export, loaded again, drafts as in training (the export's own check), losslessly."""
    form = ["module.attention=bidirectional", "module.shifted=true"]
    export = lab.fit("deer_stage1", "name=wide", *form)
    entry = json.loads((export / "config.json").read_text())["parade"]
    assert (entry["attention"], entry["shifted"]) == ("bidirectional", True)
    sampler = load(str(export), dtype="float32")
    assert not sampler.drafter_caches
    params = SamplingParams(max_new_tokens=12, seed=3)
    as_plain(sampler, ["def value"], params)
    with pytest.warns(UserWarning, match="prefix_causal"):
        lab.fit("deer_stage2", "name=narrow", f"drafter={export}", "trainer.max_steps=2")


def test_what_a_module_needs_depends_on_its_settings(tokenizer):
    hard, soft, reader = (c.__new__(c) for c in (Refinement, Refinement, Reader))
    hard.soft, soft.soft, reader.soft = 0.0, 0.5, 0.5
    hard.teacher = soft.teacher = reader.teacher = "target"
    assert hard.needs_target == frozenset()
    assert soft.needs_target == {DISTRIBUTIONS}
    assert reader.needs_target == {DISTRIBUTIONS, HIDDEN_STATES}


TARGET = {"recipe": "deer_stage2", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("soft", "prompts", "loaded"), [(0.0, 0, False), (0.0, 2, True), (0.5, 0, True), (0.5, 2, True)]
)
def test_the_target_is_there_for_the_loss_or_the_measurement(
    tokenizer, tmp_path, soft, prompts, loaded
):
    tiny.causal_lm(257).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    module = module_of(tokenizer, soft)
    module.attach_target(None)
    give_target(module, str(tmp_path), measured=prompts > 0, **TARGET)
    assert (module.target is not None) == loaded
    if loaded:
        assert module.target.dtype == torch.bfloat16
        assert not any(p.requires_grad for p in module.target.parameters())


@pytest.mark.parametrize(("soft", "loaded"), [(0.0, False), (0.5, True)])
def test_processes_that_do_not_measure_load_no_target_for_it(
    tokenizer, tmp_path, monkeypatch, soft, loaded
):
    tiny.causal_lm(257).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    module = module_of(tokenizer, soft)
    module.attach_target(None)
    give_target(module, str(tmp_path), measured=True, **TARGET)
    assert (module.target is not None) == loaded


def test_a_target_that_is_needed_and_not_named(tokenizer):
    module = module_of(tokenizer, 0.5)
    with pytest.raises(ValueError, match=r"target=null.*Refinement.*distributions"):
        give_target(module, None, measured=False, **TARGET)
    give_target(module_of(tokenizer, 0.0), None, measured=False, **TARGET)


def reduced_of(tokenizer, batch, soft):
    """A module whose head knows half of the batch's targets and some others, out of order."""
    known = batch["target"][batch["masked"]].unique()[::2]
    ids = torch.cat([known, torch.tensor([255, 256])]).unique().flip(0)
    module = module_of(tokenizer, soft, draft_ids=ids)
    head = module.network.lm_head
    head.weight = torch.nn.Parameter(head.weight[ids])
    return module, ids


def test_tokens_outside_a_reduced_vocabulary_weigh_nothing(tokenizer):
    _, batch = batch_of(tokenizer)
    module, ids = reduced_of(tokenizer, batch, 0.0)
    known = torch.isin(batch["target"], ids)
    loss, weight = module.losses(batch)
    assert torch.equal(weight, module.weight(batch))
    whole = module_of(tokenizer, 0.0).weight(batch)
    assert torch.equal(weight, whole * known)
    assert (whole * ~known).sum() > 0  # negative control: there are such tokens
    logits = draft_logits(module.network, batch)
    chosen = logits.log_softmax(-1)[..., None] * (batch["target"][..., None, None] == ids[:, None])
    expected = -chosen.sum((-1, -2))
    torch.testing.assert_close(loss * weight, expected * weight)
    accuracy = module.evaluate(batch)["accuracy_1"]
    assert accuracy[1] == batch["masked"][..., 0].sum()  # what it cannot draft is a miss


def test_the_teacher_is_asked_about_the_drafters_tokens(tokenizer):
    _, batch = batch_of(tokenizer)
    module, ids = reduced_of(tokenizer, batch, 1.0)
    teacher = module_of(tokenizer, 1.0).target_states(batch).logits
    assert torch.equal(module.target_states(batch).logits, teacher[..., ids])
    loss, _ = module.losses(batch)
    torch.testing.assert_close(
        loss, soft_nll(draft_logits(module.network, batch), teacher[..., ids])
    )


def stored(teacher, k):
    """A teacher's logits as a collection stores them."""
    probs, ids = teacher.softmax(-1).topk(k)
    return {"teacher_ids": ids, "teacher_probs": probs}


def test_stored_distributions_of_all_tokens_are_the_teacher_s(tokenizer):
    _, batch = batch_of(tokenizer)
    teacher = module_of(tokenizer, 1.0).target_states(batch).logits
    module = module_of(tokenizer, 1.0, teacher="answers")
    assert module.needs_target == frozenset()
    loss, weight = module.losses({**batch, **stored(teacher, 257)})
    expected, same = module_of(tokenizer, 1.0).losses(batch)
    torch.testing.assert_close(loss * weight, expected * same)
    few, _ = module.losses({**batch, **stored(teacher, 2)})
    assert (few - expected).abs().max() > 1e-3  # negative control: a part of them is not
    half, _ = module_of(tokenizer, 0.5, teacher="answers").losses({**batch, **stored(teacher, 2)})
    hard, _ = module_of(tokenizer, 0.0).losses(batch)
    torch.testing.assert_close(half, (few + hard) / 2)
    with pytest.raises(ValueError, match=r"collector\.top_k"):
        module.losses(batch)


def test_stored_distributions_in_a_reduced_vocabulary(tokenizer):
    _, batch = batch_of(tokenizer)
    module, _ = reduced_of(tokenizer, batch, 1.0)
    expected, _ = module.losses(batch)
    teacher = module_of(tokenizer, 1.0).target_states(batch).logits
    module.teacher = "answers"
    loss, _ = module.losses({**batch, **stored(teacher, 257)})
    torch.testing.assert_close(loss, expected)  # renormalised over the tokens that it has


def test_tokens_that_the_network_does_not_have_are_refused(tokenizer):
    assert module_of(tokenizer, 0.0, draft_ids=[5, 1]).draft_ids.tolist() == [5, 1]
    with pytest.raises(ValueError, match="the drafter's tokens are not among the target's"):
        module_of(tokenizer, 0.0, draft_ids=[999_999])


def test_a_whole_head_computes_the_reduced_vocabulary_alone(tokenizer):
    _, batch = batch_of(tokenizer)
    ids = torch.tensor([7, 3, 200])
    module = module_of(tokenizer, 0.0, draft_ids=ids, train_embeddings=False)
    logits = module.draft_logits(batch, None)
    torch.testing.assert_close(logits, draft_logits(module.network, batch)[..., ids])
    logits.square().sum().backward()
    network = module.network
    assert network.lm_head.weight.grad is None
    assert network.model.embed_tokens.weight.grad is None
    assert network.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0
    trained = module_of(tokenizer, 0.0, draft_ids=ids)  # negative control
    trained.draft_logits(batch, None).square().sum().backward()
    assert trained.network.lm_head.weight.grad is not None


def test_an_export_names_and_holds_the_reduced_vocabulary(tokenizer, tmp_path):
    _, batch = batch_of(tokenizer)
    module, ids = reduced_of(tokenizer, batch, 0.0)
    files = module.export_files()
    name = module.export_config()["draft_vocabulary"]
    (tmp_path / name).write_bytes(files[name])
    assert torch.equal(vocabulary.read(tmp_path / name), ids)
    module.check_vocabulary(module.network)
    module.draft_ids = torch.tensor([1, 1])
    with pytest.raises(ValueError, match="twice"):
        module.attach_target(module.target)
    assert "draft_vocabulary" not in module_of(tokenizer, 0.0).export_config()


def test_a_vocabulary_that_is_not_the_targets_is_told_before_training(tokenizer):
    module = module_of(tokenizer, 0.0)
    with pytest.raises(ValueError, match=r"the drafter has \d+ tokens, the target 2000: more than"):
        module.attach_target(tiny.causal_lm(2000))


@pytest.mark.parametrize(("size", "allowed"), [(257, True), (258, False), (256, False)])
def test_a_pard_drafter_has_exactly_its_targets_vocabulary(size, allowed):
    tokens = tiny.tokenizer(200)
    tokens.add_special_tokens({"additional_special_tokens": ["<spare>"]})
    tokens = with_draft_tokens(tokens, "pard")
    networks = [tiny.causal_lm(n) for n in (size, 257)]
    given = {"method": "deer", "block_size": 3, "target_name": "x", "alpha": 1.5, "layout": "pard"}
    make = partial(Refinement, networks[0], tokens, Optimization(lr=1e-3), networks[1], **given)
    if allowed:
        assert make().network.config.pard_token == 200
        return
    with pytest.raises(ValueError, match=rf"layout=pard: the drafter has {size} tokens and its"):
        make()


def test_soft_targets_of_a_certain_teacher_are_the_tokens(tokenizer):
    _, batch = batch_of(tokenizer)
    logits = draft_logits(module_of(tokenizer, 0.0).network, batch)
    certain = torch.nn.functional.one_hot(batch["target"], 257) * 1e4
    torch.testing.assert_close(
        soft_nll(logits, certain.double()), token_nll(logits, batch["target"]), rtol=0, atol=1e-9
    )
    # Negative control: an uncertain teacher gives another loss.
    even = torch.zeros_like(certain).double()
    assert (soft_nll(logits, even) - token_nll(logits, batch["target"])).abs().max() > 0.1


def test_soft_nll_by_hand():
    # p = (1/2, 1/2) over the two shared tokens, q = (1/4, 1/4, 1/2): -log(1/4).
    q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64).log()
    expected = torch.tensor(4.0, dtype=torch.float64).log()
    torch.testing.assert_close(soft_nll(q, torch.zeros(2, dtype=torch.float64)), expected)


def test_soft_zero_is_equation_4_and_soft_one_is_the_teacher_s(tokenizer):
    _, batch = batch_of(tokenizer)
    hard, soft, half = (module_of(tokenizer, s) for s in (0.0, 1.0, 0.5))
    losses = [m.losses(batch) for m in (hard, soft, half)]
    torch.testing.assert_close(losses[2][0], (losses[0][0] + losses[1][0]) / 2)
    logits = draft_logits(hard.network, batch)
    torch.testing.assert_close(losses[0][0], token_nll(logits, batch["target"]))
    for m, (_, weight) in zip((hard, soft, half), losses):
        assert torch.equal(weight, m.weight(batch))


def test_the_teachers_share_is_taken_by_the_loss_that_is_named(tokenizer):
    _, batch = batch_of(tokenizer)
    found = {}
    for name in TEACHER_LOSSES:
        module = module_of(tokenizer, 0.5, teacher_loss=name)
        loss, weight = module.losses(batch)
        assert torch.equal(weight, module.weight(batch))
        (loss * weight).sum().backward()
        gradient = module.network.lm_head.weight.grad
        assert torch.isfinite(gradient).all()
        assert gradient.abs().sum() > 0
        found[name] = 2 * loss - token_nll(draft_logits(module.network, batch), batch["target"])
    logits, teacher = draft_logits(module.network, batch), module.target_states(batch).logits
    torch.testing.assert_close(found["kl"], soft_nll(logits, teacher))
    torch.testing.assert_close(found["total_variation"], total_variation(logits, teacher))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("module.soft=1.5", r"module.soft=1\.5 is not allowed: it must be less than or equal to 1"),
        ("module.teacher=nobody", r"unknown module.teacher 'nobody'.*'answers', 'target'"),
        ("module.teacher_loss=total_variatio", r"Did you mean 'total_variation'"),
    ],
)
def test_settings_that_no_recipe_may_have(given, says):
    with pytest.raises(ValueError, match=says):
        compose(["recipe=deer_stage2", given], "fit")


def test_settings_that_do_not_go_together(tokenizer):
    with pytest.raises(ValueError, match="teacher_loss=total_variation"):
        module_of(tokenizer, 1.0, teacher="answers", teacher_loss="total_variation")
    with pytest.raises(ValueError, match=r"teacher_loss=total_variation.*soft=0.*module\.soft"):
        module_of(tokenizer, 0.0, teacher_loss="total_variation")
