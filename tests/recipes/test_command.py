"""The command line: values by type, every mistake one line, --help and --cfg job."""

import re
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import pytest
import yaml

from data.arguments import Count, Seed, Several, Whole
from models.options import DTYPES
from recipes import command as cli
from recipes import options
from recipes.compose import compose
from recipes.options import NEEDED, ModelOptions, Options, check_batch_sizes, option
from recipes.values import read, show, type_name, unknown
from tests.support.commands import option_classes


@dataclass
class Common:
    """What other wishes have too.

    seed: of all that is drawn,
        one for a call.
    """

    seed: int | None = 7


@dataclass(frozen=True, kw_only=True)
class Wish(Options):
    """What is wished for."""

    EXAMPLE: ClassVar[str] = "model=runs/x count=4"

    model: str = option(NEEDED, "a folder")
    count: Count = option(3, "how many")
    rate: float = option(0.5, "how fast")
    loud: bool = option(False, "with noise")
    stop: tuple[str, ...] = option((), "where it ends")
    sizes: Several[Whole] = option((1, 2), "of each")
    rules: tuple[Literal["a", "b"], ...] = option(("a", "b"), "ways")
    dtype: Literal[*DTYPES] = option("float32", "of weights")
    seed: Seed | None = option(7, "of all that is drawn")


def parse(*arguments):
    return options.parse(list(arguments), Wish, "decoding.wish")


def test_values_take_their_fields_types():
    wish = parse("model=a=b", "count=4", "rate=1", "loud=True", "seed=NULL", "sizes=[4,5]")
    assert wish == Wish(model="a=b", count=4, rate=1.0, loud=True, sizes=(4, 5), seed=None)
    assert isinstance(wish.rate, float)
    assert parse("model=m", "seed=11").seed == 11
    assert parse("model=m", "rules=[]").rules == ()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x", ("x",)),
        ("[]", ()),
        ("[x,y]", ("x", "y")),
        ("['x, y','z']", ("x, y", "z")),
        (r"['\n']", ("\n",)),
        ("a b", ("a b",)),
        ("[don't,stop]", ("don't", "stop")),
        ("[graph=[1,2],k={a: 1}]", ("graph=[1,2]", "k={a: 1}")),
        ("'null'", ("null",)),
    ],
)
def test_tuples(text, value):
    assert parse("model=m", f"stop={text}").stop == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("True", True),
        ("-3", -3),
        ("1e-3", 1e-3),
        ("1_000", "1_000"),
        ("nan", "nan"),
        ("'3'", "3"),
        ("[1, [a, 'b, c'], null]", [1, ["a", "b, c"], None]),
        ("{a: 1, b: {c: [x]}}", {"a": 1, "b": {"c": ["x"]}}),
        ("", ""),
    ],
)
def test_values_without_a_type(text, value):
    assert read(text) == value
    assert type(read(text)) is type(value)


@pytest.mark.parametrize("value", [None, True, 3, 0.25, "text", [1, None, "a"], {"a": [1]}])
def test_what_is_shown_can_be_typed(value):
    assert read(show(value)) == value


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["count=2"], ["model= is missing", "python -m decoding.wish model=..."]),
        (["model=m", "cuont=2"], ["unknown key 'cuont'. Did you mean 'count'? Choose from"]),
        (["model=m", "qqqqqq=2"], ["unknown key 'qqqqqq'. Choose from ['count', 'dtype',"]),
        (["model=m", "count=2.5"], ["count=2.5 is of type float, but int is needed (default 3)"]),
        (["model=m", "rate=fast"], ["rate='fast' is of type str, but float is needed"]),
        (["model=m", "rate=null"], ["rate=null", "float is needed"]),
        (["model=m", "loud=yes"], ["loud='yes'", "bool is needed (default false)"]),
        (["model=m", "sizes=[1,x]"], ["sizes='x'", "list of int is needed (default [1,2])"]),
        (["model=m", "sizes=[1,2"], ["sizes='[1,2'", "list of int is needed"]),
        (
            ["model=m", "sizes=[1,-2]"],
            ["sizes=[1,-2] is not allowed", "each must be greater than or equal to 0"],
        ),
        (["model=m", "sizes=[]"], ["sizes=[] is not allowed"]),
        (
            ["model=m", "count=0"],
            ["count=0 is not allowed", "it must be greater than or equal to 1"],
        ),
        (["model=m", "rate=nan"], ["rate=nan is not allowed"]),
        (["model=m", "rate=-Inf"], ["rate=-inf is not allowed"]),
        (["model=m", "dtype=bloat16"], ["'bloat16'", "Did you mean 'bfloat16'? Choose from"]),
        (["model=m", "rules=[a,c]"], ["unknown rules 'c'. Choose from ['a', 'b']"]),
        (["model=m", "seed=abc"], ["seed='abc' is of type str, but int or null is needed"]),
        (["model"], ["'model' is not of the form key=value"]),
        (["=m"], ["'=m' is not of the form key=value"]),
        (["model=m", "--multirun"], ["unknown flag '--multirun'. Choose from ['--cfg job',"]),
        (["model=m", "--cfg", "all"], ["'all'", "Choose from ['job']"]),
        (["model=m", "--cfg"], ["--cfg", "Choose from ['job']"]),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, parts):
    with pytest.raises(ValueError) as error:
        parse(*arguments)
    assert "\n" not in str(error.value)
    assert [part for part in parts if part not in str(error.value)] == []


def test_options_are_checked_without_a_command_line_too():
    with pytest.raises(ValueError, match=re.escape("rate=nan")):
        Wish(model="m", rate=float("nan"))
    with pytest.raises(ValueError, match="Did you mean 'float32'"):
        Wish(model="m", dtype="floot32")
    check_batch_sizes((1, 3), prompts=3)
    for sizes in ((0,), (4,)):
        with pytest.raises(ValueError, match=r"batch_sizes=.*prompts=3"):
            check_batch_sizes(sizes, prompts=3)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_a_device_may_have_a_number(device, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert ModelOptions(model="m", device=device).device == device
    for wrong in (f"{device}:x", f"{device}:", "gpu", "gpu:0"):
        with pytest.raises(ValueError, match=f"device={wrong!r} is no device. Choose from"):
            ModelOptions(model="m", device=wrong)
    with pytest.raises(
        ValueError, match=r"cuda:2 is not on this machine\. Choose from \['cpu', 'cud"
    ):
        ModelOptions(model="m", device="cuda:2")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"], ["count=2", "--help"]])
def test_help_lists_every_key(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(*arguments)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "What is wished for." in shown
    assert "python -m decoding.wish model=runs/x count=4" in shown
    assert re.search(r"model=\.\.\.  \(str, needed\) +a folder\n", shown)
    assert re.search(r"count=3  \(int\) +how many\n", shown)
    assert f"dtype=float32  ({' | '.join(DTYPES)})" in shown
    assert "seed=7  (int or null)" in shown


def test_help_takes_descriptions_of_shared_classes_from_their_docstrings(capsys):
    with pytest.raises(SystemExit):
        options.parse([], Common, "decoding.common")
    assert "of all that is drawn, one for a call." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("flag", [["--cfg", "job"], ["-c", "job"], ["--cfg=job"]])
def test_cfg_job_prints_what_would_run(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        parse("count=2", *flag)
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"] == "???"
    assert printed["count"] == 2
    assert printed["sizes"] == [1, 2]
    with pytest.raises(ValueError, match="count"):
        parse("count=x", *flag)


def test_unknown_names_the_nearest_or_all():
    assert "Did you mean 'deer'?" in str(unknown("method", "der", {"plain", "deer"}))
    far = str(unknown("method", "zzz", {"plain", "deer"}))
    assert "Did you mean" not in far
    assert "['deer', 'plain']" in far


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (ValueError("two\nlines"), 2, "error: two lines\n"),
        (OSError(28, "No space", "/x"), 2, "error: the disk is full (/x): free some space"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_main_ends_a_users_mistake_with_one_line(raised, code, line, capsys, monkeypatch):
    monkeypatch.delenv("PARADE_TRACEBACK", raising=False)

    def run(argv):
        raise raised

    with pytest.raises(SystemExit) as ended:
        cli.main(run)
    assert ended.value.code == code
    written = capsys.readouterr().err
    assert written.startswith(line)
    assert written.count("\n") == 1


def test_main_does_not_hide_a_bug():
    with pytest.raises(KeyError):
        cli.main(lambda argv: {}[0])


class TestHome:
    """A `~` at the start of a value is the home folder, in every key but those of other texts."""

    @pytest.fixture(autouse=True)
    def home(self, monkeypatch):
        monkeypatch.setenv("HOME", "/the/home")

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("~", "/the/home"), ("~/a b", "/the/home/a b"), ("'~/a'", "/the/home/a"),
            ("a/~/b", "a/~/b"), ("./~", "./~"), ("~no-such-user/x", "~no-such-user/x"),
            ("[~/a,'~/b, c']", ["/the/home/a", "/the/home/b, c"]),
            ("{source: ~/a}", {"source": "/the/home/a"}), ("null", None), ("3", 3),
        ],
    )  # fmt: skip
    def test_it_is_read_whatever_the_type(self, text, value):
        assert read(text) == value
        if isinstance(value, str):
            assert parse(f"model={text}").model == value

    def test_every_text_of_every_command_is_read_so(self):
        asides = {"prompt", "system", "stop", "message", "api_key", "grammar"}  # no paths
        found = set()
        for kind in option_classes():
            needed = [f"{f.name}=x" for f in fields(kind) if f.default is NEEDED]
            for name, hint in options.types_of(kind).items():
                if "str" not in type_name(hint):
                    continue
                with suppress(ValueError):  # one that allows certain texts only
                    # An option that is not read without another is refused before or after.
                    types = options.types_of(kind)
                    others = ["push=a/b", "verify=vllm"] if "push" in types else ["chat=true"]
                    given = [*others, *needed, f"{name}=~/x"]
                    known = [g for g in given if g.partition("=")[0] in types]
                    value = getattr(options.parse(known, kind, "decoding.x"), name)
                    path = "~/x" if name in asides else "/the/home/x"
                    assert value in (path, (path,))
                    found.add(name)
        assert {"model", "target", "out", "source", "run", "checkpoint", "answers", "also"} <= found
        assert asides <= found

    def test_every_key_of_a_recipe_is_read_so(self):
        given = ["runs=~/r", "tokenizer.source=~/c", "data.train.source=~/c", "resume=~/s.ckpt"]
        config = compose(["recipe=ar_target", *given, "+own=~/o"], "fit")
        assert config.runs == "/the/home/r"
        assert config.data.folder == "/the/home/r/data"
        assert (config.tokenizer.source, config.resume) == ("/the/home/c", "/the/home/s.ckpt")
        assert (config.data.train.source, config.own) == ("/the/home/c", "/the/home/o")
        config = compose(["recipe=deer_stage1", "target=~/t", "answers=~/a"], "fit")
        assert (config.module.target_name, config.data.train.source) == (
            "/the/home/t",
            "/the/home/a",
        )
        collect = ["recipe=deer_answers", "target=~/t", "prompts.source=~/p.jsonl"]
        config = compose(collect, "collect")
        assert (config.target, config.prompts.source) == ("/the/home/t", "/the/home/p.jsonl")
        assert config.collector.teacher == "/the/home/t"


def test_an_option_that_another_one_needs_is_refused_alone():
    @dataclass(frozen=True, kw_only=True)
    class Push(Options):
        push: str | None = option(None, "where to")
        private: bool | None = option(None, "or not", needs="push")

    for given in (["private=null"], ["push=a/b"], ["push=a/b", "private=true"]):
        options.parse(given, Push, "decoding.push")
    with pytest.raises(ValueError, match="private= is not read without push="):
        options.parse(["private=false"], Push, "decoding.push")
