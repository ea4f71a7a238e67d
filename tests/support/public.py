"""Tiny random masked diffusion LMs that bring a class of their own, as public ones do."""

import json

import transformers
from safetensors.torch import save_file

from data.text.tokenizer import with_mask_token
from tests.support import tiny
from tests.support.denoising import V, network

CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput


class TinyConfig(PretrainedConfig):
    model_type = "{kind}"

    def __init__(self, inner=None, **kwargs):
        self.inner = inner or dict()
        self.vocab_size = self.inner.get("vocab_size", 1)
        super().__init__(**kwargs)


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.llama = LlamaForCausalLM(LlamaConfig(**config.inner))
        self.post_init()

    def forward(self, input_ids):
        length = input_ids.shape[1]
        everywhere = torch.ones(1, 1, length, length, dtype=torch.bool)
        logits = self.llama(input_ids, attention_mask=everywhere).logits
        if {shifted}:
            logits = torch.cat([logits[:, 1:], logits[:, :1]], 1)
        return MaskedLMOutput(logits=logits)
"""


def public_model(kind, root, monkeypatch):
    """(its folder below root, the network inside). kind: 'llada' or 'Dream', a model type."""
    modules = root / "modules"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    folder = root / f"tiny_{kind.lower()}"
    model = network().float()
    model.save_pretrained(folder)
    with_mask_token(tiny.tokenizer(V)).save_pretrained(folder)
    state = {f"llama.{name}": x for name, x in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    offered = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModel": "modeling_tiny.TinyModel"}
    config = {"model_type": kind, "inner": model.config.to_dict(), "dtype": "float32"}
    if kind == "llada":
        offered["AutoModelForCausalLM"] = offered["AutoModel"]
        config |= {"mask_token_id": V, "max_sequence_length": 64}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": offered}))
    code = CODE.format(kind=kind, shifted=kind == "Dream")
    (folder / "modeling_tiny.py").write_text(code)
    return folder, model.double()
