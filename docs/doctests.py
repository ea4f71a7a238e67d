"""A griffe extension: doctests in the text of a docstring become code blocks of the reference."""

import re

import griffe

# From a line with >>> to the next blank line, at one indentation.
_DOCTEST = re.compile(r"^( *)>>> .*(?:\n[ ]*\S.*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """The docstring with a fence around each doctest, indented as the doctest is."""
    return _DOCTEST.sub(lambda m: f"\n{m[1]}```pycon\n{m[0]}\n{m[1]}```", text)


class Doctests(griffe.Extension):
    """Fences the doctests of every object's docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
