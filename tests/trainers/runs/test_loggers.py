"""wandb and TensorBoard hold the curve of metrics.csv, of a resumed run too; without a network."""

import csv
import json
import math
import sys
from copy import copy

import pytest
import wandb
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.refused import refused
from tests.support.spoil import nan, spoil
from trainers.ar import Autoregressive

EACH = ("trainer.log_every=1", "trainer.validate_every=2", "trainer.checkpoint_every=2")


@pytest.fixture(scope="module")
def lab(lab, tmp_path_factory):
    """Runs of these tests' own: wandb leaves dangling links, and others copy the lab's runs."""
    own = copy(lab)
    own.runs = tmp_path_factory.mktemp("logged")
    return own


def folder(lab, name):
    return lab.runs / "ar_target" / name


def csv_curve(lab, name, metric):
    """{step: value} of metrics.csv."""
    with (folder(lab, name) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row[metric]]
    return {int(row["step"]): float(row[metric]) for row in rows}


def fit_in_two(lab, monkeypatch, name, *overrides):
    """Stopped in step 4 after the checkpoint of step 2, and gone on with: step 3 is done twice."""
    with monkeypatch.context() as patch:
        spoil(patch, Autoregressive, 3, nan)
        with pytest.raises(ValueError, match="the loss is nan at step 4"):
            lab.fit("ar_target", f"name={name}", *EACH, *overrides)
    assert csv_curve(lab, name, "loss").keys() == {1, 2, 3}
    lab.fit("ar_target", f"name={name}", *EACH, *overrides)


@pytest.fixture
def no_wandb_login(monkeypatch, tmp_path):
    """A home without a key, no wish of the environment's, and a wandb that has read neither."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    wandb.teardown()
    yield
    wandb.teardown()


class TestTensorBoard:
    def events(self, lab, name, purge=True):
        path = str(folder(lab, name) / "tensorboard")
        return EventAccumulator(path, purge_orphaned_data=purge).Reload()

    def curve(self, events, metric):
        return [(e.step, e.value) for e in events.Scalars(metric)]

    @pytest.fixture(scope="class")
    def resumed(self, lab):
        with pytest.MonkeyPatch.context() as patch:
            fit_in_two(lab, patch, "board", "logger=tensorboard")

    def test_a_resumed_run_has_every_point_once(self, lab, resumed):
        events = self.events(lab, "board")
        for metric, steps in (("loss", [1, 2, 3, 4]), ("val_loss", [2, 4])):
            found, expected = self.curve(events, metric), csv_curve(lab, "board", metric)
            assert [step for step, _ in found] == steps == list(expected)
            assert all(math.isclose(v, expected[s], rel_tol=1e-6) for s, v in found)

    def test_step_3_was_written_twice(self, lab, resumed):
        """Negative control: what a reader sees that ignores the purge."""
        steps = [step for step, _ in self.curve(self.events(lab, "board", purge=False), "loss")]
        assert steps == [1, 2, 3, 3, 4]

    def test_the_config_is_logged(self, lab, resumed):
        settings = yaml.safe_load((folder(lab, "board") / "tensorboard/hparams.yaml").read_text())
        assert settings["optimization"]["lr"] == 2e-3
        assert self.events(lab, "board").PluginTagToContent("hparams")

    def test_a_run_anew_leaves_no_old_points(self, lab):
        given = ("name=logged_anew", "logger=tensorboard", *EACH)
        lab.fit("ar_target", *given)
        lab.fit("ar_target", *given, "resume=never", "trainer.max_steps=2")
        assert [s for s, _ in self.curve(self.events(lab, "logged_anew"), "loss")] == [1, 2]


def wandb_records(file):
    """The records of an offline run: a LevelDB log of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        left = 32768 - at % 32768  # bytes of the block
        if left < 7:  # a header does not cross a block
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def wandb_run(file):
    """(id, {key: value of the config}, rows of the history, metrics' axes)."""
    found, config, rows, axes = None, {}, [], {}
    for record in wandb_records(file):
        if record.HasField("run"):
            found = record.run
            config |= {u.key: json.loads(u.value_json) for u in found.config.update}
        elif record.HasField("history"):
            items = record.history.item
            rows.append({i.key or i.nested_key[0]: json.loads(i.value_json) for i in items})
        elif record.HasField("metric"):
            axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    return found, config, rows, axes


class TestWandb:
    def runs(self, lab, name):
        """Of each fit, in order."""
        files = (folder(lab, name) / "wandb").glob("offline-run-*/*.wandb")
        return [wandb_run(file) for file in sorted(files, key=lambda f: f.stat().st_mtime_ns)]

    def curve(self, rows, metric):
        return {r["trainer/global_step"]: r[metric] for r in rows if metric in r}

    def test_without_a_key_it_stays_here_and_is_gone_on_with(
        self, lab, monkeypatch, no_wandb_login, capsys
    ):
        fit_in_two(lab, monkeypatch, "w", "logger=wandb")
        told = [line for line in capsys.readouterr().out.splitlines() if "wandb" in line]
        assert len(told) == 2
        assert all("no key" in t and "wandb sync" in t and "offline-run-" in t for t in told)
        first, second = self.runs(lab, "w")
        assert first[0].run_id == second[0].run_id
        assert (first[0].project, first[0].display_name) == ("parade", "ar_target/w")
        assert first[1]["optimization"]["lr"] == 2e-3
        assert second[3]["*"] == "trainer/global_step"
        for metric in ("loss", "val_loss"):
            expected = csv_curve(lab, "w", metric)
            early, late = self.curve(first[2], metric), self.curve(second[2], metric)
            assert early | late == pytest.approx(expected, rel=1e-6)
            assert max(early) <= 3
            assert min(late) > 2

    def test_another_run_is_another_run(self, lab, no_wandb_login):
        given = ("name=w2", "logger=wandb", "trainer.max_steps=1")
        lab.fit("ar_target", *given)
        lab.fit("ar_target", *given, "resume=never")
        first, second = self.runs(lab, "w2")
        assert first[0].run_id != second[0].run_id

    def test_the_environment_s_mode_is_honoured(self, lab, monkeypatch, no_wandb_login, capsys):
        monkeypatch.setenv("WANDB_MODE", "disabled")
        lab.fit("ar_target", "name=w3", "logger=wandb", "trainer.max_steps=1")
        assert self.runs(lab, "w3") == []
        assert "wandb" not in capsys.readouterr().out

    def test_a_key_that_cannot_be_one_is_a_line(self, lab, monkeypatch, no_wandb_login):
        monkeypatch.setenv("WANDB_API_KEY", "short")
        with pytest.raises(ValueError, match=r"^logger=wandb: .*WANDB_API_KEY.*wandb login"):
            lab.fit("ar_target", "name=w4", "logger=wandb")


class TestMistakes:
    def refused(self, lab, *overrides):
        message = refused(lab.fit, "ar_target", "name=refused", *overrides)
        assert not folder(lab, "refused").exists()
        return message

    def test_a_logger_that_there_is_not(self, lab):
        message = self.refused(lab, "logger=wandbb")
        assert "'wandbb'" in message
        assert "['tensorboard', 'wandb']" in message

    @pytest.mark.parametrize("name", ["wandb", "tensorboard"])
    def test_a_package_that_is_not_installed(self, lab, monkeypatch, name):
        monkeypatch.setitem(sys.modules, name, None)
        assert f"pip install {name}" in self.refused(lab, f"logger={name}")
