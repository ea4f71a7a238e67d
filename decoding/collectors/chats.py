"""Chats of a collection: their questions, which a model may ask itself, and their later turns."""

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from data.text.chat import encode_prompt
from data.text.prompts import next_prompt
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import derived_seed

TRIES = 4  # until a question ends by itself: 85% of SmolLM2-135M-Instruct's do at the first
LONGEST = 256  # tokens of a question
# Of prompts, parameters and seeds: the token ids that follow, and whether they end by themselves.
Write = Callable[[list[list[int]], SamplingParams, list[int]], list[tuple[list[int], bool]]]


class Turns:
    """Asks questions that prompts lack, and collects answers, those to later questions too.

    Attributes:
        left_out: Why prompts, or their later turns, have no answer, by the prompts' ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.left_out: dict[str, str] = {}

    def ask(self, asked: list[dict], seed: int, most: int, write: Write) -> list[dict]:
        """Return prompts with what the model asks itself in those that only begin a user's turn.

        Where a user's turn begins, a chat model writes what users asked in its training (Magpie,
        arXiv 2406.08464). A question is drawn at temperature 1; it depends on the seed and on the
        prompt's id alone.

        Args:
            asked: Prompts of `data.text.prompts.prompt_set`, some of them `begun`.
            seed: Of the collection.
            most: Longest answer, in tokens. A question is not longer, nor longer than LONGEST.
            write: The model.
        """
        begun = {p["id"]: p["prompt_ids"] for p in asked if p.get("begun")}
        params = SamplingParams(max_new_tokens=min(most, LONGEST), temperature=1.0)
        found: dict[str, list[int]] = {}
        for attempt in range(TRIES):
            left = [id for id in begun if id not in found]
            if not left:
                break
            seeds = [derived_seed(seed, id, "question", attempt) for id in left]
            written = write([begun[id] for id in left], params, seeds)
            for id, (ids, ends) in zip(left, written):
                said = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
                if said and ends:
                    user = {"role": "user", "content": said}
                    found[id] = encode_prompt(self.tokenizer, [user])
        reason = f"the model asks nothing that ends within {params.most} tokens"
        self.left_out |= {id: reason for id in begun if id not in found}
        kept = (p for p in asked if p["id"] not in self.left_out)
        return [{**p, "prompt_ids": found.get(p["id"], p["prompt_ids"])} for p in kept]

    def collect(
        self, asked: list[dict], decode: Callable[[list[dict]], list[dict | str]]
    ) -> list[dict]:
        """Return the rows of prompts, with `turn`, the number of the question in its chat.

        `decode` gives a row for each prompt, or says why there is none.
        """
        rows: list[dict] = []
        while asked:
            later = []
            for prompt, row in zip(asked, decode(asked)):
                if isinstance(row, str):
                    self.left_out.setdefault(prompt["id"], row)
                    continue
                rows.append(row | {"turn": prompt.get("turn", 0)})
                if row["answer_ids"] is None or not prompt.get("later"):
                    continue
                try:
                    later.append(next_prompt(prompt, self.tokenizer, row["answer_ids"]))
                except ValueError as error:  # of the template
                    self.left_out.setdefault(prompt["id"], str(error))
            asked = later
        return rows
