"""`python -m decoding.bench`: see `decoding.bench.text`."""

from decoding.bench.text import run
from decoding.commands.cli import main

main(run)
