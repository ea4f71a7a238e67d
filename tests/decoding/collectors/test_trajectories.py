"""Recorded trajectories are Jacobi iterations, computed here by full forwards."""

from itertools import pairwise

import pytest
import torch

from data.rows.trajectories import replay
from data.text.tokenizer import train_tokenizer
from decoding.collectors.trajectories import JacobiTrajectories, Recorder
from decoding.engine.params import SamplingParams
from decoding.samplers.plain import PlainSampler
from tests.support import tiny

V, n = 12, 4
PROMPTS = [[1], [2, 7, 1, 8], [3, 1, 4, 1, 5, 9, 2, 6]]


@pytest.fixture(scope="module")
def recorded():
    model = tiny.causal_lm(V, eos_token_id=7)
    params = SamplingParams(max_new_tokens=14, temperature=0)
    sampler = Recorder(model, tiny.tokenizer(V), block_size=n, running=False)
    results = sampler.generate(PROMPTS, params, seeds=[1, 2, 3])
    expected = PlainSampler(model, tiny.tokenizer(V)).generate(PROMPTS, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    return model, results, [sampler.found[n] for n in range(len(PROMPTS))]


def test_every_state_is_the_jacobi_iteration_of_the_one_before(recorded):
    model, results, found = recorded
    seen = 0
    for prompt, result, row in zip(PROMPTS, results, found):
        context = list(prompt)
        for states in replay(row, n):
            for state, following in pairwise(states):
                tokens = torch.tensor([[*context, *state.tolist()]])
                choice = model(tokens).logits[0, len(context) - 1 : -1].argmax(-1)
                assert torch.equal(choice, following)
                seen += 1
            context += states[-1].tolist()
        answer = context[len(prompt) :]
        assert answer[: len(result.token_ids)] == result.token_ids
    assert seen >= 12


def test_a_trajectory_starts_from_tokens_of_its_prompt(recorded):
    _, _, found = recorded
    for prompt, row in zip(PROMPTS, found):
        assert {*row["start"][:n]} <= {*prompt}


def test_a_wrong_change_would_be_seen(recorded):
    """Negative control of the replay."""
    model, _, found = recorded
    row = {**found[2], "to": [(t + 1) % V for t in found[2]["to"]]}
    first, second = replay(row, n)[0][:2]
    tokens = torch.tensor([[*PROMPTS[2], *first.tolist()]])
    assert not torch.equal(model(tokens).logits[0, 7:-1].argmax(-1), second)


def test_the_estimate_of_the_disk_is_an_upper_bound(tmp_path):
    import pyarrow
    import pyarrow.parquet as parquet

    tiny.causal_lm(257).save_pretrained(tmp_path / "teacher")
    train_tokenizer(["ab"], 257).save_pretrained(tmp_path / "teacher")
    collector = JacobiTrajectories(
        str(tmp_path / "teacher"), block_size=8, max_new_tokens=48, seed=0, dtype="float64"
    )
    prompts = [{"id": str(i), "prompt_ids": [i, 5, 9]} for i in range(1, 41)]
    rows = collector.collect(prompts)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    size = (tmp_path / "rows.parquet").stat().st_size
    assert size <= sum(collector.bytes_of(p["prompt_ids"]) for p in prompts)
    with pytest.raises(ValueError, match=r"block_size=49 is not allowed: it must be in 1..48"):
        JacobiTrajectories(str(tmp_path / "teacher"), block_size=49, max_new_tokens=48, seed=0)
