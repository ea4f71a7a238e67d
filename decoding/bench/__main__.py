"""`python -m decoding.bench`: see `decoding.bench.text`."""

from decoding.bench.options import read_options
from recipes.command import main
from recipes.options import check_first

check_first(__name__, read_options)

from decoding.bench.text import run

main(run)
