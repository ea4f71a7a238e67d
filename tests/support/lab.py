"""One tiny chain for the whole session: corpus, target, diffusion LM, answers, both stages."""

import logging
import os
import random
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from decoding.collect import collect
from recipes.compose import compose
from trainers.fit import fit

WORDS = (
    "self",
    "return",
    "value",
    "name",
    "for",
    "in",
    "if",
    "else",
    "None",
    "def",
    "class",
    "key",
)

SMALL = [
    "acceptance.prompts=2",
    "acceptance.prompt_length=8",
    "acceptance.max_new_tokens=6",
    "acceptance.dtype=float32",
    "trainer.max_steps=4",
    "trainer.batch_size=4",
    "trainer.micro_batch_size=4",
    "trainer.validate_every=4",
    "trainer.checkpoint_every=2",
    "trainer.precision=32-true",
    "trainer.accelerator=cpu",
    "data.validation_rows=4",
]
BLOCKS = ["data.corruption.anchors=4", "data.corruption.length=4", "module.block_size=4"]
SMALL_IMAGES = [
    "trainer.max_steps=4", "trainer.batch_size=4", "trainer.micro_batch_size=4",
    "trainer.validate_every=4", "trainer.checkpoint_every=2", "trainer.accelerator=cpu",
    "data.validation_rows=4", "network.patch=4", "network.backbone.hidden_size=16",
    "network.backbone.intermediate_size=16", "network.backbone.num_attention_heads=2",
    "network.backbone.num_hidden_layers=1", "network.heads.diffusion.width=8",
    "network.heads.diffusion.steps=3", "network.heads.mixture.components=2",
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_corpus(folder, documents=160):
    """Small random programs, enough for a held-out fortieth."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for i in range(documents):
        lines = [" ".join(draw.choices(WORDS, k=6)) for _ in range(12)]
        (folder / f"{i:03d}.py").write_text("\n".join(lines) + "\n")
    return folder


class Lab:
    """Commands of the lab scale on a tiny corpus and tiny networks."""

    def __init__(self, root):
        self.corpus = write_corpus(root / "corpus")
        self.runs = root / "runs"

    def arguments(self, recipe, *overrides):
        text = [f"data.{split}.source={self.corpus}" for split in ("train", "validation")]
        rows = [f"data.{split}.length=48" for split in ("train", "validation")]
        own = {
            "ar_target": [
                f"tokenizer.source={self.corpus}",
                "tokenizer.vocab_size=320",
                *text,
                *rows,
                "network.hidden_size=32",
                "network.intermediate_size=64",
                "network.num_hidden_layers=3",
                "network.num_attention_heads=2",
                "network.num_key_value_heads=1",
                "network.max_position_embeddings=256",
            ],
            "diffusion_adapt": [*text, *rows, *BLOCKS, "network.layers=[0,2]"],
            "ar_drafter": [*rows, "network.layers=[0,2]"],
            "asarm_joint": [*text, *rows, "data.corruption.curriculum=2"],
            "dllm_block": [*text, *rows, "module.block_size=4"],
            "spiffy_calibrate": [
                *text,
                *(
                    f"data.{split}.{key}"
                    for split in ("train", "validation")
                    for key in ("count=16", "length=8")
                ),
                "module.nodes=3",
                "module.max_new_tokens=8",
            ],
            "deer_stage1": [*rows, *BLOCKS],
            "dflash": [
                *rows,
                "data.corruption.anchors=4",
                "network.layers=[0,2]",
                "network.states=2",
                "module.block_size=4",
            ],
            "drafter": [
                *rows,
                "data.corruption.anchors=4",
                "network.layers=[0,2]",
                "module.block_size=4",
            ],
            "eagle3": [*rows, "data.corruption.anchors=4", "network.states=2"],
            "redrafter": [*rows, "data.corruption.anchors=4", "network.width=16"],
            "dflash_markov": [*rows, "data.corruption.anchors=4", "module.block_size=4"],
            "deer_stage2": [*rows, *BLOCKS, "data.corruption.schedule.shortest=1"],
        }[recipe]
        source = f"acceptance.source={self.corpus}"
        return [f"recipe={recipe}", f"runs={self.runs}", source, *own, *SMALL, *overrides]

    def fit(self, recipe, *overrides):
        return fit(compose(self.arguments(recipe, *overrides), "fit"))

    def start(self, recipe, *overrides, **environment):
        """The same as a process of its own; its output is one pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", "trainers.fit", *self.arguments(recipe, *overrides)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def collect_arguments(self, *overrides):
        return [
            "recipe=deer_answers",
            f"runs={self.runs}",
            f"prompts.source={self.corpus}",
            "prompts.count=120",
            "prompts.length=8",
            "collector.max_new_tokens=16",
            "collector.dtype=float32",
            "shard_size=20",
            *overrides,
        ]

    def collect(self, *overrides):
        return collect(compose(self.collect_arguments(*overrides), "collect"))


def prepared(root: Path) -> Lab:
    """Make the lab whose tiny networks draw dropout while they train."""
    lab = Lab(root)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        lab.fit("ar_target", "+network.attention_dropout=0.1")
        lab.fit("diffusion_adapt")
        lab.collect()
        lab.fit("deer_stage1")
    return lab


def finish(process: subprocess.Popen) -> str:
    """Wait for a run that must succeed; its output."""
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def fit_images(runs, recipe, *overrides):
    """Train on the digits with a tiny network; the export's folder."""
    return fit(compose([f"recipe={recipe}", f"runs={runs}", *SMALL_IMAGES, *overrides], "fit"))
