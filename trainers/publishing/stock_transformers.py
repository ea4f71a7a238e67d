"""Decode prompts with an export as others do: stock transformers and the export's own code.

A script for a process of its own, without parade: JSON on standard input and output. A hook on the
target and a streamer see which tokens came with which pass of the target.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


class PassesAndTokens:
    """A streamer and a hook of the target's forward, which note the pass of each token."""

    def __init__(self):
        self.passes, self.of_tokens = 0, []

    def hook(self, *_) -> None:
        """Count a forward of the target."""
        self.passes += 1

    def put(self, tokens: torch.Tensor) -> None:
        """Note the pass of tokens: the prompt first, then those of the answer."""
        self.of_tokens += [self.passes] * tokens.numel()

    def end(self) -> None:
        """Do nothing at the end."""


def emitted(target, job: dict, prompt: list[int]) -> tuple[list[int], list[int]]:
    """Decode a prompt: (tokens, how many of them came with each pass of the target)."""
    seen = PassesAndTokens()
    handle = target.register_forward_hook(seen.hook)
    try:
        found = target.generate(
            torch.tensor([prompt]),
            custom_generate=job["export"],
            trust_remote_code=True,
            max_new_tokens=job["max_new_tokens"],
            eos_token_id=job["eos"] or None,
            do_sample=False,
            streamer=seen,
        )[0, len(prompt) :]
    finally:
        handle.remove()
    of_tokens = seen.of_tokens[len(prompt) :]  # transformers puts the prompt first
    return found.tolist(), [of_tokens.count(n) for n in sorted({*of_tokens})]


def main() -> None:
    """Decode the prompts of the job."""
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"]) if job["dtype"] != "auto" else "auto"
    target = AutoModelForCausalLM.from_pretrained(
        job["target"], dtype=dtype, trust_remote_code=False
    ).eval()
    rows = [emitted(target, job, prompt) for prompt in job["prompts"]]
    json.dump({"answers": [a for a, _ in rows], "emitted": [e for _, e in rows]}, sys.stdout)


if __name__ == "__main__":
    main()
