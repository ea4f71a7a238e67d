"""A chat template has an end, in time and memory, and its errors are one line."""

import os
import signal
import subprocess
import sys
import time

import pytest

from data.text import rendering
from data.text.chat import encode_prompt
from data.text.rendering import render
from tests.support import tiny

pytestmark = pytest.mark.processes

CHAT = [{"role": "user", "content": "abc"}]
FINE = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{{ eos_token }}"
NESTED = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}"
DOUBLED = (
    "{% set s = namespace(x='a') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}"
)
DEEP = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"
BAD = [
    (NESTED, "more than 1 seconds"),
    (TWICE, "more than 1 seconds"),
    ("{{ lipsum(10**9) }}", "more than 1 seconds"),
    ("{{ 7 ** (7 ** (7 ** 7)) }}", "more than 1 seconds|MemoryError"),
    (DOUBLED, "more than 1 seconds|MemoryError"),
    ("{{ 'a' * 10 ** 12 }}", "MemoryError"),
    ("{{ 'a'.center(10 ** 12) }}", "MemoryError"),
    ("{{ '%999999999999d' % 1 }}", "MemoryError"),
    ("{{ 'a' * 2 ** 25 }}", "more than 16777216 characters"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    (DEEP, "RecursionError"),
    ("{{ raise_exception('one\ntwo') }}", "one two"),
    ("{{ messages[9].content }}", "no element 9"),
    ("{% for m in messages %}", "end of template"),
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
]


@pytest.mark.parametrize(("template", "message"), BAD, ids=range(len(BAD)))
def test_a_template_without_an_end_is_one_line(monkeypatch, template, message):
    render(FINE, CHAT)  # the process has started
    monkeypatch.setattr(rendering, "SECONDS", 1)
    begun = time.monotonic()
    with pytest.raises(ValueError, match=message) as error:
        render(template, CHAT)
    assert time.monotonic() - begun < 20
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert render(FINE, CHAT, eos_token="!") == ("user: abc;!", [])  # the next one is rendered


def test_messages_without_an_end_are_one_line():
    deep = "a"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        render(FINE, [{**CHAT[0], "more": deep}])


def test_a_chat_is_as_transformers_renders_it():
    tokenizer = tiny.tokenizer(12)
    tokenizer.chat_template = FINE
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert encode_prompt(tokenizer, CHAT) == tokenizer(text, add_special_tokens=False).input_ids


def test_the_process_ends_with_its_command():
    code = (
        "from data.text import rendering as r; r.render('a', [{}]); "
        "print(r._idle[0].pid, flush=True); input()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        worker = int(process.stdout.readline())
        os.kill(worker, 0)
        process.send_signal(signal.SIGKILL)
    ends = time.monotonic() + 20
    while os.path.exists(f"/proc/{worker}"):
        with open(f"/proc/{worker}/stat") as file:  # init may be slow to reap it
            if file.read().rpartition(")")[2].split()[0] == "Z":
                break
        assert time.monotonic() < ends
        time.sleep(0.05)
