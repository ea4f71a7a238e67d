"""Instructions from docstrings: which functions become documents, and what of them."""

import textwrap
from pathlib import Path

import pytest

from data.corpora import docstrings
from data.corpora.docstrings import LONGEST, docstring_documents
from data.corpora.sources import load_documents
from data.corpora.stdlib import is_held_out
from data.text.prompts import heldout_prompts

FILES = {
    "pack/a.py": '''
        import re

        @decorated
        def add(a: int, b: int = 1, *, c=None) -> int:
            """Add two numbers.

            The sum.
            """
            # why
            return a + b  # inner

        def bare(a):
            return "no docstring"

        def quotes(a):
            text = """not a docstring"""
            return text

        async def wait(
            seconds,
        ):
            """Wait."""
            def inner():
                """Inner."""
            return inner

        class Thing:
            def method(self):
                """A method."""
        ''',
    "pack/b.py": '''
        def add(a: int, b: int = 1, *, c=None) -> int:
            """Add two numbers.

            The sum.
            """
            return "a duplicate"

        def add(a):
            """Add one."""

        def add(b):
            """The same id again."""

        def manual():
            """LONG"""
        '''.replace("LONG", "x" * LONGEST),
    "pack/old.py": '''
        def broken():
            """Python 2."""
            print "x"
        ''',
    "pack/tests/test_a.py": '''
        def test():
            """A test."""
        ''',
}
ADD = "Write a Python function `add(a: int, b: int=1, *, c=None)`. Add two numbers.\n\nThe sum."


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The files above instead of the standard library; no packages."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    (tmp_path / "pack" / "latin.py").write_bytes(b'def latin():\n    """\xe9"""\n')
    monkeypatch.setattr(docstrings.sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def everything():
    return {d["id"]: d for split in ("train", "heldout") for d in docstring_documents(split)}


def test_functions_with_docstrings_become_unique_documents(installed):
    found = everything()
    assert {id: d["prompt"] for id, d in found.items()} == {
        "pack/a.py:add": ADD,
        "pack/a.py:wait": "Write a Python function `wait(seconds)`. Wait.",
        "pack/b.py:add": "Write a Python function `add(a)`. Add one.",
    }
    answer = found["pack/a.py:add"]["answer"]
    assert answer.startswith("def add(")
    assert answer.endswith("return a + b  # inner")
    assert found["pack/a.py:wait"]["answer"].endswith("    return inner")


def test_a_duplicate_counts_once_it_differs(installed):
    file = installed / "pack" / "b.py"
    file.write_text(file.read_text().replace("The sum.", "Another sum."))
    docstrings._functions.cache_clear()
    assert "Another sum." in everything()["pack/b.py:add"]["prompt"]


def test_every_second_function_is_asked_for_by_its_head(installed):
    lines = [f'def f{i}():\n    """Number {i}."""\n    return {i}\n\n' for i in range(200)]
    (installed / "many.py").write_text("\n".join(lines))
    found = []
    for split in ("train", "heldout"):
        in_words = {d["id"]: d for d in load_documents("docstrings", split)}
        either = {d["id"]: d for d in load_documents("functions", split)}
        assert either.keys() == in_words.keys()
        assert all(d["answer"] == in_words[id]["answer"] for id, d in either.items())
        by_head = [id for id, d in either.items() if d["prompt"] != in_words[id]["prompt"]]
        found += by_head
        for id in by_head:
            before, head = either[id]["prompt"].removesuffix("\n```").split("```python\n")
            assert before == "Complete this function:\n\n"
            assert in_words[id]["answer"].startswith(head)
            assert head.endswith('"""')
    assert 80 < len(found) < 120  # of 203


def test_splits_are_by_the_hash_of_the_id(installed):
    lines = [f'def f{i}():\n    """Number {i}."""\n\n' for i in range(200)]
    (installed / "many.py").write_text("\n".join(lines))
    train, heldout = (
        [d["id"] for d in load_documents("docstrings", split)] for split in ("train", "heldout")
    )
    assert len(train) + len(heldout) == 203
    assert heldout == [id for id in heldout if is_held_out(id)] != []
    assert not any(map(is_held_out, train))
    with pytest.raises(ValueError, match=r"'test'.*'train', 'heldout'"):
        docstring_documents("test")


def test_prompts_are_chats_where_there_is_a_template(installed, tokenizer, chat_tokenizer):
    [plain] = [
        p
        for p in heldout_prompts("docstrings", tokenizer, 3, 200, split="train")
        if "a.py:a" in p["id"]
    ]
    assert plain["text"] == ADD
    chats = heldout_prompts("docstrings", chat_tokenizer, 3, 200, split="train")
    assert f"<|im_start|>user\n{ADD}<|im_end|>\n<|im_start|>assistant\n" in [
        p["text"] for p in chats
    ]
    raw = heldout_prompts("docstrings", chat_tokenizer, 3, 200, split="train", chat=False)
    assert ADD in [p["text"] for p in raw]


def test_a_python_without_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(docstrings.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    for source in ("docstrings", "functions"):
        with pytest.raises(ValueError, match=rf"'{source}'.*none"):
            load_documents(source)


def test_the_standard_library_has_some(monkeypatch):
    stdlib = docstrings.sysconfig.get_path("stdlib")
    folder = str(Path(stdlib) / "email")
    monkeypatch.setattr(docstrings.sysconfig, "get_path", lambda name: folder)
    found = everything()
    assert found["utils.py:formataddr"]["prompt"].startswith(
        "Write a Python function `formataddr(pair, charset='utf-8')`. "
    )
    # Code at the left margin inside a docstring, and the end of a signature, do not end one.
    for document in found.values():
        compile(document["answer"], document["id"], "exec")
