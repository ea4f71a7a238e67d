"""What parade uses of vLLM's interface, over stock transformers: greedy, no cache, no batch.

It drafts as vLLM does (the first token without a draft; then the last token and K - 1 masks), by
full forwards of its own, so it is a reference for our sampler too, and it writes hidden states. The
environment variable STUB_VLLM names a mistake to make: 'mask' (an id off by one), 'shift' (outputs
by one position), 'layers' (states of the layers before), 'crash' (ends in the midst of a job),
'refuse' (does not start).
"""

import os
import sys
from types import SimpleNamespace as Record

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

__version__ = "stub"
MISTAKE = os.environ.get("STUB_VLLM", "")


def SamplingParams(**params):
    assert not params["detokenize"]
    assert params["temperature"] == 0
    return Record(**params)


class LLM:
    def __init__(self, model, speculative_config=None, kv_transfer_config=None, **_):
        if MISTAKE == "refuse":
            print("ERROR [core.py:1] ValueError: there is no memory", file=sys.stderr)
            raise RuntimeError("Initialization failed. See root cause above.\nAnd more.")
        self.target = AutoModelForCausalLM.from_pretrained(model)
        self.layers, self.written = None, 0
        if kv_transfer_config is not None:
            drafter = speculative_config.pop("draft_model_config")
            self.layers = drafter["hf_config"]["eagle_aux_hidden_state_layer_ids"]
            assert speculative_config.pop("method") == "extract_hidden_states"
            more = kv_transfer_config["kv_connector_extra_config"]
            self.folder, speculative_config = more["shared_storage_path"], None
        self.speculative = speculative_config
        self.counts = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
        if speculative_config is not None:
            self.K = speculative_config.get("num_speculative_tokens", 24)  # suffix has its own
            self.counts["accepted_tokens_per_pos"] = [0] * self.K
            if speculative_config["method"] == "draft_model":
                if "dflash" in speculative_config["model"]:  # as vLLM 0.32 guesses
                    raise ValueError("1 validation error for SpeculativeConfig\n  it is no DFlash")
                self.drafter = AutoModelForCausalLM.from_pretrained(speculative_config["model"])

    def get_metrics(self):
        name = "vllm:spec_decode_num_{}".format
        return [Record(name="vllm:other", value=1)] + [
            Record(name=name(key), values=value) if isinstance(value, list) else
            Record(name=name(key), value=value) for key, value in self.counts.items()
        ]  # fmt: skip

    def generate(self, prompts, params, use_tqdm):
        if MISTAKE == "crash":
            print("the engine ran out of memory", file=sys.stderr, flush=True)
            os._exit(3)
        return [self._one(p["prompt_token_ids"], q) for p, q in zip(prompts, params)]

    @torch.inference_mode()
    def _one(self, prompt, params):
        answer, top = [], []
        while len(answer) < params.max_tokens and not ({*answer} & {*params.stop_token_ids}):
            draft = self._draft(prompt + answer) if answer and self.speculative else []
            logits = self.target(torch.tensor([prompt + answer + draft])).logits[0]
            logits = logits[len(prompt) + len(answer) - 1 :].log_softmax(-1)
            following = logits.argmax(-1).tolist()
            accepted = next((i for i, t in enumerate(draft) if t != following[i]), len(draft))
            if draft:
                self.counts["drafts"] += 1
                self.counts["draft_tokens"] += len(draft)
                self.counts["accepted_tokens"] += accepted
                for i in range(accepted):
                    self.counts["accepted_tokens_per_pos"][i] += 1
            answer += following[: accepted + 1]
            top += logits[: accepted + 1]
        answer = answer[: params.max_tokens]
        ends = [i for i, t in enumerate(answer) if t in params.stop_token_ids]
        answer = answer[: ends[0] + 1] if ends else answer
        steps = [
            dict(zip(found.indices.tolist(), (Record(logprob=x) for x in found.values.tolist())))
            for found in (x.topk(params.logprobs) for x in top[: len(answer)])
        ] if params.logprobs else None  # fmt: skip
        completion = Record(
            token_ids=answer, finish_reason="stop" if ends else "length", logprobs=steps
        )
        written = {"hidden_states_path": self._write(prompt)} if self.layers else None
        return Record(outputs=[completion], kv_transfer_params=written)

    def _write(self, prompt):
        states = self.target(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        wrong = MISTAKE == "layers"
        found = torch.stack([states[max(i - wrong, 0)][0] for i in self.layers], 1)
        self.written += 1
        path = os.path.join(self.folder, f"{self.written}.safetensors")
        save_file({"hidden_states": found.contiguous()}, path)
        return path

    def _draft(self, ids):
        if self.speculative["method"] == "ngram":
            return ids[-self.K :]
        if self.speculative["method"] == "suffix":  # it finds nothing every second time
            return ids[-self.K :] if len(ids) % 2 else []
        mask = self.drafter.config.pard_token + (MISTAKE == "mask")
        read = torch.tensor([ids + [mask] * (self.K - 1)])
        logits = self.drafter(read).logits[0, -self.K :]
        logits[:, self.drafter.config.pard_token] = -torch.inf  # as ours never drafts the mask
        return logits.roll(1 if MISTAKE == "shift" else 0, 0).argmax(-1).tolist()
