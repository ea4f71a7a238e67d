"""A run as model cards describe it: its configuration, provenance and last metrics."""

CONFIG = {
    "recipe": "some_recipe",
    "scale": "lab",
    "seed": 3,
    "network": {
        "_target_": "models.x",
        "source": {"_target_": "models.y", "path": "runs/a/export"},
    },
    "data": {
        "train": {"_target_": "data.rows.documents.documents", "source": "stdlib", "length": 256}
    },
    "trainer": {"max_steps": 60, "batch_size": 8},
    "lora": {"rank": 0},
    "acceptance": {
        "source": "stdlib",
        "prompts": 8,
        "prompt_length": 64,
        "max_new_tokens": 48,
        "dtype": "bfloat16",
    },
}
STORY = {
    "command": "python -m trainers.fit recipe=some_recipe",
    "git_commit": "c0ffee",
    "git_dirty": False,
    "packages": {"torch": "2.13.0"},
    "python": "3.11.7",
    "data": {"train": {"fingerprint": "88072c4ae3d2bc55"}},
    "inputs": {},
    "trainer": {"world_size": 1, "strategy": "ddp", "precision": "32-true"},
    "hardware": {"gpus": [], "processor": "x86_64"},
}
METRICS = "step,val_loss,acceptance_length_t0,acceptance_length_t1\n60,1.5,2.5,2.25\n"
