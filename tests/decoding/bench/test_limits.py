"""The limits are those of enumeration, no rule for one path passes them, the command shows them."""

import csv
import json
from itertools import product

import pytest
import torch

from data.text.tokenizer import draft_token_ids, fingerprint, train_tokenizer, with_draft_tokens
from decoding.bench import limits, text
from decoding.bench.limits import run
from decoding.bench.overlap import (
    accepted,
    copies,
    drafted_paths,
    mean_of_others,
    overlap,
    own_paths,
    own_trees,
)
from decoding.engine import verify
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import KeyedRandomness
from models.diffusion import from_causal_lm
from tests.decoding.drafting.test_markov import head_of
from tests.decoding.test_exact_distribution import deer, first_cycle, go_on_after_a_rejection
from tests.support import tiny
from tests.support.enumerating import EnumeratingRandomness
from tests.support.lab import write_corpus

PREFIX = [0, 1, 1]
ONE_PATH = SamplingParams(max_new_tokens=3, verify="rejection")


def conditionals(sampler, k):
    """p(. | path) for every path of fewer than k tokens: full forwards, no sampler code."""
    V = sampler.vocabulary
    paths = [path for n in range(k) for path in product(range(V), repeat=n)]
    with torch.no_grad():
        return {
            path: sampler.target(torch.tensor([[*PREFIX, *path]])).logits[0, -1].softmax(-1)
            for path in paths
        }


def drafter_marginals(sampler, k):
    with torch.inference_mode():
        rows = copies(sampler, PREFIX, ONE_PATH, 1, KeyedRandomness([0]))
        return sampler.draft_pass(rows, k, ONE_PATH)[0].softmax(-1)


def joint(p, path):
    """p_1:i(path)."""
    mass = 1.0
    for i, token in enumerate(path):
        mass *= p[path[:i]][token].item()
    return mass


def true_marginals(p, V, k):
    """m_i(x) = sum over the paths in front of it: [k, V]."""
    m = torch.zeros(k, V, dtype=torch.float64)
    for i in range(k):
        for path in product(range(V), repeat=i):
            m[i] += joint(p, path) * p[path]
    return m


def exact_overlap(p, q, k):
    """1 - TV(p_1:i, q_1:i) for i = 1..k, by enumeration; q [k, V]."""
    V, found = q.shape[1], []
    for i in range(1, k + 1):
        paths = product(range(V), repeat=i)
        found.append(
            sum(
                min(joint(p, path), torch.tensor([q[j][t] for j, t in enumerate(path)]).prod())
                for path in paths
            )
        )
    return torch.tensor(found, dtype=torch.float64)


def enumerated(sampler, k, estimate):
    """The expectation of a per-draw estimate over every outcome of its draws."""
    total, paths = 0.0, [[]]
    while paths:
        randomness = EnumeratingRandomness(paths)
        with torch.inference_mode():
            rows = copies(sampler, PREFIX, ONE_PATH, len(paths), randomness)
            values = estimate(sampler, rows, k, ONE_PATH)
        total = total + torch.tensor(randomness.weight, dtype=torch.float64) @ values
        paths = randomness.left
    return total


@pytest.mark.parametrize("seed", [0, 10])
def test_the_drafters_paths_give_the_limit_exactly(seed):
    sampler = deer(3, 3, seed=seed)
    p, q = conditionals(sampler, 3), drafter_marginals(sampler, 3)
    expected = exact_overlap(p, q, 3)
    found = enumerated(sampler, 3, drafted_paths)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert 0.01 < expected[-1] < 0.95  # neither limit is trivial here


def test_a_limit_without_prefixes_would_be_another(monkeypatch):
    """Negative control: each position's own overlap, whatever comes before it."""
    from decoding.bench import overlap as module

    sampler = deer(3, 3)
    p, q = conditionals(sampler, 3), drafter_marginals(sampler, 3)
    monkeypatch.setattr(module, "overlap", lambda a, b: (a - b).clamp_max(0).exp())
    found = enumerated(sampler, 3, drafted_paths)
    assert (found - exact_overlap(p, q, 3)).abs().max() > 1e-2


def drawn(sampler, estimate, draws=4096):
    """(mean, standard error) by the production's randomness: [k] each."""
    with torch.inference_mode():
        rows = copies(sampler, PREFIX, ONE_PATH, draws, KeyedRandomness([*range(draws)]))
        values = estimate(sampler, rows, 3, ONE_PATH)
    return values.mean(0), values.std(0) / draws**0.5


def test_drawn_paths_come_near_both_limits():
    sampler = deer(3, 3)
    p, q = conditionals(sampler, 3), drafter_marginals(sampler, 3)
    m = true_marginals(p, 3, 3)
    for estimate, own, other in ((drafted_paths, q, m), (own_paths, m, q)):
        mean, error = drawn(sampler, estimate)
        near = 4 * error + 1e-9  # at the first position the target's own is exact
        assert ((mean - exact_overlap(p, own, 3)).abs() <= near).all()
        assert ((mean - exact_overlap(p, other, 3)).abs() > near).any()


class Scripted:
    """Row b draws path b of a list, token by token."""

    def __init__(self, paths):
        self.paths, self.drawn = torch.tensor(paths), 0

    def categorical(self, probs):
        self.drawn += 1
        return self.paths[:, self.drawn - 1]


def test_few_own_paths_give_what_a_drafter_of_their_conditionals_reaches():
    """Two draws: the mean of the others is the other one's conditionals along its path."""
    sampler, k = deer(3, 2), 2
    p, found, expected = conditionals(sampler, k), 0.0, 0.0
    paths = [*product(range(3), repeat=k)]
    for mine, other in product(paths, repeat=2):
        with torch.inference_mode():
            rows = copies(sampler, PREFIX, ONE_PATH, 2, Scripted([mine, other]))
            values = own_paths(sampler, rows, k, ONE_PATH)
        found = found + joint(p, mine) * joint(p, other) * values[0]
    for other in paths:
        q = torch.stack([p[other[:i]] for i in range(k)])
        expected = expected + joint(p, other) * exact_overlap(p, q, k)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    # With so few draws it is less than the true marginals reach.
    assert found[-1] < exact_overlap(p, true_marginals(p, 3, k), k)[-1] - 1e-3


def test_by_hand():
    ratios = torch.tensor([[2.0, 0.25], [0.5, 4.0]], dtype=torch.float64)
    found = overlap(ratios.log(), torch.zeros_like(ratios))
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double())
    assert overlap(torch.tensor([[-torch.inf, 0.0]]), torch.zeros(1, 2)).tolist() == [[0, 0]]
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.25, 0.75]])
    assert mean_of_others(p, torch.tensor([0, 1, 1])).tolist() == [0.375, 0.375, 0.25]


def test_no_rule_for_one_path_passes_the_limit(monkeypatch):
    left = []
    for seed in range(4):
        sampler = deer(3, 3, seed=10 * seed)
        limit = exact_overlap(conditionals(sampler, 3), drafter_marginals(sampler, 3), 3).sum()
        block, rejection = (first_cycle(sampler, rule) - 1 for rule in ("block", "rejection"))
        assert rejection - 1e-12 <= block <= limit + 1e-12
        left.append(limit - block)
    assert max(left) > 1e-3  # `block` does not reach it either
    # Negative control: a rule that counts tokens after a rejection does pass it.
    monkeypatch.setattr(verify, "block", go_on_after_a_rejection)
    assert first_cycle(sampler, "block") - 1 > limit + 1e-3


def test_a_single_token_reaches_it():
    sampler = deer(3, 1)
    limit = exact_overlap(conditionals(sampler, 1), drafter_marginals(sampler, 1), 1).sum()
    for rule in ("block", "rejection"):
        assert first_cycle(sampler, rule) - 1 == pytest.approx(float(limit), abs=1e-9)


def test_keyed_cycles_and_the_limit():
    """One keyed path stays below it; a tree of many does not have to."""
    sampler = deer(3, 3)
    limit = exact_overlap(conditionals(sampler, 3), drafter_marginals(sampler, 3), 3).sum()
    sums = {}
    for rule in ("coupled", "tree"):
        params, draws = SamplingParams(max_new_tokens=3, verify=rule), 2048
        with torch.inference_mode():
            rows = copies(sampler, PREFIX, params, draws, KeyedRandomness([*range(draws)]))
            kept = accepted(sampler, rows, 3, params)
        assert (kept.diff(dim=1) <= 0).all()
        sums[rule] = kept.sum(1)
    error = sums["coupled"].std() / 2048**0.5
    assert sums["coupled"].mean() < limit + 4 * error
    assert sums["tree"].mean() > limit + 4 * error


def test_a_drafters_conditionals_give_the_limit_exactly():
    """With a Markov head q of a token is conditioned on the one before it."""
    sampler, V, k = deer(3, 3, markov=head_of(5)), 3, 3
    p = conditionals(sampler, k)
    with torch.inference_mode():
        rows = copies(sampler, PREFIX, ONE_PATH, V**k, KeyedRandomness([0] * V**k))
        paths = torch.tensor([*product(range(V), repeat=k)])
        q = sampler.forced_pass(rows, paths, ONE_PATH).softmax(-1)
    q = q.gather(-1, paths[..., None])[..., 0].cumprod(-1)
    expected = torch.zeros(k, dtype=torch.float64)
    for n, path in enumerate(paths.tolist()):
        for i in range(k):
            if not any(path[i + 1 :]):  # each prefix once
                expected[i] += min(joint(p, tuple(path[: i + 1])), q[n, i].item())
    found = enumerated(sampler, k, drafted_paths)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    marginals = exact_overlap(p, drafter_marginals(sampler, k), k)
    assert (found - marginals).abs().max() > 1e-2  # negative control: they are not its marginals


def test_trees_of_the_targets_own_marginals():
    """They hold at least a coupled draft of the same marginals, and all of the text if they can."""
    sampler, draws = deer(3, 3), 512
    params = SamplingParams(max_new_tokens=3, verify="tree")
    held = {}
    for nodes in (1, 6, 39):  # all 3 + 9 + 27 prefixes
        sampler.nodes = {1: nodes}
        with torch.inference_mode():
            rows = copies(sampler, PREFIX, params, draws, KeyedRandomness([*range(draws)]))
            held[nodes] = own_trees(sampler, rows, 3, params)
    assert (held[39] == 1).all()
    assert 0 < held[6].mean() < 1
    assert (held[6].diff(dim=1) <= 0).all()
    # One node: the likeliest choice under the noise, which is the coupled draft's first token.
    q = true_marginals(conditionals(sampler, 3), 3, 3)[0]
    assert (held[1][:, 0] == 1).double().mean() > 0.99  # m_1 = p_1: the very choice
    assert q.max() < 0.99
    assert (held[1][:, 1:] == 0).all()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target, a drafter of its own first layer, a corpus."""
    root = tmp_path_factory.mktemp("limits")
    plain = train_tokenizer(["self return"], 270)
    target = tiny.causal_lm(len(plain), scale=1.0).float()
    target.save_pretrained(root / "target")
    plain.save_pretrained(root / "target")
    tokenizer = with_draft_tokens(plain)
    drafter = from_causal_lm(target, tokenizer, [0])
    mask_id, sep_id = draft_token_ids(tokenizer)
    drafter.config.parade = {
        "method": "deer",
        "target": str(root / "target"),
        "tokenizer_fingerprint": fingerprint(plain),
        "block_size": 4,
        "mask_id": mask_id,
        "sep_id": sep_id,
    }
    drafter.save_pretrained(root / "run" / "export")
    tokenizer.save_pretrained(root / "run" / "export")
    write_corpus(root / "corpus")
    return root


def arguments(world, *more):
    return [
        f"model={world / 'run' / 'export'}", f"source={world / 'corpus'}", "prompts=2",
        "prompt_length=8", "max_new_tokens=10", "dtype=float32", "cycles=2", "draws=8", *more,
    ]  # fmt: skip


def lines(file):
    with file.open() as text:
        return list(csv.DictReader(text))


def test_the_command(world, capsys):
    run(arguments(world))
    out = world / "run" / "limits"
    found = {line["of a cycle"]: float(line["tokens"]) for line in lines(out / "limits.csv")}
    rules = ["coupled", "rejection", "block", "tree"]
    assert [name for name in found if name.startswith("accepted")] == [
        f"accepted, {rule}" for rule in rules
    ]
    assert 0 <= found[limits.TREE] <= 4
    limit, error, independence = list(found.values())[-3:]
    assert limit + error + independence == pytest.approx(4, abs=2e-3)  # the block, rounded thrice
    where = lines(out / "positions.csv")
    assert [line["position"] for line in where] == ["1", "2", "3", "4"]
    for rule in rules:
        total = sum(float(line[rule]) for line in where)
        assert total == pytest.approx(found[f"accepted, {rule}"], abs=1e-3)
    assert float(where[0]["target's own marginals"]) == pytest.approx(1, abs=1e-4)
    for line in lines(out / "speed.csv"):
        times = [float(line[f"{name}, ms"]) for name in ("t(1)", "t_draft", "t_verify")]
        allowed = float(line["acceptance length"]) * times[0] / (times[1] + times[2])
        assert float(line["allowed"]) == pytest.approx(allowed, rel=0.02)
        assert (line["allowed at the limit"] == "") == (line["sampler"] == "deer, tree")
    assert (out / "limits.png").stat().st_size > 5000
    assert "decoding.bench.limits" in (out / "command.txt").read_text()
    assert "accepted" in capsys.readouterr().out


def test_a_dependent_drafter_s_losses_are_not_told_apart():
    found = {
        name: torch.rand(3, 2, 4).double() for name in ("block", limits.LIMIT, limits.MARGINALS)
    }
    names = [line["of a cycle"] for line in limits.tokens(found, dependent=True)]
    assert names == ["accepted, block", limits.LIMIT, limits.MARGINALS]
    assert [line["of a cycle"] for line in limits.tokens(found)][2:] == [
        "lost to the drafter's error, at least",
        "lost to independent positions, at most",
    ]


def test_prompts_of_a_benchmark_and_short_answers(world, tmp_path, monkeypatch):
    """Answers of a single cycle have no other prefix than their prompt."""
    rows = [{"question_id": n, "category": "qa", "turns": [f"self {n}"]} for n in range(3)]
    source = tmp_path / "x.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    measured = []

    def measure(bench):
        measured.append(bench)
        return text.measure(bench)

    monkeypatch.setattr(limits, "measure", measure)
    more = [f"source={source}", "subset=qa", "chat=false", "max_new_tokens=1"]
    run(arguments(world, *more, f"out={tmp_path / 'out'}"))
    assert len(lines(tmp_path / "out" / "limits.csv")) == 8
    (bench,) = measured
    assert (bench.source, bench.subset, bench.chat) == (str(source), "qa", False)
    with pytest.raises(ValueError, match="subset='tales'"):
        run(arguments(world, *more, "subset=tales"))
    with pytest.raises(ValueError, match=r"chat=true.*template"):
        run(arguments(world, *more, "chat=true"))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("temperature=0", r"temperature=0\.0 is not allowed"),
        ("draws=1", "draws=1 is not allowed: at least 2"),
        ("prompts=1", "prompts=1 is not allowed: at least 2"),
    ],
)
def test_mistakes(world, argument, message):
    with pytest.raises(ValueError, match=message):
        run(arguments(world, argument))


def test_a_model_that_drafts_nothing(world):
    with pytest.raises(ValueError, match="is no drafter"):
        run([f"model={world / 'target'}"])
