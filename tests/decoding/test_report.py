"""Results of a bench are whole, or as they were."""

import pytest

from decoding import images
from decoding.report import draws, picture, results, write_table

LINES = [{"sampler": "plain", "tokens/s": 1.5}]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


class TestResults:
    def test_files_come_at_the_end_over_those_of_their_names(self, tmp_path, capsys):
        out = tmp_path / "a" / "bench"
        for text in ("first", "second"):
            with results(out) as new:
                (new / "x.txt").write_text(text)
                (new / "answers").mkdir()
                (new / "answers" / text).touch()
                if text == "second":
                    assert (out / "x.txt").read_text() == "first"
        assert names(out) == ["answers", "x.txt"]
        assert (out / "x.txt").read_text() == "second"
        assert names(out / "answers") == ["second"]
        assert f"wrote answers, x.txt into {out}" in capsys.readouterr().out

    @pytest.mark.parametrize("there", [True, False])
    def test_a_failure_leaves_what_was_there(self, tmp_path, there):
        out = tmp_path / "bench"
        if there:
            out.mkdir()
            (out / "x.txt").write_text("first")

        def stopped():
            with results(out) as new:
                (new / "x.txt").write_text("half")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            stopped()
        assert out.exists() == there
        assert not there or (names(out), (out / "x.txt").read_text()) == (["x.txt"], "first")

    @pytest.mark.parametrize("name", ["file", "file/bench"])
    def test_a_folder_that_cannot_be_is_an_error_before_the_work(self, tmp_path, name):
        (tmp_path / "file").touch()
        with pytest.raises(OSError), results(tmp_path / name):
            pytest.fail("the work began")


def test_a_table_on_the_screen_and_in_a_file(tmp_path, capsys):
    write_table(LINES, tmp_path / "bench.csv", "a title", "decoding.bench")
    assert (tmp_path / "bench.csv").read_text().splitlines() == ["sampler,tokens/s", "plain,1.5"]
    assert (tmp_path / "command.txt").read_text().startswith("python -m decoding.bench")
    shown = capsys.readouterr().out
    assert "a title" in shown
    assert "plain" in shown


def test_a_picture_that_fails_leaves_the_one_before(tmp_path):
    file = tmp_path / "a.png"
    file.write_text("before")
    with pytest.raises(ValueError, match="no line"), picture(file) as axes:
        axes[0, 0].plot("no line", "no line", "no line")
    assert (names(tmp_path), file.read_text()) == (["a.png"], "before")
    with picture(file) as axes:
        axes[0, 0].plot([1])
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("found", "said"), [(None, "pip install matplotlib"), (object(), "")])
def test_pictures_are_left_out_where_nothing_draws_them(found, said, monkeypatch, capsys):
    monkeypatch.setattr("decoding.report.find_spec", lambda name: found)
    draws.cache_clear()
    assert draws() == (said == "")
    assert said in capsys.readouterr().out
    assert draws() == (said == "")
    assert capsys.readouterr().out == ""  # once is enough
    draws.cache_clear()


def test_a_picture_alone_is_refused_before_the_work(monkeypatch):
    given = {"model": "org/name", "classes": (0,), "out": "x.png"}
    images.Images(**given).check_inputs()
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"out=x\.png is drawn by matplotlib: pip install"):
        images.Images(**given).check_inputs()
