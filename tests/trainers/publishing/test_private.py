"""Planted secrets: nothing of them is in what a push sends."""

import json
from pathlib import Path

import pytest
import yaml

from tests.support.cards import CONFIG, METRICS, STORY
from trainers.publishing.card import model_card, with_bench
from trainers.publishing.private import public

HUB = "hf_" + "aB3" * 8
WORD = "correct-horse-battery"


@pytest.fixture(autouse=True)
def alice(monkeypatch):
    """A machine of alice's, with a token and a password in the environment."""
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice"))
    monkeypatch.setattr(Path, "cwd", lambda: Path("/home/alice/work"))
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    monkeypatch.setattr("socket.gethostname", lambda: "wonderland")
    monkeypatch.setenv("WANDB_API_KEY", WORD)
    monkeypatch.setenv("SOME_TOKENS", "7")  # no secret, though its name is one's


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/alice/work/runs/x/export", "runs/x/export"),
        ("/home/alice/work", ""),
        ("/home/alice/worker/x", "~/worker/x"),
        ("/home/alice/data", "~/data"),
        ("/home/alicea/data", ".../data"),
        ("/scratch/alice/models/llama-3.1", ".../llama-3.1"),
        ("runs/alice/x", "runs/user/x"),
        ("python -m trainers.fit runs=/mnt/a/b 'also=[/mnt/c/d,e/f]'",
         "python -m trainers.fit runs=.../b 'also=[.../d,e/f]'"),
        (f"python -m x token={HUB}", "python -m x token=[secret]"),
        (f"logger={WORD}7", "logger=[secret]7"),
        ("https://alice:pw@host.org/v1", "https://host.org/v1"),
        ("teacher=http://gpu-1:8000/v1", "teacher=http://host:8000/v1"),
        ("http://llm.corp.example:8000/v1", "http://host:8000/v1"),
        ("http://10.0.0.7/v1", "http://host/v1"),
        ("made on wonderland", "made on host"),
        ("file:///home/alice/x", "~/x"),
    ],
)  # fmt: skip
def test_what_is_private_goes(text, expected):
    assert public(text) == expected


@pytest.mark.parametrize(
    "text",
    ["HuggingFaceTB/SmolLM2-135M", "runs/x/export", "data.rows.documents", "a / b", "1/2", "// 3",
     "https://huggingface.co/Qwen/Qwen3-8B", "tokens/s", "[0, 1]", "alice", "seed=7", "0:60GiB",
     "wonderland-7B", "org/wonderland", "wonderlands"],
)  # fmt: skip
def test_what_is_not_stays(text):
    assert public(text) == text


def test_other_values_stay():
    node = {"a": 1, "b": [None, True, "/etc/x"], "/mnt/y": 0.5}
    assert public(node) == {"a": 1, "b": [None, True, ".../x"], ".../y": 0.5}


def test_a_card_and_its_benches(tmp_path):
    planted = [WORD, HUB, "/home/alice", "/scratch/alice"]
    config = {**CONFIG, "network": {"path": "/scratch/alice/base"}, "target": "/home/alice/llama"}
    story = {
        **STORY,
        "command": f"python -m trainers.fit runs=/home/alice/runs token={HUB}",
        "inputs": {"/scratch/alice/answers": "c0ffee"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "provenance.json").write_text(json.dumps(story))
    (tmp_path / "metrics.csv").write_text(METRICS)
    entry = {"method": "deer", "target": "/home/alice/llama"}
    card = model_card(entry, tmp_path)
    bench = tmp_path / "bench" / "bench.csv"
    bench.parent.mkdir()
    bench.write_text("sampler,tokens/s\n/home/alice/runs/x,3.5\n")
    card = with_bench(card, bench, f"python -m decoding.bench model=/home/alice/x key={WORD}")
    assert not [secret for secret in planted if secret in card]
    for shown in ("~/runs", "~/llama", ".../answers"):
        assert shown in card
    assert "base_model" not in card  # folders are none
