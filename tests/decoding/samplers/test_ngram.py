"""n-grams as drafts: lossless under every rule, and fewer passes where texts repeat themselves."""

import json
import shutil
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpora.answers import read_answers
from decoding.drafting.ngrams import Ngrams
from decoding.drafting.prompt_lookup import TRUST
from decoding.drafting.tree import best_first, suffix_of
from decoding.engine.params import SamplingParams
from decoding.loading import load
from decoding.samplers.ngram import CheckedLookup, NgramSampler
from decoding.samplers.plain import PlainSampler
from decoding.serve import Serve, paced
from tests.support import recurrent, tiny
from tests.support.lossless import prove
from tests.support.results import ids
from tests.support.texts import PROMPTS, SEEDS, V, plain_rows, target
from tests.support.trees import assert_likeliest

NEW = 40


def sampler_of(model, **knobs):
    return NgramSampler(model, tiny.tokenizer(V), **{"block_size": 4, "nodes": 6} | knobs)


def passes(sampler, params):
    """The target's passes for all prompts one by one, whose texts are plain decoding's."""
    asked = zip(PROMPTS, SEEDS)
    found = [sampler.generate([p], params, seeds=[seed])[0] for p, seed in asked]
    assert ids(found) == ids(plain_rows(sampler.target, params))
    return sum(r.stats.target_passes for r in found)


def test_lossless():
    prove(lambda *of: NgramSampler(*of, block_size=3, nodes=5, least=0))  # drafts in every pass


@pytest.mark.parametrize(("requests", "drafts"), [(4, True), (16, False)])
def test_many_requests_are_decoded_without_drafts(requests, drafts):
    params = SamplingParams(NEW, 0.0, ignore_eos=True)
    sampler, prompts = sampler_of(target()), [PROMPTS[n % len(PROMPTS)] for n in range(requests)]
    plain = PlainSampler(sampler.target, sampler.tokenizer).generate(prompts, params)
    for _ in range(2):  # the second time all is known
        found = sampler.generate(prompts, params)
    assert ids(found) == ids(plain)
    assert any(r.stats.drafted for r in found) == drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verify", ["coupled", "tree"])
def test_earlier_answers_save_passes_and_change_no_text(temperature, verify):
    params = SamplingParams(NEW, temperature, verify=verify, ignore_eos=True)
    sampler = sampler_of(target())
    first, second = (passes(sampler, params) for _ in range(2))
    assert second < 0.8 * first
    assert passes(sampler.fresh(), params) == first
    forgetful = sampler_of(target(), kept_tokens=0)
    alone = passes(forgetful, params)
    assert passes(forgetful, params) == alone > second


def test_answers_of_a_batch_are_kept_when_they_end():
    sampler = sampler_of(target())
    sampler.generate(PROMPTS, [SamplingParams(3 + n, 0.0, ignore_eos=True) for n in range(5)])
    # The prompts have 1 to 8 tokens; the first three of each text are contexts only. The last pass
    # may have found more than was asked for.
    known = sum(min(3, len(p)) + n for n, p in enumerate(PROMPTS))
    assert known <= len(sampler.ngrams) < known + 5 * 6


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=20), max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(1, 6),
)
def test_nodes_are_the_likeliest_prefixes(texts, prompt, nodes):
    sampler = NgramSampler(tiny.causal_lm(3).float(), tiny.tokenizer(3), least=0)
    sampler.ngrams.add(texts)
    batch, _ = sampler.start(prompt)
    sampler.begin_drafting(batch, ())
    (children,) = sampler.children(batch, None)
    found, (text,) = best_first(children, nodes), batch.state.texts

    def after(path, token):
        suffix = suffix_of(text, path)
        guesses, share = text.guesses(suffix)
        known = sampler.ngrams.after(suffix).get(token, 0.0)
        # Nothing speaks for it: of the first tokens it is a candidate, of others none.
        return (1 - share) * known + share * guesses.get(token, 0.0) or (0.0 if path else 1e-9)

    def chance(prefix):
        return prod(after(tuple(prefix[:i]), prefix[i]) for i in range(len(prefix)))

    assert_likeliest(found, chance, nodes, len(found.token))


def test_noise_ranks_as_the_target_chooses():
    """The candidates' scores are log softmax(log p + g), with unseen tokens' share of it."""
    sampler = sampler_of(target())
    sampler.ngrams.add([[1, 2, 3, v] for v in (4, 4, 4, 5)])
    batch, _ = sampler.start([7, 1, 2, 3])
    sampler.begin_drafting(batch, ())
    noise = torch.randn(1, 5, V, generator=torch.Generator().manual_seed(3))
    tokens, scores = sampler.children(batch, noise)[0](())
    p = sampler.ngrams.after((1, 2, 3))
    assert p.keys() == {4, 5}
    rest = 1 - sum(p.values())
    weights = {v: p[v] * noise[0, 0, v].exp().item() for v in p}
    total = sum(weights.values()) + rest * noise[0, 0].exp().mean().item()
    best = sorted(weights, key=weights.get, reverse=True)
    assert tokens[:2] == best
    assert [*torch.tensor(scores[:2]).exp()] == pytest.approx([weights[v] / total for v in best])
    assert sampler.children(batch, noise)[0]((1, 2, 3, 4)) == ([], [])  # no noise is drawn for it


def test_the_share_of_a_texts_right_guesses():
    text = CheckedLookup([1, 2, 3])
    assert text.share == 1
    for token, probability, new in ((4, 0.5, [4, 5]), (6, 0.9, [7]), (8, 0.8, [8])):
        text.guess(token, probability)
        text.extend([])
        text.extend(new)
    text.extend([9])  # nothing was guessed
    assert text.share == pytest.approx((TRUST + 2) / (TRUST + 2.2))
    assert text.suffix == (3, 4, 5, 7, 8, 9)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_that_do_not_come_true_grow_fewer(temperature, monkeypatch):
    """After every token the collected texts say another one than the target."""

    def drafted():
        sampler = sampler_of(target(), kept_tokens=0)
        sampler.ngrams = Ngrams(V, 1000)
        sampler.ngrams.add([[a, b, c, (c + 1) % V] * 3 for a in range(3) for b in range(3)
                            for c in range(V)])  # fmt: skip
        params = SamplingParams(NEW, temperature, verify="tree", ignore_eos=True)
        found = sampler.generate([PROMPTS[1]], params, seeds=[SEEDS[1]])
        assert ids(found) == [ids(plain_rows(sampler.target, params))[1]]
        return found[0].stats.drafted

    few = drafted()
    monkeypatch.setattr(CheckedLookup, "share", 1.0)  # the negative control
    assert few < 0.8 * drafted()


def test_a_target_with_a_recurrent_state_verifies_chains():
    sampler = sampler_of(recurrent.model("qwen3_5_text", V))
    for temperature in (0.0, 1.0):
        params = SamplingParams(NEW, temperature, ignore_eos=True)
        first, second = (passes(sampler, params) for _ in range(2))
        assert second < first
    with pytest.raises(ValueError, match="take chains only"):
        sampler.generate(PROMPTS, SamplingParams(3, verify="tree"))


def test_a_server_does_not_time_them(lab):
    export = str(lab.runs / "deer_stage2" / "export")
    drafter = Serve(model=export)
    assert paced(load(export), drafter).pace is not None
    assert paced(sampler_of(target()), drafter).pace is None


def test_rules_that_draw_are_not_offered():
    with pytest.raises(ValueError, match=r"verify='rejection' is not offered.*coupled.*tree"):
        sampler_of(target()).generate(PROMPTS, SamplingParams(3, 1.0, verify="rejection"))


def test_collected_answers_are_earlier_ones(lab):
    path, answers = str(lab.runs / "ar_target" / "export"), str(lab.runs / "deer_answers")
    known = load(path, sampler=["method=ngram", f"answers={answers}"])
    new = load(path, sampler=["method=ngram"])
    (first, *_) = read_answers(answers, "train")
    prompt = [t for t, trained in zip(first.ids, first.trained) if not trained]
    params = SamplingParams(sum(first.trained), 0.0, ignore_eos=True)
    found = [s.generate([prompt], params)[0] for s in (known, new)]
    assert len(new.ngrams) < len(known.ngrams)
    static = load(path, sampler=["method=ngram", f"answers={answers}", "kept_tokens=0"])
    counted = len(static.ngrams)
    static.generate([prompt], params)
    assert 0 < len(static.ngrams) == counted < len(known.ngrams)
    assert found[0].token_ids == found[1].token_ids
    assert found[0].stats.target_passes <= found[1].stats.target_passes


def test_an_export_names_no_folder_of_this_machine(lab, tmp_path):
    folder = tmp_path / "export"
    shutil.copytree(lab.runs / "ar_target" / "export", folder)
    config = json.loads((folder / "config.json").read_text())
    config["parade"] = {"method": "ngram", "nodes": 4}
    (folder / "config.json").write_text(json.dumps(config))
    assert isinstance(load(str(folder)), NgramSampler)
    config["parade"]["answers"] = "/home"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"config\.json: parade\.answers is not allowed: an export"
    ):
        load(str(folder))


def test_folders_that_are_no_answers(lab):
    path = str(lab.runs / "ar_target" / "export")
    with pytest.raises(ValueError, match="no collection at nowhere"):
        load(path, sampler=["method=ngram", "answers=nowhere"])
