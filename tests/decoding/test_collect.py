import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pyarrow.parquet as parquet
import pytest
import torch

from data.corpora.answers import read_answers, shard_path
from decoding import collect as module
from decoding.collectors.answers import TeacherAnswers
from decoding.collectors.trajectories import JacobiTrajectories
from decoding.engine.batch import Batch
from decoding.engine.params import SamplingParams
from decoding.loading import load
from decoding.samplers.denoise import DenoiseSampler
from recipes.command import one_line
from recipes.compose import compose
from tests.support.runs import rows

pytestmark = pytest.mark.usefixtures("forked")


def test_answers_are_keyed_by_prompt_and_temperature(lab):
    found = rows(lab.runs / "deer_answers")
    assert len(found) == 2 * 120
    assert len({(r["id"], r["answer"]) for r in found}) == len(found)
    assert {r["temperature"] for r in found} == {0.0, 1.0}
    assert all(1 <= len(r["answer_ids"]) <= 16 for r in found)
    manifest = json.loads((lab.runs / "deer_answers" / "manifest.json").read_text())
    assert manifest["teacher"].endswith("ar_target/export")


def test_only_answers_are_trained(lab):
    ids, trained, *_ = next(iter(read_answers(lab.runs / "deer_answers", "train")))
    assert len(ids) == len(trained)
    assert trained[:8] == [False] * 8
    assert all(trained[8:])


@pytest.mark.processes
def test_killed_and_started_again_is_the_collection_that_was_not(lab):
    """kill -9 of a real process, twice; then the rest."""
    folder = lab.runs / "deer_answers" / "killed"
    arguments = lab.collect_arguments("name=killed")
    for shards in (1, 3):
        process = subprocess.Popen(
            [sys.executable, "-m", "decoding.collect", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None and len(list((folder / "shards").glob("[0-9]*"))) < shards:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (folder / "complete.json").exists()
    kept = {p.name: p.stat().st_mtime_ns for p in (folder / "shards").glob("[0-9]*")}
    assert kept
    lab.collect("name=killed")
    assert rows(folder) == rows(lab.runs / "deer_answers")
    for name, written in kept.items():
        assert (folder / "shards" / name).stat().st_mtime_ns == written, "collected twice"


@pytest.mark.parametrize("recipe", ["deer_answers", "pcllm_trajectories"])
def test_fewer_at_once_give_the_same_rows(lab, recipe):
    """In float32; and no pass has more of them."""
    few = {"dtype": "float32", "seed": 3, "device": "cpu"}
    if recipe == "deer_answers":
        few |= {"number": 2, "temperatures": [0.0, 1.0], "max_new_tokens": 12, "top_k": 2}
        kind = TeacherAnswers
    else:
        few |= {"block_size": 4, "max_new_tokens": 12}
        kind = JacobiTrajectories
    prompts = [{"id": str(n), "prompt_ids": [5 + n] * (1 + n % 4)} for n in range(7)]
    teacher, widths = str(lab.fit("ar_target")), []

    def collected(at_once):
        collector = kind(teacher, **few, at_once=at_once)
        found = collector.collect(prompts)
        return [{k: [*v] if hasattr(v, "__len__") else v for k, v in row.items()} for row in found]

    whole = collected(None)
    cycle = Batch.append

    def watched(self, *args):
        widths.append(len(self.requests))
        return cycle(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "append", watched)
        assert collected(3) == whole
    assert max(widths) == 3
    with pytest.raises(ValueError, match=r"collector\.at_once=0 is not allowed"):
        compose([f"recipe={recipe}", "collector.at_once=0"], "collect")


def test_another_seed_gives_other_answers(lab):
    """Negative control of the comparison above."""
    lab.collect("name=other", "seed=9")
    assert rows(lab.runs / "deer_answers" / "other") != rows(lab.runs / "deer_answers")


def test_a_teacher_answers_by_its_own_sampler(lab):
    """A masked diffusion LM denoises, and with greedy answers says what it would say to a user."""
    teacher = lab.fit("dllm_block")
    lab.collect(
        "name=denoised", f"collector.teacher={teacher}", "prompts.count=4",
        "collector.temperatures=[0.0]", "collector.number=1", "collector.dtype=float32",
    )  # fmt: skip
    found = rows(lab.runs / "deer_answers" / "denoised")
    sampler, params = load(str(teacher), dtype="float32"), SamplingParams(16, 0.0)
    assert isinstance(sampler, DenoiseSampler)
    (said,) = sampler.generate([found[0]["prompt_ids"]], params)
    assert said.token_ids == found[0]["answer_ids"]
    infiller = lab.fit("asarm_joint")
    with pytest.raises(ValueError, match=r"collector\.teacher="):
        lab.collect("name=infilled", f"collector.teacher={infiller}", "prompts.count=4")
    lab.collect("name=infilled", "prompts.count=4")  # what could not begin binds nobody


def test_a_drafter_collects_its_targets_answers(lab):
    """With DEER as the teacher the answers are those of its target, at every temperature."""
    drafter = lab.fit("deer_stage2")
    more = ("prompts.count=4", "collector.dtype=float32")
    lab.collect("name=plainly", *more)
    lab.collect("name=drafted", f"collector.teacher={drafter}", *more)
    lab.collect("name=otherwise", f"collector.teacher={drafter}", *more, "seed=9")
    found = {
        name: [r["answer_ids"] for r in rows(lab.runs / "deer_answers" / name)]
        for name in ("plainly", "drafted", "otherwise")
    }
    assert found["drafted"] == found["plainly"]
    assert found["otherwise"] != found["plainly"]  # negative control


def test_processes_share_the_shards(lab, monkeypatch):
    folder = lab.runs / "deer_answers" / "two"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    lab.collect("name=two")
    assert [shard_path(folder, i).exists() for i in range(6)] == [True, False] * 3
    assert not (folder / "complete.json").exists()
    monkeypatch.setenv("RANK", "1")
    lab.collect("name=two")
    assert (folder / "complete.json").exists()
    assert rows(folder) == rows(lab.runs / "deer_answers")


def test_a_process_takes_the_gpu_of_its_local_rank(lab, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    lab.collect()  # nothing is missing, so nothing is collected
    monkeypatch.setenv("LOCAL_RANK", "2")
    lab.collect()
    assert taken == [0, 2]


def test_other_settings_are_refused(lab):
    with pytest.raises(ValueError, match=r"other settings \(max_new_tokens: 16, now 8\)"):
        lab.collect("collector.max_new_tokens=8")


def test_a_teacher_may_be_spelled_otherwise(lab, monkeypatch):
    monkeypatch.chdir(lab.runs)
    lab.collect("target=./ar_target/export")  # nothing is missing, so nothing is collected
    shutil.copytree("ar_target/export", "a_copy")
    with pytest.raises(ValueError, match=r"other settings \(.*ar_target/export, now a_copy\)"):
        lab.collect("target=a_copy")


def test_full_disk_leaves_nothing_half_written(lab, monkeypatch):
    def full(table, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(parquet, "write_table", full)
    with pytest.raises(OSError, match="No space") as error:
        lab.collect("name=full")
    assert "disk is full" in one_line(error.value)
    assert list((lab.runs / "deer_answers" / "full" / "shards").iterdir()) == []
    monkeypatch.undo()
    lab.collect("name=full")
    assert rows(lab.runs / "deer_answers" / "full") == rows(lab.runs / "deer_answers")


def test_disk_estimate_comes_first(lab, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match="are free"):
        lab.collect("name=small")
    assert not (lab.runs / "deer_answers" / "small").exists()


def test_a_prompt_key_that_nobody_takes_is_refused_before_inputs_are_built(tmp_path):
    recipe = ["recipe=deer_answers", f"runs={tmp_path / 'runs'}", "+prompts.lenght=3"]
    with pytest.raises(ValueError, match=r"'prompts.lenght'. Did you mean 'prompts.length'"):
        module.collect(compose(recipe, "collect"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["++prompts.source=${seed}"], "prompts.source=0 is of type int, but str or list of"),
        (["prompts.count=${x}", "+x=[1,a]"], "prompts.count=.*is of type list"),
        (["+prompts.chat=${seed}"], "prompts.chat=0 is of type int"),
    ],
)
def test_a_prompt_key_of_a_wrong_type(tmp_path, given, said):
    given = [f"runs={tmp_path / 'runs'}", *given]
    with pytest.raises(ValueError, match=said):
        module.collect(compose(["recipe=deer_answers", *given], "collect"))
    assert not (tmp_path / "runs").exists()


def test_other_prompts_or_another_teacher_under_the_same_names_are_refused(lab, tmp_path):
    """A collection goes on with what it began with: the texts, and the teacher's weights."""
    corpus = shutil.copytree(lab.corpus, tmp_path / "corpus")
    teacher = shutil.copytree(lab.fit("ar_target"), tmp_path / "teacher")
    own = ("name=other_content", f"prompts.source={corpus}", f"collector.teacher={teacher}",
           "prompts.count=40")  # fmt: skip
    folder = lab.collect(*own)
    shard_path(folder, 1).unlink()
    weights, texts = teacher / "model.safetensors", sorted(corpus.iterdir())
    before, text = weights.read_bytes(), {file: file.read_text() for file in texts}
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"other settings \(weights: v2-\w+, now v2-"):
        lab.collect(*own)
    weights.write_bytes(before)
    for file in texts:
        file.write_text(text[file].swapcase())
    with pytest.raises(ValueError, match=r"other settings \(prompt_ids: "):
        lab.collect(*own)
    for file in texts:
        file.write_text(text[file])
    manifest = json.loads((folder / "manifest.json").read_text())
    older = {k: v for k, v in manifest.items() if k not in ("weights", "prompt_ids")}
    for known in (manifest, older):  # the negative control
        (folder / "manifest.json").write_text(json.dumps(known))
        assert lab.collect(*own) == folder
    assert shard_path(folder, 1).exists()
