"""Code blocks and commands of the documentation's pages."""

import re
import shlex

BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(text):
    """(language, lines) of a page's code blocks; a line that ends in a backslash goes on."""
    return [(kind, code.replace("\\\n", " ").splitlines()) for kind, code in BLOCK.findall(text)]


def commands(text):
    """(module, arguments) of every `python -m` of a page's code blocks."""
    for line in (line for _, lines in blocks(text) for line in lines):
        _, dash, rest = line.partition("python -m ")
        if dash and "${" not in line and not line.lstrip().startswith("#"):
            module, *arguments = shlex.split(rest, comments=True)
            yield module, arguments
