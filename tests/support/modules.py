"""Training modules of tiny random networks."""

from tests.support import tiny
from trainers.base import Optimization
from trainers.dflash import DFlash


def dflash(model, window=None, **options):
    """DFlash's module for a target; the mask is the target's last token."""
    vocabulary = model.config.vocab_size
    tokenizer = tiny.tokenizer(vocabulary)
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(vocabulary - 1)
    given = {"method": "dflash", "block_size": 3, "target_name": "x", **options}
    return DFlash(tiny.dflash(model, window=window), tokenizer, Optimization(1e-3), model, **given)
