"""Drafters that read noise: plain decoding's text under every rule, each request's own noise."""

from dataclasses import replace

import pytest
import torch

from decoding.calibration.tree_ranking import observed
from decoding.drafting import noise as noise_file
from decoding.drafting.noise import for_drafter
from decoding.engine.batch import Batch
from decoding.engine.params import KEYED, VERIFY, SamplingParams
from decoding.engine.randomness import KeyedRandomness
from decoding.samplers.deer import DeerSampler
from models.noise import NoiseInput
from tests.decoding import test_identity as texts
from tests.decoding.drafting.test_markov import EmitsTheDraft, head_of
from tests.decoding.test_exact_distribution import deer, distance
from tests.decoding.test_identity import PROMPTS, SEEDS, WARPS, ids, plain_rows
from tests.support import tiny

V = texts.V


def noise_of(sampler, scale=0.5):
    """A random noise input after the drafter's first layer, whose terms change the drafts."""
    noise_input = NoiseInput(sampler.drafter.config.hidden_size, [0])
    draw = torch.Generator().manual_seed(7)
    torch.nn.init.normal_(noise_input.project[0].weight, std=scale, generator=draw)
    return noise_input.to(sampler.drafter.dtype)


def reading(sampler):
    sampler.noise_input = noise_of(sampler)
    return sampler


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_it_has_the_plain_distribution(rule):
    params = SamplingParams(max_new_tokens=3, verify=rule)
    assert distance(reading(deer(3, 2)), params) <= 1e-9


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_no_noise_is_read_where_drafts_are_accepted_by_chance(rule):
    params = SamplingParams(max_new_tokens=12, verify=rule)
    plain, found = (texts.deer(texts.target(), texts.random_drafter(), 3) for _ in range(2))
    expected = plain.generate(PROMPTS, params, seeds=SEEDS)
    assert ids(reading(found).generate(PROMPTS, params, seeds=SEEDS)) == ids(expected)


class VerifiesWithTheNoise(DeerSampler):
    """Wrong: q has read noise that chose the draft, and is no distribution it was drawn from."""

    def draft_chain(self, batch, k, noise, params):
        draft, _ = super().draft_chain(batch, k, noise, params)
        chosen = 50 * torch.nn.functional.one_hot(draft, self.vocabulary).double()
        with self.reading_noise(batch, k, chosen, replace(params, verify="coupled")):
            return draft, self.draft_pass(batch, k, params).softmax(-1)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_q_that_knows_how_its_draft_was_chosen_fails_the_same_test(rule):
    sampler = reading(deer(3, 2))
    sampler.__class__ = VerifiesWithTheNoise
    assert distance(sampler, SamplingParams(max_new_tokens=3, verify=rule)) > 1e-3


@pytest.mark.parametrize("rule", KEYED)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", ["no warp", "all"])
def test_the_text_is_plain_decoding_s(name, temperature, rule):
    model = texts.target()
    params = SamplingParams(18, temperature, verify=rule, **WARPS[name])
    expected = ids(plain_rows(model, params))
    for head in (None, head_of(V + 2)):
        for drafter, k in ((texts.random_drafter(), 3), (texts.drafter_of_target(model), 6)):
            sampler = reading(texts.deer(model, drafter, k, markov=head))
            assert ids(sampler.generate(PROMPTS, params, seeds=SEEDS)) == expected


@pytest.mark.parametrize("rule", KEYED)
def test_a_wrong_sampler_has_another_text(rule):
    model, params = texts.target(), SamplingParams(18, 1.0, verify=rule)
    broken = reading(texts.deer(model, texts.random_drafter(), 3, EmitsTheDraft))
    found = broken.generate(PROMPTS, params, seeds=SEEDS)
    assert ids(found) != ids(plain_rows(model, params))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", VERIFY)
def test_a_batch_is_row_for_row_a_batch_of_one(rule, temperature):
    """Each request reads its own noise, and joins and leaves with it."""
    model = texts.target(eos_token_id=4)
    params = SamplingParams(max_new_tokens=16, temperature=temperature, verify=rule)
    sampler = reading(texts.deer(model, texts.drafter_of_target(model), 3))
    together = sampler.generate(PROMPTS, params, seeds=SEEDS)
    alone = [sampler.generate([p], params, seeds=[s])[0] for p, s in zip(PROMPTS, SEEDS)]
    assert ids(together) == ids(alone)
    assert [r.stats.emitted for r in together] == [r.stats.emitted for r in alone]
    joined = sampler.generate(PROMPTS, params, seeds=SEEDS, at_once=2)
    assert ids(joined) == ids(alone)
    assert [r.stats.emitted for r in joined] == [r.stats.emitted for r in alone]


class AnotherRowsNoise(DeerSampler):
    """Wrong: each request reads its neighbour's noise."""

    def reading_noise(self, batch, k, noise, params):
        return super().reading_noise(batch, k, noise.roll(1, 0), params)


def test_another_row_s_noise_drafts_otherwise():
    """Negative control: the text is the same, but not how many tokens a pass emits."""
    model, params = texts.target(), SamplingParams(16, 1.0, verify="coupled")
    found = []
    for cls in (DeerSampler, AnotherRowsNoise):
        sampler = reading(texts.deer(model, texts.drafter_of_target(model), 3, cls))
        found.append(sampler.generate(PROMPTS, params, seeds=SEEDS))
    assert ids(found[0]) == ids(found[1])
    assert [r.stats.emitted for r in found[0]] != [r.stats.emitted for r in found[1]]


@pytest.mark.parametrize("attention", ["prefix_causal", "bidirectional", "causal"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@torch.inference_mode()
def test_the_last_choice_is_the_candidate_of_a_drafter_that_ends_there(temperature, attention):
    """Candidates after the last layer are the drafts: argmax(log q / T + g), of this request."""
    causal = attention == "causal"  # PARD has no separator
    form = {"mask_id": 0} if causal else {"mask_id": V, "sep_id": V + 1}
    sampler = DeerSampler(
        texts.target(),
        tiny.tokenizer(V),
        texts.random_drafter(V if causal else V + 2),
        block_size=3,
        attention=attention,
        **form,
    )
    sampler.noise_input = NoiseInput(sampler.drafter.config.hidden_size, [1])
    params = SamplingParams(8, temperature, verify="coupled")
    batch = Batch(PROMPTS, 64, KeyedRandomness(SEEDS), "cpu")
    sampler.begin(batch, params)
    noise = sampler.noise(batch, 4, params)
    with sampler.reading_noise(batch, 3, noise, params) as early:
        logits = sampler.draft_logits(batch, 3)
    read = for_drafter(noise, temperature, early[0][:, 0].shape, None, sampler.never, "cpu")
    candidates = (early[0] + read)[:, 0].argmax(-1)
    warped = sampler.warped_draft(logits, batch, params)
    draft, _ = sampler._drawn(warped, noise, batch, params)
    assert torch.equal(candidates, draft)
    if temperature:
        assert not torch.equal((early[0] + read.roll(1, 2))[:, 0].argmax(-1), draft)


def test_a_drafter_s_own_tokens():
    """Padding of either side, a smaller vocabulary, tokens that are never drafted."""
    noise = torch.arange(10.0).view(1, 2, 5)
    found = for_drafter(noise, 0.5, (1, 1, 7), None, [1], "cpu")
    inf = torch.inf
    assert found.tolist() == [[[[0, -inf, 1, 1.5, 2, -inf, -inf]]]]
    found = for_drafter(noise, 2.0, (1, 2, 3), torch.tensor([4, 0, 2]), [2], "cpu")
    assert found.tolist() == [[[[8, 0, -inf], [18, 10, -inf]]]]
    assert for_drafter(noise, 1.0, (1, 2, 3), None, [], "cpu")[0, 0, 1].tolist() == [5, 6, 7]
    assert for_drafter(None, 0.0, (1, 1, 3), None, [2], "cpu").tolist() == [[[[0, 0, -inf]]]]


def test_a_calibration_sees_what_is_drafted():
    """z is of the pass that read the noise; without noise it is another."""
    model = texts.target()
    params = SamplingParams(20, 1.0, verify="tree", seed=3, ignore_eos=True)
    plain = observed(texts.deer(model, texts.random_drafter(), 3), PROMPTS, params)
    z, choice = observed(reading(texts.deer(model, texts.random_drafter(), 3)), PROMPTS, params)
    assert torch.equal(choice, plain[1])
    assert (z - plain[0])[z.isfinite()].abs().max() > 1e-2


def test_a_file_keeps_it_and_a_wrong_one_is_one_line(tmp_path):
    noise_input, file = NoiseInput(4, [0, 2]), tmp_path / noise_file.FILE
    torch.nn.init.normal_(noise_input.project[1].weight)
    file.write_bytes(noise_file.stored(noise_input))
    found = noise_file.read(file)
    assert found.layers == (0, 2)
    state = noise_input.state_dict()
    assert found.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[k]) for k, x in found.state_dict().items())
    broken, narrow = NoiseInput(4, [0]), NoiseInput(4, [0])
    broken.project[0].weight.data[0, 0] = torch.nan
    narrow.project[0].weight.data = narrow.project[0].weight.data[:, :1]
    for content in (b"no tensors", noise_file.stored(broken), noise_file.stored(narrow), None):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(ValueError, match=r"noise_input\.tensors .*noise_input=false") as error:
            noise_file.read(file)
        assert "\n" not in str(error.value)
