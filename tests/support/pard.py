"""A tiny target and a drafter in PARD's layout that knows the target's greedy texts by heart."""

import torch

from data.corruption.draft_blocks import DraftBlocks, SuffixNoise
from data.text.tokenizer import draft_token_ids, fingerprint, train_tokenizer
from models.diffusion import draft_logits
from tests.support import tiny

K = 4


def write(root, prompts, new=24, steps=150):
    """Write root/target and root/run/export; prompts: texts that it learns to continue.

    Returns the export's folder.
    """
    tokenizer = train_tokenizer(["self return"], 270)
    target = tiny.causal_lm(len(tokenizer), hidden=32, scale=1.0, seed=3).float()
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    rows = []
    for text in prompts:
        ids = torch.tensor([tokenizer(text).input_ids])
        with torch.no_grad():
            for _ in range(new):
                ids = torch.cat([ids, target(ids).logits[:, -1:].argmax(-1)], 1)
        trained = torch.zeros_like(ids[0])
        trained[-new:] = 1
        row = {"input_ids": ids[0], "document": torch.zeros_like(ids[0]), "trained": trained}
        rows.append(row | {"position": torch.arange(ids.shape[1])})
    drafter = tiny.causal_lm(len(tokenizer), hidden=32, scale=1.0, seed=3).float().train()
    blocks = DraftBlocks(new, K, SuffixNoise(K), tokenizer, layout="pard")
    generator, adam = torch.Generator().manual_seed(0), torch.optim.Adam(drafter.parameters(), 5e-3)
    for step in range(steps):
        row = rows[step % len(rows)]
        batch = {key: x[None] for key, x in blocks(row, generator).items()}
        logits = draft_logits(drafter, batch, attention="causal")
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 2), batch["target"].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    mask_id, _ = draft_token_ids(tokenizer, "pard")
    drafter.config.pard_token = mask_id
    drafter.config.parade = {
        "method": "deer",
        "target": str(root / "target"),
        "tokenizer_fingerprint": fingerprint(tokenizer),
        "attention": "causal",
        "block_size": K,
        "mask_id": mask_id,
    }
    drafter.eval().save_pretrained(root / "run" / "export")
    tokenizer.save_pretrained(root / "run" / "export")
    return root / "run" / "export"
