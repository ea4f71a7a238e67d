"""A user's mistake is one readable line, raised before anything runs."""

import re
from dataclasses import dataclass

import pytest

from decoding.commands import cli
from decoding.engine.params import SamplingParams
from decoding.samplers.plain import PlainSampler
from tests.support import tiny

BAD = [
    ({"max_new_tokens": 0}, "max_new_tokens=0 "),
    ({"max_new_tokens": -3}, "max_new_tokens=-3 "),
    ({"temperature": -0.1}, "temperature=-0.1 "),
    ({"temperature": float("nan")}, "temperature=nan "),
    ({"top_k": -1}, "top_k=-1 "),
    ({"top_p": 0.0}, "top_p=0.0 "),
    ({"top_p": 1.5}, "top_p=1.5 "),
    ({"min_p": 1.0}, "min_p=1.0 "),
    ({"min_p": -0.5}, "min_p=-0.5 "),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 "),
    ({"stop": ("x", "")}, "stop=('x', '') "),
    ({"stop": "ab"}, "stop='ab' "),
    ({"block_size": 0}, "block_size=0 "),
    ({"verify": "magic"}, "['coupled', 'rejection', 'block', 'tree']"),
]


@pytest.mark.parametrize(("values", "named"), BAD)
def test_a_bad_parameter_is_named_with_what_is_allowed(values, named):
    with pytest.raises(ValueError, match=re.escape(named)) as error:
        SamplingParams(**values)
    assert "must be" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_ends_of_every_range_are_allowed():
    SamplingParams(max_new_tokens=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    SamplingParams(top_p=1e-6, min_p=0.999, repetition_penalty=0.5, block_size=1, stop=("a",))


REQUESTS = [
    ([[]], {}, "the prompt is empty"),
    ([""], {}, "the prompt is empty"),
    ([], {}, "no prompt was given"),
    ([[1, 6]], {}, "token 6 is outside the target's vocabulary of 6"),
    ([[-1]], {}, "token -1 is outside"),
    ([[1] * 30], {}, "the target's context of 32"),
    ([[1], [2]], {"seeds": [1]}, "1 seeds were given for 2 prompts"),
]


def short_context():
    model = tiny.causal_lm(6)
    model.config.max_position_embeddings = 32
    return PlainSampler(model, tiny.tokenizer(6))


@pytest.mark.parametrize(("prompts", "options", "message"), REQUESTS)
def test_a_bad_request_is_one_line(prompts, options, message):
    sampler = short_context()
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        sampler.generate(prompts, SamplingParams(max_new_tokens=3), **options)
    assert "\n" not in str(error.value)


def test_a_prompt_that_just_fits_the_context_runs():
    [result] = short_context().generate([[1] * 29], SamplingParams(max_new_tokens=3))
    assert len(result.token_ids) == 3


@dataclass
class Wish:
    """What is wished for."""

    model: str
    count: int = 3
    rate: float = 0.5
    loud: bool = False
    stop: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1, 2)
    seed: int | None = 7


def parse(*arguments):
    return cli.parse(list(arguments), Wish, "decoding.wish")


def test_values_take_their_fields_types():
    wish = parse("model=a=b", "count=4", "rate=1", "loud=True", "seed=None", "sizes=[4,5]")
    assert wish == Wish("a=b", 4, 1.0, True, (), (4, 5), None)
    assert isinstance(wish.rate, float)
    assert parse("model=m", "seed=11").seed == 11


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x", ("x",)),
        ("[]", ()),
        ("[x,y]", ("x", "y")),
        ("['x, y','z']", ("x, y", "z")),
        (r"['\n']", ("\n",)),
        ("a b", ("a b",)),
    ],
)
def test_tuples(text, value):
    assert parse("model=m", f"stop={text}").stop == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["count=2"], "model= is missing: python -m decoding.wish model=..."),
        (["model=m", "cuont=2"], "unknown key 'cuont'. Did you mean 'count'? Choose from"),
        (["model=m", "qqqqqq=2"], "unknown key 'qqqqqq'. Choose from ['count', 'loud',"),
        (["model=m", "count=2.5"], "count='2.5' is not of type int"),
        (["model=m", "rate=fast"], "rate='fast' is not of type float"),
        (["model=m", "loud=yes"], "loud='yes' is not of type bool"),
        (["model=m", "sizes=[1,x]"], "sizes='x' is not of type int"),
        (["model=m", "seed=abc"], "seed='abc' is not of type int"),
        (["model"], "'model' is not of the form key=value"),
        (["=m"], "'=m' is not of the form key=value"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse(*arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_key(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(*arguments)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "What is wished for." in shown
    assert "model  (needed)" in shown
    assert "count=3" in shown


def test_unknown_names_the_nearest_or_all():
    assert "Did you mean 'deer'?" in str(cli.unknown("method", "der", {"plain", "deer"}))
    far = str(cli.unknown("method", "zzz", {"plain", "deer"}))
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
