"""Long work tells how far it is, with its total where that is known."""

import pytest
import torch

from data.corpora.fingerprints import input_fingerprint
from data.rows.packing import PackedRows
from decoding import collect
from models.dflash_init import fitted_context
from models.diffusion import copying
from terminal import progress
from terminal.progress import RANKS, Work
from tests.support import tiny


@pytest.fixture
def told(monkeypatch):
    """Each work of a test: its name, and (done, total) at its end."""
    found, end = {}, Work.__exit__

    def ended(work, *error):
        found[work.name] = work.done, work.total
        end(work, *error)

    monkeypatch.setattr(Work, "__exit__", ended)
    return found


def test_the_choice_of_layers(told):
    copying(tiny.causal_lm(24, layers=5).float(), 3)
    assert told == {"choice of layers": (3, 3)}


def test_the_fit_of_a_projection(told):
    target = tiny.causal_lm(24, layers=3).float()
    fitted_context(target, [0, 1], [0, 1], [[1, 2, 3], [4, 5, 6]])
    assert told == {"fit of the states' projection": (2, 2)}


@pytest.mark.parametrize("total", [2, None])
def test_packing(told, tmp_path, total):
    given = {"length": 4, "pad_id": 0, "fingerprint": {"a": 1}, "total": total}
    texts = [([1, 2, 3], [True] * 3)] * 2
    PackedRows.build(tmp_path / "rows", iter(texts), **given)
    assert told == {"packing": (2, total)}
    told.clear()
    PackedRows.build(tmp_path / "rows", texts, **given)
    assert told == {}  # they are there


def test_the_fingerprint_of_an_input(told, tmp_path):
    (tmp_path / "x").write_bytes(b"abc" * 10**6)
    input_fingerprint(tmp_path / "x")
    assert told == {"fingerprint of an input": (3 * 10**6, 3 * 10**6)}


class Teacher:
    """A collector whose answers have 10 tokens of 40, each a second."""

    number, most, emitted = 1, 40, 0

    def __init__(self, clock, second):
        self.clock, self.second = clock, second

    def collect(self, prompts, first):
        for _ in range(10 * len(prompts)):
            self.emitted += 1
            self.clock[0] += 1.0
            self.second()
        return [{} for _ in prompts]


def test_a_collection_tells_rate_and_time_left_within_its_first_shard(monkeypatch, capsys):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    clock = [0.0]
    monkeypatch.setattr(Work, "_watch", lambda work: None)
    monkeypatch.setattr(collect, "Work", lambda *given: Work(*given, clock=lambda: clock[0]))
    teacher = Teacher(clock, lambda: progress._open[-1].show())
    prompts = [[{}, {}], [{}, {}]]
    for _ in collect._collected("answers", teacher, [(prompts[0], 0), (prompts[1], 2)], 4):
        pass
    assert capsys.readouterr().err.splitlines() == [
        "answers: 0 of 4 answers, 1 tokens/s, 0:02:35 left",
        "answers: 0 of 4 answers, 1 tokens/s, 0:02:25 left",
        "answers: 2 of 4 answers, 1 tokens/s, 0:00:15 left",
        "answers: 3 of 4 answers, 1 tokens/s, 0:00:05 left",
        "answers: done in 0:00:40",
    ]


def test_a_sampler_counts_its_tokens(lab):
    from decoding.engine.params import SamplingParams
    from decoding.loading import load

    sampler = load(str(lab.runs / "ar_target" / "export"))
    found = sampler.generate(["def f", "class"], SamplingParams(max_new_tokens=5, seed=1))
    assert sampler.emitted == sum(len(result.token_ids) for result in found) > 0
    assert torch.is_inference_mode_enabled() is False
