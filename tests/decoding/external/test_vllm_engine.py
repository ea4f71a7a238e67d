"""The door to vLLM, with a stub of its interface in the worker's process (a real process)."""

import json
import os
from pathlib import Path

import pytest
import torch

from decoding.engine.params import SamplingParams
from decoding.external.vllm_engine import (
    FORMATS,
    Vllm,
    interpreter,
    speculative_config,
    worker_environment,
)
from tests.support import tiny

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

GREEDY = SamplingParams(max_new_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny.causal_lm(12).float().save_pretrained(folder)
    return str(folder)


def greedy(model, prompt, count):
    """Greedy decoding by full forwards."""
    from transformers import AutoModelForCausalLM

    network, ids = AutoModelForCausalLM.from_pretrained(model), list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_answers_counters_and_logprobs(vllm_stub, model):
    with Vllm(model, vllm_stub, threads=1, max_num_seqs=2) as engine:
        assert engine.version == "stub"
        found = engine.generate([[1, 2], [3]], GREEDY, seeds=[2**64 - 1, 0], logprobs=3)
        again = engine.generate([[3]], GREEDY)
    assert found.token_ids == [greedy(model, [1, 2], 6), greedy(model, [3], 6)]
    assert found.finish_reasons == ["length", "length"]
    assert found.seconds > 0
    assert not any(found.drafts.values())
    assert [len(steps) for steps in found.top] == [6, 6]
    for answer, steps in zip(found.token_ids, found.top):
        for token, step in zip(answer, steps):
            assert step[0][0] == token  # greedy: the most probable one
            assert [p for _, p in step] == sorted((p for _, p in step), reverse=True)
    assert again.token_ids == found.token_ids[1:]
    assert again.top == []


def test_the_end_of_text_is_ours(vllm_stub, model):
    text = greedy(model, [1, 2], 6)
    with Vllm(model, vllm_stub) as engine:
        found = engine.generate([[1, 2]], GREEDY, eos=[text[2]])
        more = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
        assert engine.generate([[1, 2]], more, eos=[text[2]]).token_ids == [text]
    assert found.token_ids == [text[: text.index(text[2]) + 1]]
    assert found.finish_reasons == ["eos"]


def ended(process):
    """Whether a process group is gone."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("refuse", r"vLLM refused: RuntimeError.*See root cause above. \(.*there is no memory\)"),
        ("crash", "vLLM ended without an answer: the engine ran out of memory"),
    ],
)
def test_an_engine_that_fails_is_one_line_and_leaves_nothing(
    vllm_stub, model, monkeypatch, mistake, message, tmp_path
):
    monkeypatch.setenv("STUB_VLLM", mistake)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    started = []

    def decode():
        with Vllm(model, vllm_stub) as engine:
            started.append(engine._process)
            engine.generate([[1]], GREEDY)

    with pytest.raises(ValueError, match=message) as error:
        decode()
    assert "\n" not in str(error.value)
    assert all(map(ended, started))
    assert [*tmp_path.iterdir()] == []


def test_what_is_refused_before_an_engine_starts(tmp_path, monkeypatch, vllm_stub, model):
    with pytest.raises(ValueError, match="python=/nowhere is no program"):
        interpreter("/nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"sh examples/smollm2/vllm_environment\.sh"):
        interpreter()
    with pytest.raises(ValueError, match=r"neither pard_token.*layout=pard"):
        speculative_config(Path(model))
    dspark = tmp_path / "dspark"
    dspark.mkdir()
    config = {"block_size": 4, "dflash_config": {"sample_from_anchor": False}}
    (dspark / "config.json").write_text(json.dumps(config))
    assert speculative_config(dspark)["num_speculative_tokens"] == 3
    config["dflash_config"]["context"] = "layerwise"
    (dspark / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"layerwise, which vLLM does not run"):
        speculative_config(dspark)
    config["dflash_config"] = {"sample_from_anchor": True}
    (dspark / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"layout=dspark.*with a Markov head .* alone"):
        speculative_config(dspark)
    (dspark / "config.json").write_text(json.dumps(config | {"markov_rank": 2}))
    assert speculative_config(dspark, 3)["method"] == "dspark"
    with Vllm(model, vllm_stub) as engine, pytest.raises(ValueError, match=r"stop=\['x'\]"):
        engine.generate([[1]], SamplingParams(stop=("x",)))


def test_the_path_of_a_drafter_does_not_name_its_method(vllm_stub, model, tmp_path, monkeypatch):
    drafter = tmp_path / "small-dflash" / "export"
    tiny.causal_lm(12).float().save_pretrained(drafter)
    how = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2}
    with Vllm(model, vllm_stub, speculative_config=how) as engine:
        assert engine.version == "stub"
    # Negative control: told the path itself, it refuses, and why is in its second line.
    monkeypatch.setitem(FORMATS, "pard", "another")
    with pytest.raises(
        ValueError, match="1 validation error for SpeculativeConfig it is no DFlash"
    ):
        Vllm(model, vllm_stub, speculative_config=how)


def test_an_engine_has_the_gpu_of_its_process(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(None)
    assert worker_environment(2)["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    for name, value in {"WORLD_SIZE": "4", "LOCAL_RANK": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert worker_environment(1)["CUDA_VISIBLE_DEVICES"] == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
    found = worker_environment(1)
    assert found["CUDA_VISIBLE_DEVICES"] == "6"
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "8"
    assert not {"WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"} & {*found}
