"""A tiny target and a drafter's export on disk, without any training."""

import torch

from tests.support import tiny
from trainers.publishing.bundle import write_bundle

V = 12
PROMPTS = [[2, 7, 1, 8, 3], [3, 1], [6, 6, 6, 0]]


def agreeable(vocabulary, seed, **config):
    """A random causal LM whose tokens are alike, so that two of them often say the same."""
    model = tiny.causal_lm(vocabulary, seed=seed, **config).float()
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    return model


def target(**config):
    return agreeable(V, 0, **config)


def write_drafter(folder, model, block_size=3, vocabulary=V + 2):
    """The export of a drafter that has the target's own weights and two more tokens."""
    drafter = agreeable(vocabulary, 1)
    with torch.no_grad():
        for new, old in zip(drafter.parameters(), model.parameters()):
            new[: len(old)] = old
    drafter.config.parade = {
        "method": "deer",
        "target": "org/target",
        "block_size": block_size,
        "mask_id": vocabulary - 2,
        "sep_id": vocabulary - 1,
    }
    drafter.save_pretrained(folder)
    tiny.tokenizer(V).save_pretrained(folder)
    write_bundle(folder, "deer")
    return folder


def padded(prompts=PROMPTS, pad=0):
    """{"input_ids", "attention_mask"} with padding on the left."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
    }
