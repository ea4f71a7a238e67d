"""Constrained answers: exact distributions, plain decoding's texts, and wrong constraints."""

import re
from dataclasses import replace

import pytest
import torch
from tokenizers import decoders

from decoding.engine.grammar import Constraint
from decoding.engine.params import KEYED, SamplingParams
from decoding.samplers.jacobi import JacobiSampler
from decoding.samplers.ngram import NgramSampler
from decoding.samplers.plain import PlainSampler
from tests.support import texts, tiny
from tests.support.enumerating import output_distribution
from tests.support.exact import deer
from tests.support.results import ids
from tests.support.samplers import dflash, head_of
from tests.support.texts import PROMPTS, SEEDS, V

pytest.importorskip("llguidance")

PATTERN = "(ab|b){1,2}"  # over the letters of tokens 0 and 1; token 2 ends an answer
LANGUAGE = ["ab", "b", "abab", "abb", "bab", "bb"]
END = 2


def allowed(answer):
    """The tokens that may follow, by the words themselves."""
    said = "".join("abc"[t] for t in answer)
    longer = {w[len(said)] for w in LANGUAGE if w.startswith(said) and len(w) > len(said)}
    return {"abc".index(letter) for letter in longer} | ({END} if said in LANGUAGE else set())


def distance(sampler, params):
    prompt = [0, 1, 1]
    found = output_distribution(sampler, prompt, params)
    expected = tiny.plain_distribution(sampler.target, prompt, params, {END}, allowed)
    return tiny.total_variation(found, expected)


def readable(sampler):
    """The sampler with a tokenizer whose tokens llguidance reads as bytes."""
    sampler.tokenizer = tiny.tokenizer(sampler.vocabulary, decoders.ByteLevel())
    return sampler


FORMS = {
    "independent": lambda: deer(3, 2, END),
    "Markov head": lambda: deer(3, 2, END, markov=head_of(5)),
    "without the b of every word": lambda: deer(3, 2, END, draft_ids=torch.tensor([2, 0])),
    "tail": lambda: dflash(tiny.causal_lm(3, eos_token_id=END), 2, layout="dspark", tail=1),
}


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("form", FORMS)
def test_drafts_have_the_plain_distribution_under_a_grammar(form, rule, monkeypatch):
    sampler = readable(FORMS[form]())
    params = SamplingParams(max_new_tokens=5, verify=rule, grammar=f"/{PATTERN}/")
    assert distance(sampler, params) <= 1e-9
    right = Constraint.allowed
    monkeypatch.setattr(Constraint, "allowed", lambda self, path: right(self, path[:-1]))
    assert distance(sampler, params) > 1e-3  # negative control: the token before is forgotten


# The grammar of each prompt, or None; the vocabulary is letters, and the last one ends an answer.
GRAMMARS = ["/[a-d]{3}(ef|g)*/", None, "/(ab|cd|ehg)+/", "/[a-k]{1,9}/", "/abcdefgh/"]
OWN = [SamplingParams(max_new_tokens=10, grammar=g, min_tokens=5 * (g is None)) for g in GRAMMARS]


def target():
    return texts.target(eos_token_id=V - 1)


def makes():
    model = target()
    one = {"block_size": 4}
    made = {
        "deer": texts.deer(model, texts.random_drafter(), 4),
        "the target's weights": texts.deer(model, texts.drafter_of_target(model), 4),
        "Markov head": texts.deer(model, texts.random_drafter(), 4, markov=head_of(V + 2).float()),
        "masks": dflash(model, 4),
        "tail": dflash(model, 4, layout="dspark", tail=1),
        "shared context": dflash(model, 4, context="shared", layers=[1]),
        "jacobi": JacobiSampler(model, tiny.tokenizer(V), **one),
        "n-grams": NgramSampler(model, tiny.tokenizer(V), **one),
    }
    return {name: readable(sampler) for name, sampler in made.items()}


def plain_sampler(**config):
    return readable(PlainSampler(texts.target(**{"eos_token_id": V - 1} | config), None))


def own_params(**options):
    return [replace(params, **options) for params in OWN]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", KEYED)
def test_texts_are_plain_decodings_under_the_same_grammars(rule, temperature):
    """Five requests, one without a grammar, in one batch and with others coming and going."""
    options = {"verify": rule, "temperature": temperature}
    plain = plain_sampler()
    expected = [
        ids(plain.generate([p], each, seeds=[s]))[0]
        for p, each, s in zip(PROMPTS, own_params(**options), SEEDS)
    ]
    free = [ids(plain.generate([p], SamplingParams(10, **options), seeds=[s]))[0]
            for p, s in zip(PROMPTS, SEEDS)]  # fmt: skip
    assert sum(a != b for a, b in zip(expected, free)) >= 4  # negative control
    for name, sampler in makes().items():
        if rule in sampler.rules:
            for at_once in (None, 2):
                given = own_params(**options)
                found = ids(sampler.generate(PROMPTS, given, seeds=SEEDS, at_once=at_once))
                assert found == expected, (name, at_once)


def test_answers_match_their_grammars():
    plain = plain_sampler()
    results = plain.generate(PROMPTS, own_params(temperature=1.0), seeds=SEEDS)
    for params, result in zip(OWN, results):
        if params.grammar is None:
            assert len(result.token_ids) >= 5
        elif result.finish_reason == "eos":
            assert re.fullmatch(params.grammar.strip("/"), result.text.rstrip("l"))
    assert results[4].text.startswith("abcdefgh"[: len(results[4].text)])


@pytest.mark.parametrize(
    "make", [lambda model: dflash(model, 4), lambda model: NgramSampler(model, tiny.tokenizer(V))]
)
def test_forced_tokens_are_drafted(make):
    """Where only one token is allowed, the tree drafts it, whatever the drafter knows."""
    sampler = readable(make(target()))
    params = SamplingParams(max_new_tokens=9, verify="tree", temperature=0, grammar="/abcdefgh/")
    (found,) = sampler.generate([PROMPTS[1]], params)
    assert found.text.startswith("abcdefgh")
    assert len(found.stats.emitted) <= 3


def test_an_answer_is_no_shorter_than_min_tokens():
    plain = plain_sampler(eos_token_id=[3, 5, 7, 9])
    short = plain.generate(PROMPTS, SamplingParams(12, seed=1))
    long = plain.generate(PROMPTS, SamplingParams(12, seed=1, min_tokens=8))
    assert min(len(r.token_ids) for r in short) < 8 <= min(len(r.token_ids) for r in long)


MISTAKES = {
    "/(a/": "regex parse error",
    '{"type": ': "is no JSON schema",
    '{"type": "nothing"}': "is not allowed",
    "start: later": "is not allowed",
    "/" + "a" * 2**18 + "/": "characters, more than",
}


@pytest.mark.parametrize("grammar", MISTAKES)
def test_a_wrong_grammar_is_refused_in_a_line(grammar):
    plain = plain_sampler()
    with pytest.raises(ValueError, match=MISTAKES[grammar]) as caught:
        plain.generate([[1]], SamplingParams(4, grammar=grammar))
    assert "\n" not in str(caught.value)


def test_a_model_without_an_end_takes_no_grammar():
    plain = plain_sampler(eos_token_id=None)
    with pytest.raises(ValueError, match="no token that ends"):
        plain.generate([[1]], SamplingParams(4, grammar="/a/"))


def test_a_grammar_that_costs_too_much_ends_the_answer():
    """llguidance limits the work of a step; after that its matcher says nothing of use."""

    class Exhausted:
        def is_error(self):
            return True

        def try_consume_tokens(self, tokens):
            return len(tokens)

        def rollback(self, count):
            return True

    constraint = Constraint(1, Exhausted(), 0, [3, 5], 8)
    assert [*constraint.allowed(()).nonzero()[0]] == [3, 5]
