"""A tiny target and a drafter that knows its greedy texts by heart, so it has much to lose."""

import torch

from data.corruption.draft_blocks import DraftBlocks, SuffixNoise
from data.text.tokenizer import (
    draft_token_ids,
    fingerprint,
    train_tokenizer,
    with_draft_tokens,
)
from models.dflash import draft_states
from models.dflash_init import from_target
from models.diffusion import draft_logits, from_causal_lm
from models.hidden_states import capture
from tests.support import tiny

K = 4


def greedy_rows(target, tokenizer, prompts, new):
    """Packed rows of prompts and the target's greedy continuations, of which these are trained."""
    for text in prompts:
        ids = torch.tensor([tokenizer(text).input_ids])
        with torch.no_grad():
            for _ in range(new):
                ids = torch.cat([ids, target(ids).logits[:, -1:].argmax(-1)], 1)
        trained = torch.zeros_like(ids[0])
        trained[-new:] = 1
        row = {"input_ids": ids[0], "document": torch.zeros_like(ids[0]), "trained": trained}
        yield row | {"position": torch.arange(ids.shape[1])}


def dflash_logits(drafter, target, batch):
    """What a DFlash drafter drafts of a packed row."""
    A, size = batch["target"].shape[1], 1 + batch["target"].shape[2]
    clean = batch["input_ids"][:, : -A * size]
    with torch.no_grad(), capture(target, drafter.target_layer_ids) as states:
        target(clean)
    return drafter.logits(draft_states(drafter, target, batch, states), target)


def write(root, prompts, layout="pard", new=24, steps=150):
    """Write root/target and root/run/export; prompts: texts that it learns to continue.

    Returns the export's folder.
    """
    plain = train_tokenizer(["self return"], 270)
    target = tiny.causal_lm(len(plain), hidden=32, scale=1.0, seed=3).float()
    target.save_pretrained(root / "target")
    plain.save_pretrained(root / "target")
    rows = [*greedy_rows(target, plain, prompts, new)]
    tokenizer = with_draft_tokens(plain, layout)
    mask_id, sep_id = draft_token_ids(tokenizer, layout)
    if layout == "dflash":
        drafter, method = from_target(target, tokenizer, 2, 1).train(), "dflash"
        drafter.config.block_size = 1 + K
        drafter.config.dflash_config["mask_token_id"] = mask_id
    else:
        drafter, method = from_causal_lm(target, tokenizer).train(), "deer"
    attention = "causal" if layout == "pard" else "prefix_causal"
    blocks = DraftBlocks(new, K, SuffixNoise(K), tokenizer, layout)
    generator, adam = torch.Generator().manual_seed(0), torch.optim.Adam(drafter.parameters(), 5e-3)
    for step in range(steps):
        sample = blocks(rows[step % len(rows)], generator)
        batch = {key: x[None] for key, x in sample.items()}
        if layout == "dflash":
            logits = dflash_logits(drafter, target, batch)
        else:
            logits = draft_logits(drafter, batch, attention=attention)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 2), batch["target"].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    if layout == "pard":
        drafter.config.pard_token = mask_id
    drafter.config.parade = {
        "method": method,
        "target": str(root / "target"),
        "tokenizer_fingerprint": fingerprint(plain),
        "attention": attention,
        "block_size": K,
        "mask_id": mask_id,
        **({} if sep_id is None else {"sep_id": sep_id}),
    }
    drafter.eval().save_pretrained(root / "run" / "export")
    tokenizer.save_pretrained(root / "run" / "export")
    return root / "run" / "export"
