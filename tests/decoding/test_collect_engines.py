"""Collections whose teacher is an engine that others wrote: the same shards, resumed as any."""

import numpy as np
import pytest

from decoding.engine.params import SamplingParams
from decoding.loading import load
from tests.support.openai_server import serving
from tests.support.runs import rows

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

GREEDY = ("collector.temperatures=[0.0]", "collector.number=1", "prompts.count=12", "shard_size=4")
SERVED = ("ar_target/export",)  # the name of the lab's target


@pytest.fixture(scope="module")
def target(lab):
    return lab.fit("ar_target")


@pytest.fixture(scope="module")
def said(target):
    """What a server of the target says, greedily."""
    sampler, params = load(str(target), dtype="float32"), SamplingParams(16, 0.0)
    return sampler.tokenizer, lambda prompt, seed: sampler.generate([prompt], params)[0].token_ids


@pytest.fixture(scope="module")
def own(lab, target):
    lab.collect("name=own", "collector.top_k=3", *GREEDY)
    return rows(lab.runs / "deer_answers" / "own")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.0)


def answers(found):
    return [(r["id"], r["answer_ids"], r["finish_reason"]) for r in found]


def test_a_server_gives_the_collection_of_its_model(lab, own, said):
    with serving(*said, models=SERVED) as server:
        lab.collect("name=served", f"teacher={server.url}", *GREEDY)
        seeds = {(tuple(r["prompt"]), r["seed"]) for r in server.requests}
    assert answers(rows(lab.runs / "deer_answers" / "served")) == answers(own)
    assert len({seed for _, seed in seeds}) == len(seeds) == 12  # each request has its own


def test_a_server_that_breaks_off_loses_one_shard_at_the_most(lab, own, said):
    folder = lab.runs / "deer_answers" / "broken"
    key = "collector.options={retries: 1, concurrency: 1}"
    failures = ["none"] * 6 + [500, "hang up"] * 2
    with serving(*said, failures=failures, models=SERVED) as server:
        with pytest.raises(ValueError, match=r"cannot be reached|answered 500"):
            lab.collect("name=broken", f"teacher={server.url}", key, *GREEDY)
        first = len(server.requests)
    assert len(rows(folder)) == 4  # the first shard; of the second nothing
    with serving(*said, models=SERVED) as server:  # on another port
        lab.collect("name=broken", f"teacher={server.url}", key, *GREEDY)
        assert len(server.requests) == 8
    assert first >= 7
    assert answers(rows(folder)) == answers(own)
    with pytest.raises(ValueError, match=r"other settings .engine: server, now None"):
        lab.collect("name=broken", *GREEDY)


def test_vllm_in_its_own_process_and_its_distributions(lab, own, vllm_stub):
    options = f"collector.options={{python: {vllm_stub}, threads: 1}}"
    lab.collect("name=vllm", "collector.engine=vllm", options, "collector.top_k=3", *GREEDY)
    found = rows(lab.runs / "deer_answers" / "vllm")
    assert answers(found) == answers(own)
    for a, b in zip(found, own):
        assert a["teacher_ids"] == b["teacher_ids"]
        np.testing.assert_allclose(a["teacher_probs"], b["teacher_probs"], rtol=2e-3, atol=1e-6)


NOBODY = "teacher=http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["collector.engine=sglang"], "engine 'sglang'"),
        (["collector.options={concurrency: 3}"], "is for a server or for collector.engine=vllm"),
        ([NOBODY, "collector.target=null"], "give target= the model that it serves"),
        ([NOBODY, "collector.options={retries: 0}"], "cannot be reached"),
    ],
)
def test_bad_input(lab, target, keys, message):
    with pytest.raises(ValueError, match=message):
        lab.collect("name=bad", *keys, *GREEDY)
    assert not (lab.runs / "deer_answers" / "bad").exists()
