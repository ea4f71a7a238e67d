"""Training a drafter that reads noise: a task whose best answer is known, exports, refusals."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from data.corruption.draft_blocks import DraftBlocks, SuffixNoise
from data.text.tokenizer import with_draft_tokens
from decoding import SamplingParams, custom_generate, load
from decoding.bench import limits
from decoding.drafting import noise as noise_file
from decoding.engine.randomness import KeyedRandomness
from decoding.samplers import deer
from decoding.samplers.deer import DeerSampler
from decoding.samplers.plain import PlainSampler
from models.diffusion import from_causal_lm
from models.noise import NoiseInput
from tests.support import tiny
from tests.support.runs import curve, cut, same_run
from tests.trainers.test_dflash import module as dflash_module
from tests.trainers.test_markov_head import weights
from trainers.base import Optimization
from trainers.deer import Distillation, Refinement
from trainers.losses.diffusion import soft_nll

V, K = 32, 4


def transitions():
    draw = torch.Generator().manual_seed(0)
    return (2 * torch.randn(V, V, generator=draw)).softmax(-1)


P = transitions()


def target():
    """A causal LM of a Markov chain: no layer does anything, so p is a table of the last token."""
    model = tiny.causal_lm(V, hidden=V)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(V**-0.5)
        model.model.embed_tokens.weight.copy_(torch.eye(V))
        model.lm_head.weight.copy_(P.log().T)
    return model.float()


@pytest.fixture(scope="module")
def tokenizer():
    return with_draft_tokens(tiny.tokenizer(V))


def drafter(tokenizer):
    return from_causal_lm(
        tiny.causal_lm(V, layers=3, hidden=64, scale=1.0).float(),
        tokenizer,
    )


def module_of(tokenizer, cls=Refinement, network=None, ema=None, **options):
    given = {"method": "deer", "block_size": K, "target_name": "x"}
    if cls is Refinement:
        given |= {"alpha": 1.0, "soft": 1.0}
    network, teacher = network or drafter(tokenizer), target()
    if options.get("layout") == "pard":  # whose mask is a token of the target
        teacher.resize_token_embeddings(network.config.vocab_size)
    return cls(network, tokenizer, Optimization(1e-3, ema=ema), teacher, **given | options)


def batches(tokenizer, layout="separator", temperature=1.0):
    """Endless batches of texts that the target says, K tokens after a first one, and their blocks.

    A row has 16 texts, and a block after the first token of each.
    """
    draw = torch.Generator().manual_seed(1)
    blocks = DraftBlocks(16, K, SuffixNoise(K), tokenizer, layout)
    every = torch.arange(16 * (1 + K))
    row = {"document": every // (1 + K), "position": every % (1 + K), "trained": 0 * every + 1}
    row["temperature"] = torch.full(every.shape, temperature)
    noise = SuffixNoise(K)(16, K, draw)
    while True:
        text = [torch.randint(V, (8 * 16, 1), generator=draw)]
        for _ in range(K):
            text.append(torch.multinomial(P[text[-1][:, 0]], 1, generator=draw))
        rows = [
            blocks.lay_out(row | {"input_ids": ids}, every[:: 1 + K] + 1, noise)
            | {"seed": torch.randint(2**62, (), generator=draw)}
            for ids in torch.cat(text, 1).view(8, -1)
        ]
        yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def train(module, tokenizer, steps, lr=3e-3, layout="separator"):
    adam = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, lr, steps, pct_start=0.1)
    for _, batch in zip(range(steps), batches(tokenizer, layout)):
        loss, weight = module.losses(batch)
        adam.zero_grad()
        ((loss * weight).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        adam.step()
        schedule.step()
    return module


def independent_limit(draws=4000):
    """Tokens a pass that no drafter exceeds whose position i reads the prefix and g_i alone.

    Given g_i, the target's token at i is a function of the one before it, so the best guess is
    right with the share of those that lead to the likeliest token. All of the first i are right no
    more often than the worst of them is.
    """
    draw = torch.Generator().manual_seed(2)
    before = torch.eye(V)[torch.randint(V, (draws,), generator=draw)]
    right = []
    for _ in range(K):
        noise = -torch.empty(draws, V).exponential_(generator=draw).log()
        choice = (P.log() + noise[:, None]).argmax(-1)
        share = torch.zeros(draws, V).scatter_add_(1, choice, before)
        right.append(share.amax(-1).mean())
        before = before @ P
    return 1 + torch.stack(right).cummin(0).values.sum().item()


def acceptance(sampler, rule="coupled"):
    """Tokens of the first pass at T=1, of each first token many times."""
    params = SamplingParams(K + 1, 1.0, verify=rule, ignore_eos=True)
    prompts = [[u] for u in range(V)] * 24
    results = sampler.generate(prompts, params, seeds=[*range(len(prompts))])
    return sum(r.stats.emitted[0] for r in results) / len(results)


class OtherNoise(DeerSampler):
    """Wrong: the drafter reads the noise of another seed, at the same positions."""

    def reading_noise(self, batch, k, noise, params):
        other = KeyedRandomness([10**6 + request for request in batch.requests])
        positions = batch.lengths[:, None] + torch.arange(k)
        return super().reading_noise(batch, k, other.gumbel(positions, V), params)


def test_it_knows_what_independent_positions_cannot(tokenizer):
    """The best answer is K + 1 = 5 tokens a pass; another seed's noise is no help."""
    module = train(module_of(tokenizer, noise_layers=[0, 1]), tokenizer, 300)
    sampler, limit = module.sampler(), independent_limit()
    found = acceptance(sampler)
    sampler.__class__ = OtherNoise
    other = acceptance(sampler)
    print(found, limit, other)
    assert found > limit + 0.2
    assert other < limit - 0.2


def test_it_conditions_on_greedy_candidates_at_temperature_0(tokenizer):
    """Without noise the loss is of texts that the target says at temperature 0."""
    module = module_of(tokenizer, noise_layers=[0])
    batch = module.in_draft_vocabulary(next(batches(tokenizer, temperature=0.0)))
    noise = module.noise_of(batch, module.target_states(batch))
    assert (noise[..., :V] == 0).all()
    assert (noise[..., V:] == -torch.inf).all()  # mask and separator


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("teacher", ["target", "answers"])
def test_the_noise_chooses_the_text(tokenizer, temperature, teacher):
    """argmax(log p / T + g) is the batch's token, at its temperature; with a row's own seed."""
    module = module_of(tokenizer, noise_layers=[0], teacher=teacher)
    batch = next(batches(tokenizer, temperature=temperature))
    before = batch["input_ids"].gather(1, (batch["start"] - 1))[..., None]
    p = P[torch.cat([before, batch["target"][..., :-1]], -1)]
    if teacher == "answers":
        probs, ids = p.topk(V)
        batch |= {"teacher_ids": ids, "teacher_probs": probs}
    batch = module.in_draft_vocabulary(batch)
    states = module.target_states(batch)
    read = module.noise_of(batch, states)
    chosen = (p.log() + read[..., :V]).argmax(-1)  # of log p / T + g, times T
    assert torch.equal(chosen, batch["target"])
    other = (p.log() + read[..., :V].roll(1, 1)).argmax(-1)  # negative control
    assert (other != batch["target"]).float().mean() > 0.2
    alone = {name: x[2:3] for name, x in batch.items()}
    found = module.noise_of(alone, states._replace(logits=states.logits[2:3]))
    assert torch.equal(found[0], read[2])


def test_a_smaller_vocabulary_reads_its_own_tokens(tokenizer):
    """Noise of a text's token that the drafter does not have chooses none of its own."""
    ids = torch.tensor([*range(20, 30), 3])
    module = module_of(tokenizer, noise_layers=[0], draft_ids=ids)
    batch = module.in_draft_vocabulary(next(batches(tokenizer)))
    noise = module.noise_of(batch, module.target_states(batch))
    assert noise.shape[-1] == len(ids)
    assert noise.isfinite().all()
    p = module.target_states(batch).logits.log_softmax(-1)
    known = batch["masked"]
    assert 0.1 < known.float().mean() < 0.9
    assert torch.equal((p + noise).argmax(-1)[known], batch["target"][known])
    module.losses(next(batches(tokenizer)))[0].sum().backward()
    assert module.noise_input.project[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("layout", ["separator", "pard"])
def test_a_new_one_adds_the_early_losses_alone(tokenizer, layout):
    """The drafter's own logits are as they were; of the layer before there is a loss, too."""
    tokens = tokenizer
    if layout == "pard":  # its mask is a token that the target has, and text does not
        tokens = tiny.tokenizer(V)
        tokens.add_special_tokens({"additional_special_tokens": ["<spare>"]})
        tokens = with_draft_tokens(tokens, layout)
    batch = next(batches(tokens, layout))
    networks = [drafter(tokens) for _ in range(2)]
    without = module_of(tokens, network=networks[0], layout=layout)
    new = module_of(tokens, network=networks[1], layout=layout, noise_layers=[1])
    known = new.in_draft_vocabulary(batch)
    (logits, loss, _), (expected, nll, _) = new.forward_pass(known), without.forward_pass(known)
    assert torch.equal(logits, expected)
    early = loss - nll
    assert (early > 0).all()
    teacher = new.target_states(known).logits
    torch.testing.assert_close(nll, soft_nll(expected, teacher))
    loss.sum().backward()
    assert new.noise_input.project[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_layers": []}, r"noise_layers=\[\] is not allowed: .* from 0 to 1"),
        ({"noise_layers": [2]}, r"noise_layers=\[2\] is not allowed: .* from 0 to 1"),
        ({"noise_layers": [1, 0]}, r"noise_layers=\[1, 0\] is not allowed"),
        ({"noise_layers": [0], "soft": 0.9}, r"soft=0\.9 is not allowed .*module\.soft=1"),
        ({"noise_layers": [0], "ema": 0.9}, r"optimization\.ema=0\.9 .*module\.noise_layers"),
        ({"noise_layers": [0], "cls": Distillation}, "Distillation .*whose noise it does not know"),
        ({"noise_layers": [0], "train_drafter": False}, "no trained drafter of method=deer"),
        ({"train_drafter": False}, "module.markov_rank or module.noise_layers"),
    ],
)
def test_bad_settings(tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        module_of(tokenizer, **options)


def test_what_it_does_not_go_with(tokenizer):
    with pytest.raises(ValueError, match=r"DFlash .*whose noise it does not know"):
        dflash_module(tiny.causal_lm(V), noise_layers=[0])
    module = module_of(tokenizer, noise_layers=[0], markov_rank=2)
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(shard=None))
    with pytest.raises(ValueError, match=r"markov_rank and module\.noise_layers .*strategy=ddp"):
        module.configure_model()
    batch = next(batches(tokenizer))
    del batch["temperature"]
    with pytest.raises(ValueError, match="temperature that each text was drawn at"):
        module.losses(batch)
    network = drafter(tokenizer)
    network.config.parade = {"method": "deer", "noise_input": True}
    with pytest.warns(UserWarning, match="has a noise input, which is left behind"):
        module_of(tokenizer, network=network)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_recipe_s_export_decodes_with_it(lab, frozen):
    """Trained with the drafter, or on the finished one, whose weights stay."""
    finished = lab.runs / "deer_stage2" / "export"
    form = [f"name=noise_{frozen}", "module.noise_layers=[0]", "module.soft=1.0"]
    form += ["optimization.beside_lr=0.05"]
    if frozen:
        form += ["module.train_drafter=false", f"drafter={finished}"]
    export = lab.fit("deer_stage2", *form)
    entry = json.loads((export / "config.json").read_text())["parade"]
    assert entry["noise_input"] is True
    ours, theirs = weights(export), weights(finished)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) is frozen
    found = noise_file.read(export / noise_file.FILE)
    assert found.layers == (0,)
    assert found.project[0].weight.abs().sum() > 0
    # Engines read every file of weights that they find.
    assert [f.name for f in export.glob("*.safetensors")] == ["model.safetensors"]
    sampler = load(str(export), dtype="float32")
    assert torch.equal(sampler.noise_input.project[0].weight, found.project[0].weight)
    without = load(str(export), dtype="float32", sampler=["noise_input=false"])
    assert without.noise_input is None
    for rule in ("coupled", "tree"):
        params = SamplingParams(24, 1.0, verify=rule, seed=3)
        plain = PlainSampler(sampler.target, sampler.tokenizer).generate(["def value"], params)
        for s in (sampler, without):
            assert s.generate(["def value"], params)[0].token_ids == plain[0].token_ids
    with pytest.raises(ValueError, match=r"reads the noise of decoding, .* no such limit"):
        limits.run([f"model={export}"])
    ids = sampler.tokenizer(["def value"], return_tensors="pt").input_ids
    stock = custom_generate.generate(
        deer,
        AutoModelForCausalLM.from_pretrained(lab.runs / "ar_target" / "export"),
        drafter=str(export),
        input_ids=ids,
        max_new_tokens=12,
        do_sample=False,
    )
    (greedy,) = sampler.generate(["def value"], SamplingParams(12, 0.0))
    assert stock[0, ids.shape[1] :].tolist() == greedy.token_ids


FORM = ("trainer.max_steps=6", "trainer.log_every=1", "module.noise_layers=[0]", "module.soft=1.0")


def test_a_killed_run_goes_on_as_if_it_had_not_been(lab):
    whole = lab.fit("deer_stage2", *FORM, "name=noise_whole").parent
    killed = cut(whole, "noise_killed", 2)
    lab.fit("deer_stage2", *FORM, "name=noise_killed")
    assert same_run(whole, killed)
    found = [noise_file.read(run / "export" / noise_file.FILE) for run in (whole, killed)]
    assert torch.equal(*(noise_input.project[0].weight for noise_input in found))


def test_the_loss_does_not_depend_on_how_a_step_is_split(lab):
    form = [*FORM, "optimization.beside_lr=0.03"]
    whole = lab.fit("deer_stage2", *form, "name=noise_one").parent
    split = ["trainer.micro_batch_size=2", "name=noise_split"]
    lab.fit("deer_stage2", *form, *split)
    ours, theirs = curve(whole), curve(whole.with_name("noise_split"))
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[s] - theirs[s]) for s in ours) < 1e-5


def test_an_export_whose_noise_input_is_another_is_refused(lab, monkeypatch):
    stored = noise_file.stored
    monkeypatch.setattr(noise_file, "stored", lambda found: stored(NoiseInput(32, [0])))
    with pytest.raises(ValueError, match="weights are not the trainer's"):
        lab.fit("deer_stage2", *FORM, "name=other_noise")
    assert not (lab.runs / "deer_stage2" / "other_noise" / "export").exists()


def test_a_compiled_drafter_and_a_missing_file_are_one_line(lab):
    for key in ("compile", "checkpoint_activations"):
        with pytest.raises(ValueError, match=rf"trainer\.{key}=true .*module\.noise_layers"):
            lab.fit("deer_stage2", *FORM, f"name={key}", f"trainer.{key}=true")
    with pytest.raises(ValueError, match=r"noise_input\.tensors .*module\.noise_layers"):
        load(str(lab.runs / "deer_stage2" / "export"), sampler=["noise_input=true"])
