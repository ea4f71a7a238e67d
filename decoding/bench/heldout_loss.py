"""`python -m decoding.bench.heldout_loss model=runs/ar_target/export also=[...]`.

The loss on the same held-out text, compared with the first model's: the cost of new weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from data.arguments import Count, Tokens
from decoding.report import results, write_table
from models.options import DTYPES
from recipes.command import main
from recipes.options import SourceOptions, check_first, option, parse
from terminal.progress import track


@dataclass(frozen=True, kw_only=True)
class HeldoutLoss(SourceOptions):
    """Mean next-token loss in nats of causal LMs on the same held-out tokens."""

    EXAMPLE: ClassVar[str] = "model=runs/ar_target/export also=[runs/pcllm_round1/export]"

    also: tuple[str, ...] = option((), "further models of its tokenizer, compared with it")
    length: Tokens = option(256, "tokens of a row of the corpus")
    answers: str | None = option(None, "a collection, whose held-out answers count too")
    rows: Count = option(256, "of the corpus, and answers, at most; in the order of a validation")
    batch_size: Count = option(8, "texts in a forward")
    runs: str = option("runs", "where the run of that seed keeps its data")
    dtype: Literal[*DTYPES] = option("float32", "of the weights in memory")
    out: str = option("heldout_loss", "folder of the results")


def read_options(argv: list[str]) -> HeldoutLoss:
    """Return the command's options."""
    return parse(argv, HeldoutLoss, "decoding.bench.heldout_loss")


check_first(__name__, read_options)

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.corpora.answers import read_answers
from data.rows.documents import documents
from data.rows.packing import Encoded
from data.rows.stream import Stream
from data.text.tokenizer import checked_manifest
from decoding.engine.vocabulary import check_known
from decoding.loading import check_one_tokenizer, is_drafter, load, load_tokenizer, parade_config
from models.placement import input_device


def run(argv: list[str]) -> None:
    """Run the command with its arguments `key=value`."""
    h = read_options(argv)
    names = tuple(dict.fromkeys((h.model, *h.also)))
    for name in names:
        if is_drafter(parade_config(name)):
            raise ValueError(f"{name} is a drafter, which changes no text: give its target")
    check_one_tokenizer({name: load_tokenizer(name) for name in names})
    with results(Path(h.out)) as out:
        texts: dict[str, list[Encoded]] = {}
        found, lines = {}, []
        for name in names:
            sampler = load(name, **h.placing)
            if not sampler.continues:
                raise ValueError(f"{name} fills holes and predicts no next token: give causal LMs")
            # After the model is loaded: a wrong one leaves no rows of the corpus behind.
            texts = texts or heldout_texts(h, load_tokenizer(h.model))
            network, size = sampler.target, h.batch_size
            found[name] = {what: mean_loss(network, of, size) for what, of in texts.items()}
        tokens = ", ".join(f"{sum(sum(t) for _, t in of)} of {what}" for what, of in texts.items())
        title = f"next-token loss in nats, {h.dtype}, held-out tokens: {tokens}"
        for name, loss in found.items():
            line = {"model": name} | {what: round(x, 4) for what, x in loss.items()}
            for what, x in loss.items():
                line[f"{what}, % above first"] = round(100 * (x / found[h.model][what] - 1), 2)
            lines.append(line)
        write_table(lines, out / "heldout_loss.csv", title, "decoding.bench.heldout_loss")


def heldout_texts(h: HeldoutLoss, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Encoded]]:
    """Read the `(ids, trained)` of every text to measure on, by its kind: 'corpus', 'answers'."""
    if h.answers is not None:
        checked_manifest(h.answers, tokenizer)  # before rows of the corpus are written
    which: dict = {"split": h.split, "subset": h.subset, "limit": h.limit}
    corpus = documents(h.source, h.length, tokenizer, f"{h.runs}/data", **which)
    stream = Stream(corpus, h.seed)
    chosen = (stream[n] for n in range(min(h.rows, len(corpus))))
    texts = {"corpus": [text for row in chosen for text in split_row(row)]}
    if h.answers is not None:
        answers = [(a.ids, a.trained) for a in read_answers(h.answers, "heldout")]
        stream = Stream(answers, h.seed)
        numbers = range(min(h.rows, len(answers)))
        texts["answers"] = [answers[stream.row_of(n)] for n in numbers]
    for what, of in texts.items():
        if not any(any(trained[1:]) for _, trained in of):
            raise ValueError(
                f"no held-out token to predict in {h.source if what == 'corpus' else h.answers}"
                ": about one text in forty is held out, so give more of them"
            )
    return texts


def split_row(row: dict[str, Tensor]) -> Iterator[Encoded]:
    """Split a packed row into its documents.

    >>> row = dict(input_ids=[5, 6, 7, 0], document=[0, 0, 1, -1], trained=[1, 0, 1, 0])
    >>> list(split_row({k: torch.tensor(v) for k, v in row.items()}))
    [([5, 6], [True, False]), ([7], [True])]
    """
    for number in range(int(row["document"].max()) + 1):
        here = row["document"] == number
        yield row["input_ids"][here].tolist(), row["trained"][here].bool().tolist()


@torch.inference_mode()
def mean_loss(network: PreTrainedModel, texts: list[Encoded], batch_size: int) -> float:
    """The mean of -log p(x_{i+1} | x_{<=i}) in nats over trained tokens but each text's first."""
    known = network.config.get_text_config().vocab_size
    check_known(known, token=max(max(ids) for ids, _ in texts))  # its tokenizer may have more
    total, count, device = 0.0, 0, input_device(network)
    texts = sorted(texts, key=lambda text: len(text[0]))
    for start in track(range(0, len(texts), batch_size), "losses", unit="batches"):
        # Padding comes after the text, so a causal model sees none of it.
        ids, trained = (
            pad_sequence([*map(torch.tensor, column)], batch_first=True).to(device)
            for column in zip(*texts[start : start + batch_size])
        )
        logits = network(input_ids=ids, use_cache=False).logits[:, :-1]
        nll = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        total += float((nll * trained[:, 1:].double()).sum())
        count += int(trained[:, 1:].sum())
    return total / count


if __name__ == "__main__":
    main(run)
