"""`python -m decoding.bench`: see `decoding.bench.text`."""

from decoding.bench.text import run
from recipes.command import main

main(run)
