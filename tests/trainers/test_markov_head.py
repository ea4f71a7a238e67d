"""Training a Markov head: a task whose best answer is known, frozen drafters, exports, refusals."""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from data.corruption.draft_blocks import DraftBlocks, SuffixNoise
from data.text.tokenizer import with_draft_tokens
from decoding import SamplingParams, custom_generate, load
from decoding.drafting import markov
from decoding.samplers import deer
from decoding.samplers.deer import DeerSampler
from models.diffusion import draft_logits, from_causal_lm
from models.markov import MarkovHead
from tests.support import tiny
from tests.support.lab import finish
from tests.support.results import as_plain
from tests.support.runs import curve, cut, same_run, weights
from trainers import draft_vocabulary
from trainers.base import Optimization
from trainers.deer import Refinement
from trainers.losses.diffusion import token_nll

pytestmark = pytest.mark.usefixtures("forked")

N, K = 6, 4
V = 2 * N


def target():
    """A causal LM of pairs: after a token above N any below it, after u < N surely u + N.

    No layer does anything, so p is a table of the last token. Two positions after the committed
    text one of a pair is uniform, and yet known once the token before it is.
    """
    model = tiny.causal_lm(V, hidden=V)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(V))
        allowed = torch.zeros(V, V)
        allowed[N:, :N] = 1
        allowed[range(N), range(N, V)] = 1
        model.lm_head.weight.copy_(30 / V**0.5 * allowed.T)
    return model.float()


@pytest.fixture(scope="module")
def tokenizer():
    return with_draft_tokens(tiny.tokenizer(V))


def marginals(last):
    """The logits [..., K, V + 2] of the best independent positions after a token [...]."""
    token = torch.arange(V + 2)
    low, high = token < N, (token >= N) & (token < V)
    surely = token == last[..., None] + N
    after_high = torch.stack([low, high, low, high]).expand(*last.shape, K, V + 2)
    after_low = torch.stack([low, low, high, low]).repeat(*last.shape, 1, 1)
    after_low[..., 0, :] = surely
    return torch.where((last < N)[..., None, None], after_low, after_high) * 30.0


class IdealDrafter(Refinement):
    """The module of a drafter that knows all that independent positions can."""

    def draft_logits(self, batch, states):
        return marginals(batch["input_ids"].gather(1, batch["start"] - 1))


class IdealSampler(DeerSampler):
    """The sampler of this drafter."""

    def draft_logits(self, batch, k):
        last = batch.tokens.gather(1, batch.lengths[:, None] - 1)[:, 0]
        return self.fitted(marginals(last), [self.mask_id, self.sep_id])


def module_of(tokenizer, cls=Refinement, network=None, ema=None, **options):
    network = network or from_causal_lm(tiny.causal_lm(V).float(), tokenizer)
    given = {"method": "deer", "block_size": K, "target_name": "x", "alpha": 1.0, **options}
    return cls(network, tokenizer, Optimization(1e-3, ema=ema), target(), **given)


def batches(tokenizer, seed=0):
    """Endless batches of rows that the target says."""
    draw = torch.Generator().manual_seed(seed)
    blocks = DraftBlocks(12, K, SuffixNoise(K), tokenizer)
    while True:
        rows = []
        for _ in range(4):
            u = torch.randint(N, (16,), generator=draw)
            ids = torch.stack([u, u + N], 1).flatten()[int(torch.randint(2, (), generator=draw)) :]
            ids = ids[:30]
            everywhere = torch.ones_like(ids)
            row = {"input_ids": ids, "document": 0 * ids, "trained": everywhere}
            rows.append(blocks(row | {"position": torch.arange(30)}, draw))
        yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def train(module, tokenizer, steps, lr):
    adam = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr)
    for _, batch in zip(range(steps), batches(tokenizer)):
        loss, weight = module.losses(batch)
        adam.zero_grad()
        ((loss * weight).sum() / weight.sum()).backward()
        adam.step()
    return module


def acceptance_of(sampler, rule):
    """Tokens a target pass at T=1, without the last pass of an answer, which its end cuts."""
    params = SamplingParams(30, 1.0, verify=rule, ignore_eos=True)
    prompts = [[u, u + N] for u in range(N)]
    results = sampler.generate(prompts, params, seeds=[*range(N)])
    emitted = [n for r in results for n in r.stats.emitted[:-1]]
    return sum(emitted) / len(emitted)


def acceptance(tokenizer, head, rule):
    """That of the ideal drafter."""
    form = {"block_size": K, "mask_id": V, "sep_id": V + 1, "markov": head}
    drafter = tiny.causal_lm(V + 2).float()
    return acceptance_of(IdealSampler(target(), tokenizer, drafter, **form), rule)


def trained_head(tokenizer):
    return train(module_of(tokenizer, IdealDrafter, markov_rank=8), tokenizer, 100, 0.1).markov_head


@pytest.fixture(scope="module")
def head(tokenizer):
    return trained_head(tokenizer)


# Of one path, independent positions accept 2 + 2/N drafted tokens after u < N, fewer after others.
BEST = 3 + 2 / N


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "tree"])
def test_it_learns_what_independent_positions_cannot_know(tokenizer, head, rule):
    """The best answer is K + 1 = 5 tokens a pass, under every rule."""
    assert acceptance(tokenizer, None, rule) < BEST
    assert acceptance(tokenizer, head, rule) > 4.6


@pytest.mark.slow
def test_a_trained_drafter_gains_and_stays_as_it_is(tokenizer):
    """A real network, trained without a head and then frozen under one."""
    torch.manual_seed(0)
    network = from_causal_lm(tiny.causal_lm(V, hidden=32, scale=1.0).float(), tokenizer)
    module = train(module_of(tokenizer, network=network), tokenizer, 250, 3e-3)
    network.config.parade = module.export_config()
    before = {name: x.clone() for name, x in network.state_dict().items()}
    frozen = module_of(tokenizer, network=network, markov_rank=8, train_drafter=False)
    assert [name for name, p in frozen.named_parameters() if p.requires_grad] == [
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
    ]
    train(frozen, tokenizer, 100, 3e-2)
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items())
    without, found = (acceptance_of(m.sampler(), "rejection") for m in (module, frozen))
    assert without < BEST
    assert found > 1.5 * without


def test_the_wrong_token_before_teaches_nothing(tokenizer, monkeypatch):
    """Negative control: trained on the token two positions before, which tells nothing here."""
    previous = draft_vocabulary._previous
    two_before = lambda batch: torch.nn.functional.pad(previous(batch), (1, -1))  # noqa: E731
    monkeypatch.setattr(draft_vocabulary, "_previous", two_before)
    assert acceptance(tokenizer, trained_head(tokenizer), "rejection") < BEST


def test_the_token_before_is_the_answer_s_own(tokenizer):
    batch = next(batches(tokenizer))
    module = module_of(tokenizer, markov_rank=2)
    found = module.in_draft_vocabulary(batch)[draft_vocabulary.PREVIOUS]
    assert torch.equal(found[..., 1:], batch["target"][..., :-1])
    assert torch.equal(found[..., 0], batch["input_ids"].gather(1, batch["start"] - 1))
    ids = torch.tensor([7, 3, 1, 0])  # also those that the drafter does not draft
    module = module_of(tokenizer, markov_rank=2, draft_ids=ids)
    shapes = [tuple(p.shape) for p in module.markov_head.parameters()]
    assert shapes == [(V + 2, 2), (4, 2)]
    assert torch.equal(module.in_draft_vocabulary(batch)[draft_vocabulary.PREVIOUS], found)


def test_a_new_head_leaves_the_losses_as_they_are(tokenizer):
    batch = next(batches(tokenizer))
    without, new = (module_of(tokenizer, markov_rank=rank) for rank in (None, 3))
    expected, found = without.losses(batch), new.losses(batch)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    torch.nn.init.normal_(new.markov_head.markov_w1.weight)
    loss, _ = new.losses(batch)
    assert (loss - expected[0]).abs().amax((0, 1)).min() > 1e-2  # at each position
    last = batch["input_ids"].gather(1, batch["start"] - 1)
    before = torch.cat([last[..., None], batch["target"][..., :-1]], -1)
    logits = draft_logits(new.network, batch) + new.markov_head(before)
    torch.testing.assert_close(loss, token_nll(logits, batch["target"]))
    loss.sum().backward()  # jointly: both learn
    assert new.markov_head.markov_w2.weight.grad.abs().sum() > 0
    assert new.network.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"markov_rank": 0}, r"markov_rank=0 is not allowed: it must be from 1 to 14"),
        ({"markov_rank": 15}, r"markov_rank=15 is not allowed: it must be from 1 to 14"),
        ({"train_drafter": False}, r"train_drafter=false .*without a markov_rank"),
    ],
)
def test_bad_settings(tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        module_of(tokenizer, **options)


@pytest.mark.parametrize("entry", [None, {"method": "plain"}])
def test_a_head_alone_needs_a_trained_drafter(tokenizer, entry):
    network = from_causal_lm(tiny.causal_lm(V).float(), tokenizer)
    network.config.parade = entry
    with pytest.raises(ValueError, match=r"no trained drafter of method=deer"):
        module_of(tokenizer, network=network, markov_rank=2, train_drafter=False)


def test_a_head_that_is_left_behind_is_said(tokenizer):
    network = from_causal_lm(tiny.causal_lm(V).float(), tokenizer)
    network.config.parade = {"method": "deer", "markov_head": True}
    with pytest.warns(UserWarning, match="has a Markov head, which is left behind"):
        module_of(tokenizer, network=network, markov_rank=2)


def test_a_drafter_that_engines_run_is_to_be_trained_before_its_head():
    tokenizer = tiny.tokenizer(V)
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(V - 1)
    tokenizer = with_draft_tokens(tokenizer, "pard")
    network = from_causal_lm(tiny.causal_lm(V).float(), tokenizer)
    pard = {"layout": "pard", "network": network}
    with pytest.warns(UserWarning, match=r"layout=pard draft without .*train_drafter=false"):
        module = module_of(tokenizer, markov_rank=2, **pard)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module_of(tokenizer, **pard).export_files() == {}
    assert module.export_config()["markov_head"]
    assert [*module.export_files()] == [markov.FILE]


def test_what_a_head_does_not_go_with(tokenizer):
    with pytest.raises(ValueError, match=r"optimization\.ema=0\.9 .*module\.markov_rank"):
        module_of(tokenizer, ema=0.9, markov_rank=2)
    with pytest.raises(ValueError, match=r"nothing is left to train without a markov_rank"):
        module_of(tokenizer, train_drafter=False)
    module = module_of(tokenizer, markov_rank=2)
    sharded = []  # a strategy that shards takes the head too
    strategy = SimpleNamespace(shard=lambda networks, precision: sharded.extend(networks.items()))
    module._trainer = SimpleNamespace(strategy=strategy, precision="32-true")
    module.check_strategy(strategy)
    module.configure_model()
    assert sharded == [("network", module.network), ("markov_head", module.heads[0])]
    network = from_causal_lm(tiny.causal_lm(V).float(), tokenizer)
    network.peft_config = {}  # as an adapter's
    with pytest.raises(ValueError, match=r"lora\.rank=0"):
        module_of(tokenizer, network=network, markov_rank=2, train_drafter=False)


@pytest.mark.parametrize("aux_lr", [None, 0.05])
def test_a_head_may_have_a_rate_of_its_own(tokenizer, aux_lr):
    """Adam's first step moves each weight that has a gradient by its rate."""
    module = module_of(tokenizer, markov_rank=2)
    module.optimization = Optimization(
        1e-3, aux_lr, weight_decay=0.0, warmup_steps=0, schedule="constant"
    )
    module._trainer = SimpleNamespace(strategy=None, max_steps=10)
    (optimizer,), _ = module.configure_optimizers()
    before = {name: x.detach().clone() for name, x in module.named_parameters()}
    module.losses(next(batches(tokenizer)))[0].sum().backward()
    optimizer.step()
    moved = {name: (x - before[name]).abs().max() for name, x in module.named_parameters()}
    for name, rate in moved.items():
        if name == "markov_head.markov_w2.weight":
            assert rate == 0  # as U begins at 0, V has no gradient yet
        else:
            expected = aux_lr if name.startswith("markov_head") and aux_lr else 1e-3
            torch.testing.assert_close(rate, torch.tensor(expected), rtol=1e-2, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_a_recipe_s_export_decodes_with_its_head(lab, frozen):
    """Trained with the drafter, or on the finished one, whose weights and vocabulary stay."""
    finished = lab.runs / "deer_stage2" / "export"
    form = [f"name=head_{frozen}", "module.markov_rank=5", "optimization.aux_lr=0.1"]
    if frozen:
        form += ["module.train_drafter=false", f"drafter={finished}"]
    export = lab.fit("deer_stage2", *form)
    entry = json.loads((export / "config.json").read_text())["parade"]
    assert entry["markov_head"] is True
    ours, theirs = weights(export), weights(finished)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) is frozen
    head = markov.read(export / markov.FILE)
    assert head.markov_w1.weight.shape[1] == 5
    assert head.markov_w1.weight.abs().sum() > 0
    # Engines read every file of weights that they find.
    assert [f.name for f in export.glob("*.safetensors")] == ["model.safetensors"]
    sampler = load(str(export), dtype="float32")
    assert torch.equal(sampler.markov.head.markov_w1.weight, head.markov_w1.weight)
    without = load(str(export), dtype="float32", sampler=["markov_head=false"])
    assert without.markov is None
    for rule in ("coupled", "tree"):
        params = SamplingParams(24, 1.0, verify=rule, seed=3)
        for s in (sampler, without):
            as_plain(s, ["def value"], params)
    ids = sampler.tokenizer(["def value"], return_tensors="pt").input_ids
    stock = custom_generate.generate(
        deer.METHOD,
        AutoModelForCausalLM.from_pretrained(lab.runs / "ar_target" / "export"),
        drafter=str(export),
        input_ids=ids,
        max_new_tokens=12,
        do_sample=False,
    )
    (greedy,) = sampler.generate(["def value"], SamplingParams(12, 0.0))
    assert stock[0, ids.shape[1] :].tolist() == greedy.token_ids


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(lab):
    form = ("trainer.max_steps=6", "trainer.log_every=1", "module.markov_rank=5")
    whole = lab.fit("deer_stage2", *form, "name=head_whole").parent
    killed = cut(whole, "head_killed", 2)
    lab.fit("deer_stage2", *form, "name=head_killed")
    assert same_run(whole, killed)
    heads = [markov.read(run / "export" / markov.FILE) for run in (whole, killed)]
    assert torch.equal(*(head.markov_w1.weight for head in heads))


@pytest.mark.processes
def test_two_processes_give_the_loss_curve_of_one(lab):
    form = ["module.markov_rank=5", "trainer.max_steps=8", "trainer.log_every=1"]
    form += ["trainer.micro_batch_size=2", "optimization.aux_lr=0.03"]
    one = lab.fit("deer_stage2", *form, "name=head_one").parent
    two = ("trainer.devices=2", "strategy=ddp", "name=head_two")
    finish(lab.start("deer_stage2", *form, *two))
    ours, theirs = curve(one), curve(one.with_name("head_two"))
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[s] - theirs[s]) for s in ours) < 1e-5


def test_an_export_whose_head_is_another_is_refused(lab, monkeypatch):
    stored = markov.stored
    new = lambda head: MarkovHead(*(p.shape[0] for p in head.parameters()), 5)  # noqa: E731
    monkeypatch.setattr(markov, "stored", lambda head: stored(new(head)))
    with pytest.raises(ValueError, match="weights are not the trainer's"):
        lab.fit("deer_stage2", "name=other_head", "module.markov_rank=5")
    assert not (lab.runs / "deer_stage2" / "other_head" / "export").exists()


def test_a_head_that_an_export_lacks_is_one_line(lab):
    export = lab.runs / "deer_stage2" / "export"
    with pytest.raises(ValueError, match=r"markov_head\.tensors .*module\.markov_rank=64"):
        load(str(export), sampler=["markov_head=true"])
