"""`device_map`: a target spread over host memory and disk says what a whole one says."""

import csv

import pytest
import torch

from decoding import generate
from decoding.bench import text
from decoding.engine.cache import RaggedCache
from decoding.engine.params import SamplingParams
from decoding.loading import load
from models import causal
from tests.support.runs import rows, same_run

LIMITS = "cpu:100KB"
PROMPTS = ["self return value", "if name in", "class key value def"]


@pytest.fixture
def noted(monkeypatch):
    """What every loaded model's map was."""
    maps, plain = [], causal.load

    def noting(*arguments, **options):
        network = plain(*arguments, **options)
        maps.append(set(getattr(network, "hf_device_map", {}).values()))
        return network

    monkeypatch.setattr(causal, "load", noting)
    return maps


def said(capfd, export, *words):
    options = ["prompt=def name", "max_new_tokens=24", "seed=3", "dtype=float32"]
    generate.run([f"model={export}", *options, *words])
    return capfd.readouterr().out.split("\n\n")[0]


def test_generate_says_the_same(lab, capfd, noted):
    export = lab.runs / "deer_stage2" / "export"
    whole = said(capfd, export)
    assert noted == [set(), set()]
    noted.clear()
    assert said(capfd, export, f"device_map={LIMITS}") == whole
    assert sorted(map(len, noted)) == [0, 2]  # the target is spread, the drafter is whole
    assert {"cpu", "disk"} in noted
    assert said(capfd, export, f"device_map={LIMITS}", "seed=4") != whole


@pytest.mark.parametrize("verify", ["coupled", "rejection", "block", "tree"])
def test_every_rule_says_the_same_in_a_batch(lab, verify):
    export = str(lab.runs / "deer_stage2" / "export")
    params = SamplingParams(max_new_tokens=12, temperature=0.7, seed=1, verify=verify)
    found = [
        [r.token_ids for r in load(export, dtype="float32", device_map=m).generate(PROMPTS, params)]
        for m in (None, LIMITS)
    ]
    assert found[0] == found[1]


def test_the_bench_says_that_texts_are_equal(lab, tmp_path, monkeypatch):
    export = lab.runs / "deer_stage2" / "export"
    words = [
        f"model={export}", f"source={lab.corpus}", "prompts=2", "prompt_length=8",
        "max_new_tokens=8", "temperatures=0", "batch_sizes=2", "dtype=float32",
    ]  # fmt: skip
    found = []
    for more in ([], [f"device_map={LIMITS}"]):
        out = tmp_path / str(len(found))
        text.run([*words, f"out={out}", *more])
        found.append([r["acceptance length"] for r in csv.DictReader((out / "bench.csv").open())])
    assert found[0]
    assert found[0] == found[1]


def test_collected_answers_are_the_same(lab, noted):
    lab.collect("name=whole", "prompts.count=20", "shard_size=10")
    lab.collect("name=spread", "prompts.count=20", "shard_size=10", f"device_map={LIMITS}")
    assert noted == [set(), {"cpu", "disk"}]
    folder = lab.runs / "deer_answers"
    assert rows(folder / "whole") == rows(folder / "spread")


def test_a_teacher_in_training_gives_the_same_curve(lab, noted):
    soft = ["module.soft=0.9", "trainer.max_steps=2"]
    for name, more in (("whole", []), ("spread", [f"device_map={LIMITS}"])):
        lab.fit("deer_stage2", f"name=map_{name}", *soft, *more)
    assert noted.count({"cpu", "disk"}) == 1
    runs = [lab.runs / "deer_stage2" / f"map_{n}" for n in ("whole", "spread")]
    assert same_run(*runs)


def test_several_processes_do_not_share_one_teacher(lab):
    with pytest.raises(ValueError, match=r"device_map=auto .*trainer.devices=2"):
        lab.fit("deer_stage2", "module.soft=0.9", "device_map=auto", "trainer.devices=2",
                "name=map_two")  # fmt: skip


def test_several_processes_do_not_share_one_teacher_of_a_collection(lab, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"device_map=auto with 2 processes"):
        lab.collect("name=two", "device_map=auto")


def test_a_wrong_value_is_one_line(lab):
    export = str(lab.runs / "deer_stage2" / "export")
    for call in (
        lambda: load(export, device_map="atuo"),
        lambda: generate.run([f"model={export}", "prompt=a", "device_map=atuo"]),
        lambda: lab.collect("name=wrong", "device_map=atuo"),
    ):
        with pytest.raises(ValueError, match=r"'atuo'.*auto") as error:
            call()
        assert "\n" not in str(error.value)


def test_models_of_images_are_not_spread(tmp_path):
    (tmp_path / "config.json").write_text('{"parade": {"method": "sequential"}}')
    with pytest.raises(ValueError, match=r"device_map=auto .*only language models"):
        load(str(tmp_path), device_map="auto")


class TestCache:
    """Layers on two devices: 'meta' stands for a second one, whose tensors mix with no other's."""

    def cache(self, rows):
        on = {torch.device("cpu"): 2, torch.device("meta"): 1}
        cache = RaggedCache(5, 3, on)
        cache.place(torch.arange(2).expand(rows, -1), 2)
        return cache

    def states(self, rows, device):
        return torch.ones(rows, 1, 2, 4, device=device)

    @pytest.mark.parametrize("rows", [1, 3])
    def test_every_layer_writes_on_its_own_device(self, rows):
        cache = self.cache(rows)
        for layer, device in enumerate(["cpu", "meta", "cpu"]):
            for read in cache.update(*[self.states(rows, device)] * 2, layer):
                assert read.shape == (rows, 1, 2, 4)
                assert read.device.type == device
        sizes = {of[-1].type: memory.shape[0] for of, memory in cache._memory.items()}
        assert sizes == {"cpu": 2, "meta": 1}

    def test_moves_and_selections_reach_all_of_them(self):
        cache = self.cache(3)
        for layer, device in enumerate(["cpu", "meta", "cpu"]):
            cache.update(*[self.states(3, device)] * 2, layer)
        at = torch.tensor([[0], [1], [0]])
        cache.move(at, at + 3)
        cache.select(torch.tensor([2, 0]))
        assert {m.shape[1] for m in cache._memory.values()} == {2}
        (kept,) = {m for of, m in cache._memory.items() if of[0] == "keys" and not m.is_meta}
        assert kept[:, :, 0, :, 0].bool().tolist() == [[[True, True, False, True, False]] * 2] * 2
