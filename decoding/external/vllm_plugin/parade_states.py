"""vLLM's connector that writes hidden states to disk, also where the engine runs on a CPU.

Its own one (`ExampleHiddenStatesConnector`, 0.32) copies on a stream of CUDA. A file appears whole,
shortly after its request has been answered. The engine's processes import this module by its name
(`decoding.external.vllm_states.VllmStates`), with vLLM's interpreter.
"""

import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as theirs


class _Copied:
    """The event of a copy that is over."""

    def query(self) -> bool:
        return True


class SynchronousStates(theirs.ExampleHiddenStatesConnector):
    """A connector that writes a request's states as soon as it has finished."""

    def _submit_async_write(self, pending: theirs.PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        size = self._block_size
        slots = torch.tensor(pending.block_ids)[:, None] * size + torch.arange(size)
        slots, count = slots.flatten().to(self._kv_cache.device), len(pending.token_ids)
        states = theirs.extract_from_kv_cache(self._kv_cache, slots, count)
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        hidden = pending.filename + ".part"
        save_file({"hidden_states": states.cpu().contiguous()}, hidden)
        os.replace(hidden, pending.filename)
        self._req_copy_events[pending.req_id] = _Copied()
