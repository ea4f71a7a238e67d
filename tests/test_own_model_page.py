"""docs/how_to/own_model.md: every command and snippet runs, in the order of the page, in tiny."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from data.text.tokenizer import train_tokenizer
from tests.support import tiny
from tests.support.files import write_jsonl
from tests.support.hub_server import WRITE, HubServer
from tests.support.lab import TEMPLATE
from tests.support.pages import blocks

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/how_to/own_model.md").read_text()
TEXTS = [f"def f{i}(x):\n    return x + {i}\n" for i in range(200)]
# What each command is given in addition, so that it takes seconds.
FIT = [
    "minutes=null", "trainer.max_steps=2", "trainer.batch_size=2", "trainer.micro_batch_size=2",
    "data.validation_rows=2", "acceptance.source=chats.jsonl", "acceptance.prompts=1",
    "acceptance.max_new_tokens=4",
]  # fmt: skip
ROWS = ["data.train.length=64", "data.validation.length=64", "data.corruption.anchors=4"]
BLOCKS = [*ROWS, "data.corruption.length=4", "module.block_size=4"]
MEASURED = ["prompts=1", "max_new_tokens=3"]
SIZES = {
    "decoding.generate": ["max_new_tokens=4"],
    "decoding.collect deer_answers": ["minutes=null", "collector.max_new_tokens=6"],
    "decoding.collect pcllm_trajectories": [
        "minutes=null", "collector.max_new_tokens=32", "prompts.count=60",
    ],
    "trainers.fit drafter": [
        *FIT, *ROWS, "module.block_size=4", "network.layers=2",
    ],
    "trainers.fit deer_stage2": [*FIT, *BLOCKS, "data.corruption.schedule.shortest=4"],
    "trainers.fit pcllm_round1": FIT,
    "decoding.bench": MEASURED,
    "decoding.bench.heldout_loss": ["rows=2"],
    "decoding.serve": ["port=0"],
    "trainers.export": [],
}  # fmt: skip
# Inputs that the training would build with the sizes of scale=small.
ANSWERS = ["recipe=deer_answers", "prompts.source=chats.jsonl", "collector.max_new_tokens=16"]
INPUTS = [
    ["recipe=diffusion_adapt", "network.layers=[0,2]", "data.train.source=chats.jsonl",
     "data.validation.source=chats.jsonl"],
    ["recipe=deer_stage1", "answers=runs/deer_answers"],
]  # fmt: skip
NOT_RUN = "pip install "


def model(folder, seed):
    """A folder with a tiny chat model; the tokenizer is the same for every seed."""
    network = tiny.causal_lm(320, seed, kind="qwen3", layers=3, eos_token_id=0)
    network.float().save_pretrained(folder)
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def chats(file, number):
    rows = [
        [{"role": "user", "content": f"write f{i}"}, {"role": "assistant", "content": text}]
        for i, text in enumerate(TEXTS[:number])
    ]
    write_jsonl(file, [{"messages": messages} for messages in rows])


class Walk:
    """A walk of a page's code blocks in a folder.

    Attributes:
        said: (the command as on the page, what it printed) of each, in order.
    """

    def __init__(self, folder, endpoint="http://127.0.0.1:9"):
        hub = {"HF_ENDPOINT": endpoint, "HF_TOKEN": WRITE, "HF_HUB_OFFLINE": "0",
               "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}  # fmt: skip
        here = {"PYTHONPATH": str(ROOT), "HF_MODULES_CACHE": str(folder / "modules")}
        self.folder, self.environment = folder, {**os.environ, **hub, **here}
        self.said, self.server, self.address = [], None, None

    def page(self, text):
        """Run every block of a page."""
        try:
            for kind, lines in blocks(text):
                if kind == "python":
                    self.snippet("\n".join(lines))
                    continue
                for line in lines:
                    self.line(line)
            assert self.server is None, "nobody asks the server"
        finally:
            if self.server is not None:
                self.server.kill()
                self.server.communicate()

    def line(self, line):
        words = shlex.split(line, comments=True)
        if line.startswith(NOT_RUN) or not words:
            return
        assert words[:2] == ["python", "-m"], f"nobody runs: {line}"
        module, *arguments = words[2:]
        own = [word for word in arguments if word.startswith(("scale=", "target="))]
        if "recipe=drafter" in arguments and self.is_missing("deer_answers"):
            self.run("-m", "decoding.collect", *own, *ANSWERS)
        if "recipe=deer_stage2" in arguments and self.is_missing("deer_stage1"):
            for input in INPUTS:
                self.run("-m", module, *own, *input, *FIT, *BLOCKS)
        recipe = [word.partition("=")[2] for word in arguments if word.startswith("recipe=")]
        given = [*arguments, *SIZES[" ".join([module, *recipe])]]
        if "recipe=drafter" in arguments and "name=" in line:
            given.append("then=[]")  # the first one is calibrated and measured
        if module == "decoding.serve":
            self.serve(given)
        else:
            self.said.append((line, self.run("-m", module, *given)))

    def is_missing(self, recipe):
        """Whether a page's walk has yet to build an input; a single line needs none."""
        return bool(self.said) and not (self.folder / "runs" / recipe).exists()

    def snippet(self, code):
        asks = "localhost:8000" in code
        if asks:
            code = code.replace("http://localhost:8000/", self.address)
        (self.folder / "snippet.py").write_text(code)
        self.said.append((code, self.run("snippet.py")))
        if asks:
            self.server.terminate()
            assert self.server.communicate(timeout=60) is not None
            assert self.server.returncode == 0
            self.server = None

    def start(self, *command, **pipes):
        return subprocess.Popen(
            [sys.executable, *command], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **pipes,
        )  # fmt: skip

    def run(self, *command):
        """Run a command that must succeed; its output. Its standard input is one question."""
        process = self.start(*command, stdin=subprocess.PIPE)
        output, _ = process.communicate("write f3\n")
        assert process.returncode == 0, f"{shlex.join(command)}\n{output}"
        return output

    def serve(self, arguments):
        self.server = self.start("-m", "decoding.serve", *arguments)
        said = ""
        while not (found := re.search(r"http://\S+/", said)):
            line = self.server.stdout.readline()
            assert line, f"the server has ended: {said}"
            said += line
        self.address = found[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a user: two models, two files of chats."""
    folder = tmp_path_factory.mktemp("user")
    model(folder / "my-model", 0)
    model(folder / "my-tuned-model", 1)
    chats(folder / "chats.jsonl", 200)
    chats(folder / "more.jsonl", 20)
    return folder


@pytest.mark.slow
def test_the_page(folder):
    with HubServer() as hub:
        walk = Walk(folder, hub.endpoint)
        walk.page(PAGE)
        pushed = hub.files("org/my-drafter")
    said = walk.said
    assert len(said) > 20

    def output(*words):
        return next(output for line, output in said if all(word in line for word in words))

    assert "tokens per target pass" in output("method=ngram")
    assert "with other weights than 'my-tuned-model'" in output("target=my-tuned-model")
    assert "dflash, tree" in output("decoding.bench model=runs/drafter/export")
    trained = output("trainers.fit recipe=drafter")
    assert "are now in runs/drafter/export/config.json" in trained
    assert "dflash, tree" in trained
    assert "would push" in output("dry_run=true")
    assert b"base_model:\n- org/my-model\n" in pushed["README.md"]
    assert b"dflash, tree" in pushed["README.md"]  # the bench's table
    assert {"model.safetensors", "custom_generate/generate.py"} <= pushed.keys()
    assert "runs/pcllm_round1/export" in output("heldout_loss")


@pytest.mark.parametrize(
    ("words", "new", "told"),
    [
        ("chat=true prompt=", "chat=true promt=", "unknown key 'promt'"),
        ("prompts.source=chats", "prompts.sauce=chats", "prompts.sauce"),
        ("minutes=60", "minuten=60", "minuten"),
        ("lora.rank=8", "lora.rang=8", "lora.rang"),
        ("questions=chats", "question=chats", "'question'"),
        ("port=8000", "sport=8000", "sport"),
        ("push=org/my-drafter", "pusch=org/my-drafter", "pusch"),
        ("python -m trainers.export", "make my-drafter", "nobody runs: make my-drafter"),
        ("python -m decoding.serve", "python -m decoding.fetch", "decoding.fetch"),
    ],
)
def test_a_mistake_on_the_page_is_found(folder, words, new, told):
    line = next(line for _, lines in blocks(PAGE) for line in lines if words in line)
    with pytest.raises((AssertionError, KeyError), match=re.escape(told)):
        Walk(folder).line(line.replace(words, new))
