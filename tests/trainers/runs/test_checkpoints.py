"""Checkpoints in one process: what they restore, which stay, and what happens to a bad one."""

import errno
import math
import re
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import Callback

from tests.support.refused import refused
from tests.support.runs import curve, cut, kept, same_run, same_weights
from trainers import fit as fit_module
from trainers.export import export_checkpoint
from trainers.runs import checkpoints as checkpoints_module
from trainers.runs.checkpoint_files import (
    Damaged,
    DirectIO,
    checkpoint_files,
    delete_partial,
    remove_checkpoint,
    step_of,
    write_checkpoint,
)
from trainers.runs.checkpoints import measured
from trainers.runs.curve import Curve
from trainers.runs.randomness import RandomStates
from trainers.runs.set_aside import SET_ASIDE, set_aside

checkpoint_module = "trainers.runs.checkpoint_files"

LONG = ("trainer.max_steps=12", "trainer.log_every=1", "trainer.keep_last=9")
DROPOUT = (*LONG, "+network.attention_dropout=0.4")


def folder(lab, name):
    return lab.runs / "ar_target" / name


@pytest.fixture(scope="module")
def whole(lab):
    """Twelve steps with dropout, without a stop; all checkpoints stay."""
    return lab.fit("ar_target", *DROPOUT, "name=whole").parent


class TestRestored:
    def test_dropout_goes_on_where_it_was(self, lab, whole):
        copy = cut(whole, "dropout", 6)
        lab.fit("ar_target", *DROPOUT, "name=dropout")
        assert same_run(copy, whole)

    def test_a_path_may_be_spelled_otherwise(self, lab, whole, monkeypatch):
        copy = cut(whole, "spelled", 6)
        monkeypatch.chdir(lab.corpus.parent)
        run = ("ar_target", *DROPOUT, "name=spelled")
        shutil.copytree("corpus", "another", dirs_exist_ok=True)
        with pytest.raises(ValueError, match=r"other settings \(data\.train\.source: .*another\)"):
            lab.fit(*run, "data.train.source=another")
        lab.fit(*run, "data.train.source=./corpus")
        assert same_run(copy, whole)

    def test_without_the_random_states_it_does_not(self, lab, whole, monkeypatch):
        """Negative control."""
        monkeypatch.setattr(RandomStates, "on_load_checkpoint", lambda *a: None)
        copy = cut(whole, "forgotten", 6)
        lab.fit("ar_target", *DROPOUT, "name=forgotten")
        a, b = curve(copy), curve(whole)
        assert [s for s in a if a[s] != b[s]] == [*range(7, 13)]
        assert not same_weights(copy, whole)

    def test_another_split_of_the_batch_goes_on(self, lab, capsys):
        """Also when Lightning, which counts forwards, has counted other ones."""
        one = lab.fit("ar_target", *LONG, "name=one_forward").parent
        four = cut(one, "four_forwards", 6)
        capsys.readouterr()
        lab.fit("ar_target", *LONG, "name=four_forwards", "trainer.micro_batch_size=1")
        assert re.search(r"1 \S+ x 4 .* 1 x 1\b", capsys.readouterr().out)
        assert curve(four) == pytest.approx(curve(one), rel=1e-6)
        assert curve(four, "lr") == curve(one, "lr")
        assert curve(four, "val_loss").keys() == {4, 8, 12}

    def test_a_run_killed_before_its_export_exports(self, lab, whole):
        copy = cut(whole, "unexported", 12)
        lab.fit("ar_target", *DROPOUT, "name=unexported")
        assert same_run(copy, whole)

    def test_an_older_checkpoint_begins_a_new_branch(self, lab, whole):
        """What came later is forgotten: neither rotation nor a later resume may take it."""
        copy = cut(whole, "branch", 12)
        (copy / "export").mkdir()
        (copy / "export" / "config.json").write_text("{}")
        resume = f"resume={copy}/checkpoints/step-4.ckpt"
        stop_at(7, lab, "ar_target", *DROPOUT, "name=branch", resume)
        assert kept(copy) == [2, 4, 6]
        lab.fit("ar_target", *DROPOUT, "name=branch")
        assert same_run(copy, whole)

    @pytest.mark.parametrize("harm", ["cut", "byte", "empty"])
    def test_a_damaged_checkpoint_falls_back(self, lab, whole, harm, capsys):
        copy = cut(whole, f"harm_{harm}", 8)
        newest = copy / "checkpoints" / "step-8.ckpt"
        data = bytearray(newest.read_bytes())
        data[len(data) // 2] ^= 1
        size = {"cut": len(data) // 2, "byte": len(data), "empty": 0}[harm]
        newest.write_bytes(data[:size])
        lab.fit("ar_target", *DROPOUT, f"name=harm_{harm}")
        assert str(newest) in capsys.readouterr().out
        assert same_run(copy, whole)


class TestNothingIsLost:
    """What a command must not delete, whatever has become of the run's folder."""

    NAME = "lost"

    @pytest.fixture
    def copy(self, lab, whole):
        shutil.rmtree(folder(lab, self.NAME), ignore_errors=True)
        return cut(whole, self.NAME, 8)

    def refused(self, lab, *overrides):
        return refused(lab.fit, "ar_target", *DROPOUT, f"name={self.NAME}", *overrides)

    @pytest.mark.parametrize("config", [None, "", "- a list\n", "text\n", "3\n", "{", "\x00"])
    def test_without_its_config_a_run_is_not_begun_anew(self, lab, copy, config):
        (copy / "config.yaml").unlink()
        if config is not None:
            (copy / "config.yaml").write_text(config)
        before = everything(copy)
        message = self.refused(lab)
        assert {"config.yaml", "resume=PATH", "resume=never"} <= {*message.split()}
        assert "step-8.ckpt" in message
        assert everything(copy) == before

    def test_without_its_config_a_finished_run_is_no_other_one(self, lab, copy):
        shutil.rmtree(copy / "checkpoints")
        (copy / "export").mkdir()
        (copy / "export" / "config.json").write_text("{}")
        (copy / "export" / "model.safetensors").touch()
        (copy / "config.yaml").unlink()
        assert "export" in self.refused(lab)

    def test_a_config_without_weights_is_no_finished_run(self, lab, copy, whole):
        (copy / "export").mkdir()
        (copy / "export" / "config.json").write_text("{}")
        lab.fit("ar_target", *DROPOUT, f"name={self.NAME}")
        assert same_run(copy, whole)

    def test_before_its_first_checkpoint_a_run_may_get_other_settings(self, lab, copy):
        shutil.rmtree(copy / "checkpoints")
        given = ("ar_target", *DROPOUT, f"name={self.NAME}", "seed=5")
        stop_at(3, lab, *given)
        assert kept(copy) == [2]

    def test_without_its_config_it_goes_on_from_a_path(self, lab, copy, whole):
        (copy / "config.yaml").write_text("")
        path = f"resume={copy}/checkpoints/step-8.ckpt"
        lab.fit("ar_target", *DROPOUT, f"name={self.NAME}", path)
        assert same_run(copy, whole)

    def test_without_its_config_it_starts_anew_if_asked_to(self, lab, copy):
        (copy / "config.yaml").unlink()
        stop_at(3, lab, "ar_target", *DROPOUT, f"name={self.NAME}", "resume=never")
        assert kept(copy) == [2]

    @pytest.mark.parametrize("resume", ["auto", "path"])
    @pytest.mark.parametrize(
        "error",
        [
            PermissionError(errno.EACCES, "Permission denied"),
            OSError(errno.EIO, "Input/output error"),
            MemoryError("12 bytes"),
            RuntimeError("unable to mmap 12 bytes: Cannot allocate memory (12)"),
        ],
        ids=lambda e: type(e).__name__,
    )
    def test_what_cannot_be_read_is_not_damaged(self, lab, copy, monkeypatch, error, resume):
        before = everything(copy)
        newest = copy / "checkpoints" / "step-8.ckpt"

        def read(file, *arguments, **options):
            if str(file) == str(newest):
                raise error
            return original(file, *arguments, **options)

        reader = "torch.load" if isinstance(error, RuntimeError) else checkpoint_module + ".ZipFile"
        original = torch.load if isinstance(error, RuntimeError) else ZipFile
        monkeypatch.setattr(reader, read)
        message = self.refused(lab, *([] if resume == "auto" else [f"resume={newest}"]))
        assert str(newest) in message
        assert (getattr(error, "strerror", None) or str(error)) in message
        assert everything(copy) == before

    def test_a_folder_that_cannot_be_listed_is_not_empty(self, lab, copy, monkeypatch):
        list_ = Path.iterdir

        def iterdir(path):
            if path == copy / "checkpoints":
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return list_(path)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "iterdir", iterdir)
            with pytest.raises(PermissionError):
                lab.fit("ar_target", *DROPOUT, f"name={self.NAME}")
        assert kept(copy) == [2, 4, 6, 8]

    def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(self, lab, copy):
        for path in checkpoint_files(copy / "checkpoints"):
            path.write_bytes(path.read_bytes()[:1000])
        before = everything(copy)
        message = self.refused(lab)
        assert {"resume=PATH,", "resume=never"} <= {*message.split()}
        assert everything(copy) == before

    @pytest.mark.parametrize("stop", [9, None])
    def test_the_only_checkpoint_under_another_number(self, lab, copy, whole, stop):
        """It is there until the run has written the next one, and a kill before that finds it."""
        path = copy / "checkpoints" / "step-8.ckpt"
        path = path.rename(path.with_name("step-900.ckpt"))
        for step in (2, 4, 6):
            (copy / "checkpoints" / f"step-{step}.ckpt").unlink()
        run = ("ar_target", *DROPOUT, f"name={self.NAME}")
        if stop:
            stop_at(stop, lab, *run, f"resume={path}")
            assert path.exists()
            lab.fit(*run)
        else:
            lab.fit(*run, f"resume={path}")
        assert kept(copy) == [10, 12]
        assert same_run(copy, whole)

    def test_a_branch_keeps_what_came_later_until_it_has_a_checkpoint(self, lab, copy, whole):
        (copy / "export").mkdir()
        (copy / "export" / "config.json").write_text("{}")
        before = everything(copy)
        run = ("ar_target", *DROPOUT, f"name={self.NAME}")
        stop_at(5, lab, *run, f"resume={copy}/checkpoints/step-4.ckpt")
        aside = everything(copy / SET_ASIDE)
        assert set(aside) == {
            "config.yaml", "provenance.json", "metrics.csv", "export/config.json",
            "checkpoints/step-6.ckpt", "checkpoints/step-8.ckpt",
        }  # fmt: skip
        assert all(before[name] == content for name, content in aside.items())
        assert kept(copy) == [2, 4]
        assert not (copy / "export").exists(), "the run would look finished"
        stop_at(7, lab, *run)
        assert kept(copy) == [2, 4, 6]
        assert not (copy / SET_ASIDE).exists()
        lab.fit(*run)
        assert same_run(copy, whole)

    def test_one_goes_back_to_what_was_set_aside(self, lab, copy, whole):
        run = ("ar_target", *DROPOUT, f"name={self.NAME}")
        stop_at(1, lab, *run, "resume=never")
        assert kept(copy) == []
        path = copy / SET_ASIDE / "checkpoints" / "step-8.ckpt"
        lab.fit(*run, f"resume={path}")
        assert same_weights(copy, whole)
        assert not (copy / SET_ASIDE).exists()

    @pytest.mark.parametrize("cut_after", range(5))
    def test_a_kill_while_it_is_set_aside(self, copy, monkeypatch, cut_after):
        """After each rename: no export, and the newest checkpoint is found until the last one."""
        (copy / "export").mkdir()
        rename, calls = Path.rename, []

        class Kill(BaseException):
            pass

        def killed(path, target):
            if len(calls) == cut_after:
                raise Kill
            calls.append(path)
            return rename(path, target)

        steps = kept(copy)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", killed)
            with pytest.raises(Kill):
                set_aside(copy, 0)
        assert (copy / "export").exists() == (cut_after == 0)
        assert kept(copy) == steps[max(0, cut_after - 1) :]
        set_aside(copy, 0)
        assert kept(copy) == []
        assert kept(copy / SET_ASIDE) == steps


def everything(folder):
    """{path: content} of all files of a folder."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def stop_at(step, lab, *arguments):
    """Fit, and end it at a step as nothing but an interruption does."""

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *rest):
            trainer.should_stop = trainer.global_step == step

    build = fit_module.build_trainer

    def with_stop(*a, **k):
        trainer = build(*a, **k)
        trainer.callbacks.append(Stop())
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_module, "build_trainer", with_stop)
        with pytest.raises(ValueError, match=rf"\bstep {step}\b"):
            lab.fit(*arguments)


def test_an_interrupted_run_is_not_exported_and_goes_on(lab, whole):
    stop_at(5, lab, "ar_target", *DROPOUT, "name=interrupted")
    assert not (folder(lab, "interrupted") / "export").exists()
    assert kept(folder(lab, "interrupted")) == [2, 4]
    lab.fit("ar_target", *DROPOUT, "name=interrupted")
    assert same_run(folder(lab, "interrupted"), whole)


def test_a_run_that_starts_anew_leaves_nothing_to_resume(lab):
    name = ("name=anew", "trainer.max_steps=4")
    lab.fit("ar_target", *name)
    stop_at(1, lab, "ar_target", *name, "resume=never", "seed=1")
    assert kept(folder(lab, "anew")) == []
    assert not (folder(lab, "anew") / "export").exists()
    lab.fit("ar_target", *name, "seed=1")
    lab.fit("ar_target", "name=other", "trainer.max_steps=4", "seed=1")
    assert same_run(folder(lab, "anew"), folder(lab, "other"))


class TestBest:
    LENGTHS = {2: 1.5, 4: 2.5, 6: 2.0, 8: 2.5, 10: 1.0, 12: 1.25}
    RUN = ("trainer.max_steps=12", "trainer.validate_every=2", "trainer.checkpoint_every=5")

    @pytest.fixture
    def lengths(self, monkeypatch):
        """Acceptance lengths by step."""

        def given(metrics):
            return "acceptance_length_t0", self.LENGTHS.get(int(metrics["step"]), math.nan)

        monkeypatch.setattr(checkpoints_module, "measured", given)

    def test_the_longest_acceptance_stays_beside_the_last(self, lab, lengths, capsys):
        lab.fit("ar_target", *self.RUN, "name=best", "trainer.keep_last=1")
        assert kept(folder(lab, "best")) == [4, 12]
        assert "step-4.ckpt (acceptance_length_t0 2.5)" in capsys.readouterr().out

    def test_none_is_kept_for_none(self, lab, lengths):
        lab.fit("ar_target", *self.RUN, "name=none", "trainer.keep_last=1", "trainer.keep_best=0")
        assert kept(folder(lab, "none")) == [12]

    def test_it_is_known_after_a_resume(self, lab, lengths, capsys):
        run = (*self.RUN, "name=known", "trainer.keep_last=1", "trainer.keep_best=2")
        stop_at(7, lab, "ar_target", *run)
        assert kept(folder(lab, "known")) == [4, 6]
        lab.fit("ar_target", *run)
        assert kept(folder(lab, "known")) == [4, 8, 12]
        assert "step-4.ckpt (acceptance_length_t0 2.5)" in capsys.readouterr().out

    def test_without_acceptance_it_is_the_lowest_validation_loss(self, lab):
        lab.fit("ar_target", *self.RUN, "name=loss", "trainer.keep_last=1", "optimization.lr=1.0")
        losses = curve(folder(lab, "loss"), "val_loss")
        best = min(losses, key=losses.get)
        assert best != 12, "the rule must be seen"
        assert kept(folder(lab, "loss")) == [best, 12]

    def test_the_weights_are_those_that_were_measured(self, lab, whole):
        """The checkpoint after a validation gives its loss again."""
        path = whole / "checkpoints" / "step-8.ckpt"
        found = torch.load(path, weights_only=False)["run"]["found"]
        losses = {s: v for s, v in curve(whole, "val_loss").items() if s <= 8}
        ((step, (name, value)),) = found.items()
        assert (step, name) == (min(losses, key=losses.get), "val_loss")
        assert value == losses[step]

    def test_what_is_measured(self):
        metrics = {"val_loss": 3.0, "acceptance_length_t1": 1.5, "acceptance_length_t0": 2.0}
        assert measured(metrics) == ("acceptance_length_t0", 2.0)
        assert measured({"loss": 2.0, "val_loss": 3.0}) == ("val_loss", 3.0)


class TestMistakes:
    @pytest.mark.parametrize("resume", ["auto", "never"])
    def test_folder_of_another_recipe(self, lab, resume):
        folder(lab, "taken").mkdir(exist_ok=True)
        (folder(lab, "taken") / "config.yaml").write_text("recipe: diffusion_adapt\n")
        message = refused(lab.fit, "ar_target", "name=taken", f"resume={resume}")
        assert "'diffusion_adapt'" in message
        assert "'ar_target'" in message

    def test_checkpoint_of_another_recipe(self, lab):
        lab.fit("ar_target", "name=first", "trainer.max_steps=2")
        (checkpoint,) = (folder(lab, "first") / "checkpoints").iterdir()
        other = ("ar_target", "name=unlike", "network.num_hidden_layers=2")
        message = refused(lab.fit, *other, f"resume={checkpoint}")
        assert "is of another recipe, or of other settings: " in message
        assert not folder(lab, "unlike").exists()
        lab.fit("ar_target", "name=same", f"resume={checkpoint}", "trainer.max_steps=2")

    @pytest.mark.parametrize("text", ["[", "[]", "null", "recipe: x", "recipe: [}"])
    def test_export_of_a_run_whose_config_is_damaged(self, lab, tmp_path, text):
        lab.fit("ar_target", "name=first", "trainer.max_steps=2")
        (checkpoint,) = (folder(lab, "first") / "checkpoints").iterdir()
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ValueError, match=r"config\.yaml is (damaged|no config)"):
            export_checkpoint(tmp_path, checkpoint)

    def test_export_of_another_run_s_checkpoint(self, lab, tmp_path):
        lab.fit("ar_target", "name=first", "trainer.max_steps=2")
        (checkpoint,) = (folder(lab, "first") / "checkpoints").iterdir()
        config = OmegaConf.load(folder(lab, "first") / "config.yaml")
        config.network.num_hidden_layers = 2
        OmegaConf.save(config, tmp_path / "config.yaml")
        with pytest.raises(ValueError, match="is of another recipe, or of other settings: "):
            export_checkpoint(tmp_path, checkpoint)
        assert [f.name for f in tmp_path.iterdir()] == ["config.yaml"]

    @pytest.mark.parametrize(
        "setting",
        ["checkpoint_every=0", "keep_last=0", "keep_best=-1", "max_steps=0", "batch_size=0",
         "micro_batch_size=0", "log_every=0", "validate_every=-1"],
    )  # fmt: skip
    def test_number_that_is_too_small(self, lab, setting):
        message = refused(lab.fit, "ar_target", "name=small", f"trainer.{setting}")
        assert message.startswith(f"trainer.{setting} ")
        assert not folder(lab, "small").exists()

    @pytest.mark.parametrize("setting", ["accelerator=tpu", "accelerator=gpu", "devices=-1"])
    def test_device_that_is_not_here(self, lab, setting):
        refused(lab.fit, "ar_target", "name=elsewhere", f"trainer.{setting}")
        assert not folder(lab, "elsewhere").exists()

    def test_name_of_a_folder_of_the_run(self, lab):
        assert "name=export" in refused(lab.fit, "ar_target", "name=export")

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            (("trainer.micro_batch_size=3",), ("batch_size=4", "micro_batch_size")),
            (("trainer.micro_batch_size=1", "trainer.devices=3", "strategy=ddp"), ("3 processes",)),
        ],
    )
    def test_batch_that_cannot_be_split_leaves_nothing_behind(self, lab, given, told):
        message = refused(lab.fit, "ar_target", "name=unsplit", *given)
        assert all(words in message for words in (*told, "[1, 2, 4]"))
        assert not folder(lab, "unsplit").exists()

    @pytest.mark.parametrize("parent", ["file", "/proc"])
    def test_folder_that_cannot_be_written(self, lab, tmp_path, parent):
        if parent == "file":
            (tmp_path / "file").write_text("")
            parent = tmp_path / "file"
        message = refused(lab.fit, "ar_target", f"runs={parent}/runs")
        assert f"{parent}/runs/ar_target (" in message
        assert "runs=..." in message


def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


class TestFullDisk:
    @pytest.fixture
    def little_space(self, monkeypatch):
        """From the second checkpoint on, the system writes 40 kB of a file and no more."""
        save, calls = DirectIO.save_checkpoint, []

        def limited(*arguments, **options):
            calls.append(1)
            if len(calls) == 1:
                return save(*arguments, **options)
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
            try:
                return save(*arguments, **options)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        monkeypatch.setattr(DirectIO, "save_checkpoint", limited)

    def test_the_last_checkpoint_survives(self, lab, whole, little_space, monkeypatch):
        message = refused(lab.fit, "ar_target", *DROPOUT, "name=full")
        last = folder(lab, "full") / "checkpoints" / "step-2.ckpt"
        assert "step-4.ckpt" in message
        assert "File too large" in message  # the system's reason
        assert str(last) in message
        assert [*last.parent.iterdir()] == [last]
        assert step_of(last) == 2
        monkeypatch.undo()
        lab.fit("ar_target", *DROPOUT, "name=full")
        assert same_run(folder(lab, "full"), whole)

    def test_a_disk_without_room_is_seen_before_the_run(self, lab, monkeypatch, capsys):
        free = lambda size: lambda _: SimpleNamespace(free=size)  # noqa: E731
        monkeypatch.setattr("shutil.disk_usage", free(100_000))
        message = refused(lab.fit, "ar_target", *DROPOUT, "name=no_room")
        assert f"{folder(lab, 'no_room') / 'checkpoints'} needs up to" in message
        assert not folder(lab, "no_room").exists()
        monkeypatch.setattr("shutil.disk_usage", free(10**9))
        capsys.readouterr()
        lab.fit("ar_target", *DROPOUT, "name=no_room")
        (told,) = re.findall(r"at most ([\d.]+) MB to write", capsys.readouterr().out)
        sizes = [f.stat().st_size for f in (folder(lab, "no_room") / "checkpoints").iterdir()]
        assert 0.5 < float(told) * 1e6 / (len(sizes) + 1) / max(sizes) < 1.5

    def test_when_the_rename_fails(self, tmp_path, monkeypatch):
        sharded = Sharded(2)
        monkeypatch.setattr("os.replace", full)
        with pytest.raises(ValueError, match=r"step-2\.ckpt.*No space left on device"):
            write_checkpoint(sharded, tmp_path / "step-2.ckpt")
        assert not [*tmp_path.iterdir()]


class Sharded:
    """As much of a trainer as it takes to write a folder of shards."""

    is_global_zero, world_size = True, 2
    lightning_module = SimpleNamespace(network=SimpleNamespace(dtype="float32"))

    def __init__(self, step):
        self.global_step = step
        self.strategy = SimpleNamespace(
            reduce_boolean_decision=lambda decision, all: decision, barrier=lambda: None
        )

    def save_checkpoint(self, path):
        for name in ("meta.pt", "shards/0.bin", "shards/1.bin"):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(b"x" * 100)


class TestFolders:
    """Checkpoints of strategies that write a folder of shards."""

    @pytest.fixture
    def path(self, tmp_path):
        write_checkpoint(Sharded(2), tmp_path / "step-2.ckpt")
        write_checkpoint(Sharded(10), tmp_path / "step-10.ckpt")
        return tmp_path / "step-10.ckpt"

    def test_they_are_listed_by_step(self, path):
        assert [step_of(p) for p in checkpoint_files(path.parent)] == [2, 10]

    @pytest.mark.parametrize("shard", ["meta.pt", "shards/1.bin", "manifest.json"])
    @pytest.mark.parametrize("harm", ["missing", "cut"])
    def test_damage_is_seen(self, path, shard, harm):
        if harm == "missing":
            (path / shard).unlink()
        else:
            (path / shard).write_bytes((path / shard).read_bytes()[:50])
        with pytest.raises(Damaged, match=r"step-2\.ckpt"):
            step_of(path)

    def test_a_half_removed_one_is_no_checkpoint(self, path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", full)
            with pytest.raises(OSError):
                remove_checkpoint(path)
        assert [p.name for p in checkpoint_files(path.parent)] == ["step-2.ckpt"]
        delete_partial(path.parent)
        assert [p.name for p in path.parent.iterdir()] == ["step-2.ckpt"]

    def test_a_killed_write_is_no_checkpoint(self, path):
        Sharded(12).save_checkpoint(path.parent / ".step-12.partial")
        assert len(checkpoint_files(path.parent)) == 2
        delete_partial(path.parent)
        assert sorted(p.name for p in path.parent.iterdir()) == ["step-10.ckpt", "step-2.ckpt"]


def test_a_row_that_a_kill_cut_short_is_forgotten(tmp_path):
    """'12' of '125' would be a row of an earlier step."""
    file = tmp_path / "metrics.csv"
    file.write_text("step,loss\n119,3.5\n120,3.25\n12")
    Curve(file, first=120).log_metrics({"loss": 3.0}, step=121)
    assert file.read_text().split() == ["step,loss", "119,3.5", "120,3.25", "121,3.0"]


@pytest.mark.parametrize("path", ["/dev/zero", "/nowhere/step-4.ckpt"])
def test_a_device_or_nothing_is_no_checkpoint(path):
    """A device has no end: to read it would take all memory."""
    with pytest.raises(ValueError, match=f"'{path}' is no checkpoint: give the path of one"):
        step_of(Path(path))
