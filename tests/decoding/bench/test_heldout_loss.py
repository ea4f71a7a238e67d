"""Held-out loss: training's own validation loss, of any models side by side."""

import csv
import json
from itertools import islice

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch

from data.corpora.answers import read_answers, shard_path
from data.corpora.stdlib import is_held_out
from data.rows.documents import documents
from data.rows.stream import Stream
from data.rows.trajectories import Answer, interleave
from data.text.tokenizer import fingerprint, train_tokenizer
from decoding.bench.heldout_loss import mean_loss, run
from tests.support import tiny
from tests.support.lab import write_corpus
from trainers.ar import Autoregressive
from trainers.base import Optimization
from trainers.pcllm import ProgressiveConsistency

TOKENIZER = train_tokenizer(["self return value name", "def class key"], 280)
N, n = 3, 4


def network_of(seed):
    return tiny.causal_lm(len(TOKENIZER), seed=seed, scale=1.0).float()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A corpus, a collection of 20 held-out answers and as many others, two models."""
    root = tmp_path_factory.mktemp("world")
    write_corpus(root / "corpus")
    for seed in (0, 1):
        network_of(seed).save_pretrained(root / f"model{seed}")
        TOKENIZER.save_pretrained(root / f"model{seed}")
    draw = torch.Generator().manual_seed(0)
    held_out = (i for i in range(10**6) if is_held_out(f"answers to {i}"))
    others = (i for i in range(10**6) if not is_held_out(f"answers to {i}"))
    table = []
    for i in [*islice(held_out, 20), *islice(others, 20)]:
        size = int(torch.randint(1, N * n + 1, (), generator=draw))
        ids = torch.randint(1, 280, (5 + size,), generator=draw).tolist()
        table.append({"id": str(i), "prompt_ids": ids[:5], "answer_ids": ids[5:]})
    shard = shard_path(root / "answers", 0)
    shard.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(table), shard)
    manifest = {"tokenizer": fingerprint(TOKENIZER), "recipe": "pcllm_trajectories"}
    (root / "answers" / "manifest.json").write_text(json.dumps(manifest))
    return root


def arguments(world, *others):
    return [
        f"model={world / 'model0'}", f"also={world / 'model1'}", f"source={world / 'corpus'}",
        "length=48", f"answers={world / 'answers'}", f"runs={world / 'runs'}", "rows=16",
        f"out={world / 'out'}", *others,
    ]  # fmt: skip


def table(world):
    return list(csv.DictReader((world / "out" / "heldout_loss.csv").open()))


def validated(module, batch, name):
    """A metric as `BaseModule` takes it at a validation."""
    with torch.inference_mode():
        total, count = module.evaluate(batch)[name]
    return (total / count).item()


def stacked(samples):
    return {k: torch.stack([s[k] for s in samples]) for k in samples[0]}


@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_the_loss_that_training_validates_with(world, seed):
    run(arguments(world))
    line = table(world)[seed]
    made = (network_of(seed), TOKENIZER, Optimization(lr=1e-3))
    corpus = documents(str(world / "corpus"), 48, TOKENIZER, str(world / "again"), split="heldout")
    stream = Stream(corpus, 0)
    batch = stacked([stream[i] for i in range(min(16, len(corpus)))])
    expected = validated(Autoregressive(*made), batch, "loss")
    assert float(line["corpus"]) == pytest.approx(expected, abs=6e-5)

    stream, samples = Stream([a[:2] for a in read_answers(world / "answers", "heldout")], 0), []
    for i in range(16):
        ids = stream[i][0]
        clean = torch.tensor(ids[5:] + [0] * (N * n + 5 - len(ids))).view(N, n)
        samples.append(
            interleave(Answer(torch.tensor(ids[:5]), 5, clean, len(ids) - 5, []), clean, 0)
        )
    module = ProgressiveConsistency(*made, mask="nc", window=2, w=1.0, sampling={"method": "plain"})
    assert float(line["answers"]) == pytest.approx(
        validated(module, stacked(samples), "ar"), abs=6e-5
    )


def test_the_others_are_compared_with_the_first(world, capsys):
    run(arguments(world))
    first, second = table(world)
    assert "float32" in capsys.readouterr().out
    for what in ("corpus", "answers"):
        assert float(first[f"{what}, % above first"]) == 0
        ratio = float(second[what]) / float(first[what])
        assert float(second[f"{what}, % above first"]) == pytest.approx(100 * (ratio - 1), abs=0.02)
        assert ratio != 1
    assert "decoding.bench.heldout_loss" in (world / "out" / "command.txt").read_text()


def test_by_hand_whatever_the_batches():
    # Uniform over 8 tokens; a text's first token and those that are not trained do not count.
    uniform = tiny.causal_lm(8, scale=0.0)
    texts = [([1, 2, 3], [False, False, True]), ([4, 5], [True, True])]
    assert mean_loss(uniform, texts, 1) == pytest.approx(torch.tensor(8.0).log().item(), rel=1e-6)
    model = tiny.causal_lm(8)
    logits = [model(torch.tensor([ids])).logits.log_softmax(-1)[0] for ids, _ in texts]
    expected = -(logits[0][1, 3] + logits[1][0, 5]).item() / 2
    assert mean_loss(model, texts, 1) == pytest.approx(expected, rel=1e-9)
    assert mean_loss(model, texts, 2) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match="token=8 is not allowed: the network's tokens are 0 to 7"):
        mean_loss(model, [*texts, ([8, 1], [True, True])], 1)
    every = [(ids, [True] * len(ids)) for ids, _ in texts]
    assert mean_loss(model, every, 2) != pytest.approx(expected, rel=1e-3)


def test_mistakes(world, tmp_path):
    with pytest.raises(ValueError, match="rows=0 is not allowed"):
        run(arguments(world, "rows=0"))
    with pytest.raises(ValueError, match=r"no collection at /no/where: python -m decoding.collect"):
        run(arguments(world, "answers=/no/where"))
    other = tmp_path / "other"
    tiny.causal_lm(300).save_pretrained(other)
    train_tokenizer(["ab"], 300).save_pretrained(other)
    with pytest.raises(ValueError, match="different tokenizers"):
        run(arguments(world, f"also={other}"))
    config = json.loads((other / "config.json").read_text())
    config["parade"] = {"method": "deer", "target": "org/name"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is a drafter, which changes no text: give its target"):
        run(arguments(world, f"also={other}"))
