"""`decoding.generate`: where the prompt comes from, and chats."""

import io
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from data.text.chat import encode_prompt
from data.text.tokenizer import train_tokenizer
from decoding import generate
from decoding.chat import Chat, shown
from decoding.engine.params import Chunk, SamplingParams
from decoding.samplers.ngram import NgramSampler
from decoding.samplers.plain import PlainSampler
from tests.support import tiny

END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PARAMS = SamplingParams(max_new_tokens=12, temperature=0)
GREEDY = ["model=m", "max_new_tokens=12", "temperature=0"]


def small(seed=0, context=256, template=TEMPLATE):
    """A sampler of a random model; its tokenizer has an end of turn that is no end of text."""
    tokenizer = train_tokenizer(["def add(a, b):\n    return a + b\n"], 300)
    tokenizer.add_special_tokens({"extra_special_tokens": [END]})
    tokenizer.chat_template = template
    model = tiny.causal_lm(len(tokenizer), seed)
    model.config.max_position_embeddings = context
    return PlainSampler(model, tokenizer)


def turn(role, content):
    return {"role": role, "content": content}


def answer(sampler, *contents, system=None):
    """The greedy answer to the last of user, assistant, user, ..."""
    roles = ("user", "assistant")
    messages = [turn(roles[i % 2], text) for i, text in enumerate(contents)]
    messages = [turn("system", system)] * bool(system) + messages
    return sampler.generate([encode_prompt(sampler.tokenizer, messages)], PARAMS)[0].text


@pytest.fixture
def said(monkeypatch, capfd):
    """Runs the command with a sampler and what standard input says; gives both outputs."""

    def say(sampler, *words, given=b""):
        monkeypatch.setattr(generate, "load", lambda *a, **k: sampler)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        generate.run([*GREEDY, *words])
        return capfd.readouterr()

    return say


def test_the_prompt_is_a_text_a_file_or_standard_input(said, tmp_path):
    file = tmp_path / "prompt"
    file.write_text("def é\n")
    plain = said(small(), "prompt=def é\n").out.split("\n\n")[0]
    assert plain.startswith("def é\n")
    for words, given in ([f"prompt=@{file}"], b""), (["prompt=-"], "def é\n".encode()):
        assert said(small(), *words, given=given).out.split("\n\n")[0] == plain
    assert said(small(), "prompt=@@def").out.startswith("@def")
    assert said(small(), "prompt=a@b").out.startswith("a@b")


@pytest.mark.parametrize(
    ("words", "given", "named"),
    [
        (["prompt=@no/such"], b"", ["@no/such", "@@"]),
        (["prompt=-"], b" \n", ["prompt='-'"]),
        (["prompt=-"], b"\xff", ["prompt='-'", "UTF-8"]),
        ([], b"", ["prompt=", "chat=true"]),
        (["prompt=a", "system=b"], b"", ["system=", "chat=true"]),
    ],
)
def test_a_prompt_that_cannot_be_read_is_one_line(said, words, given, named):
    with pytest.raises(ValueError) as error:
        said(small(), *words, given=given)
    assert all(name in str(error.value) for name in named)
    assert "\n" not in str(error.value)


def test_nothing_is_printed_before_an_option_is_refused(said, capfd):
    plain = small()
    ngrams = NgramSampler(plain.target, plain.tokenizer)
    assert said(ngrams, "prompt=def", "verify=tree").out.startswith("def")
    with pytest.raises(ValueError, match="verify='rejection' is not offered"):
        said(ngrams, "prompt=def", "verify=rejection", "temperature=1")
    assert capfd.readouterr().out == ""


def test_a_model_without_a_chat_template_is_not_asked(said):
    with pytest.raises(ValueError, match="chat template"):
        said(small(template=None), "chat=true", "prompt=hello")


def test_a_question_goes_through_the_template_and_only_the_answer_is_printed(said):
    out, err = said(small(), "chat=true", "prompt=-", given=b"def add\n")
    assert out == answer(small(), "def add") + "\n"
    assert out != small().generate(["def add"], PARAMS)[0].text + "\n"
    assert "12 tokens" in err
    assert "1.00 tokens per target pass" in err
    out, _ = said(small(), "chat=true", "prompt=def add", "system=return")
    assert out == answer(small(), "def add", system="return") + "\n"
    assert out != answer(small(), "def add") + "\n"


def test_an_answer_ends_at_the_templates_end_of_turn(said):
    sampler = small()
    prompt = encode_prompt(sampler.tokenizer, [turn("user", "def add")])
    ids = sampler.generate([prompt], PARAMS)[0].token_ids
    head, end = sampler.target.lm_head.weight.data, sampler.tokenizer.convert_tokens_to_ids(END)
    head[end] = 1.5 * head[ids[6]]  # more probable than that token, wherever that was the best
    whole = sampler.generate([prompt], replace(PARAMS, ignore_eos=True))[0]
    cut = whole.token_ids[: whole.token_ids.index(end) + 1]
    assert len(cut) < len(whole.token_ids) == 12
    out, err = said(sampler, "chat=true", "prompt=def add")
    assert out == sampler.tokenizer.decode(cut, skip_special_tokens=True) + "\n"
    assert f"{len(cut)} tokens" in err
    assert "ended by eos" in err


def test_a_chat_keeps_its_history_until_it_is_cleared(said):
    lines = b"def add\n\n  a + b  \n/clear\na + b\n/exit\nreturn\n"
    out, err = said(small(), "chat=true", given=lines)
    first = answer(small(), "def add")
    remembered, alone = answer(small(), "def add", first, "a + b"), answer(small(), "a + b")
    assert remembered != alone
    assert out == f"{first}\n{remembered}\n{alone}\n"
    assert err.count("tokens per target pass") == 3


def test_the_oldest_turns_are_forgotten_where_the_context_is_short(said):
    context = len(encode_prompt(small().tokenizer, [turn("user", "def add")])) + 12 + 20
    sampler = small(context=context)
    out, err = said(sampler, "chat=true", "system=x", given=b"def add\nreturn\n" + b"a " * 99)
    alone = answer(small(), "return", system="x")
    assert out == f"{answer(small(), 'def add', system='x')}\n{alone}\n"
    assert sum(str(context) in line and "(1)" in line for line in err.splitlines()) == 1
    assert "error: " in err  # of the question that never fits; the chat went on to its end
    wide, _ = said(small(), "chat=true", "system=x", given=b"def add\nreturn\n")
    assert wide != out


class Interrupted(PlainSampler):
    """Ctrl-C comes after the second chunk of the first answer."""

    calls = 0

    def stream(self, *args, **kwargs):
        self.calls += 1
        for n, chunk in enumerate(super().stream(*args, **kwargs)):
            if self.calls == 1 and n == 2:
                raise KeyboardInterrupt
            yield chunk


def test_what_was_printed_before_an_interruption_is_remembered(capfd):
    whole = small()
    chat = Chat(Interrupted(whole.target, whole.tokenizer), PARAMS)
    chat.ask("def add")
    cut = chat.messages[-1]["content"]
    assert cut
    assert answer(small(), "def add").startswith(cut)
    assert cut != answer(small(), "def add")
    chat.ask("return")
    assert capfd.readouterr().out == f"{cut}\n{answer(small(), 'def add', cut, 'return')}\n"


@pytest.mark.processes
def test_an_interruption_ends_the_answer_and_not_the_chat(tmp_path):
    sampler = small(context=40000)
    sampler.target.save_pretrained(tmp_path)
    sampler.tokenizer.save_pretrained(tmp_path)
    command = [sys.executable, "-m", "decoding.generate", f"model={tmp_path}", "chat=true"]
    command += ["max_new_tokens=30000", "seed=1", "ignore_eos=true"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # A shell ignores interrupts in what it runs in the background, this test for example.
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **pipes, bufsize=0, preexec_fn=default) as process:
        process.stdin.write(b"def add\n")
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == b"stopped\n"
        process.stdin.write(b"/exit\n")
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_tokens_that_came_together_are_coloured_in_a_terminal_only(monkeypatch):
    one, two, four = (Chunk(0, "text", list(range(n))) for n in (1, 2, 4))
    assert {shown(c) for c in (one, two, four)} == {"text"}  # to a pipe or a file
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert shown(one) == "text"
    assert all("text" in shown(chunk) for chunk in (two, four))
    assert len({shown(c) for c in (one, two, four)}) == 3
    assert not shown(Chunk(0, "", [1, 2]))
