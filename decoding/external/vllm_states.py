"""Hidden states of texts from a vLLM engine."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from decoding.external.vllm_engine import Vllm

PATIENCE = 60  # seconds that a file of states may come after its request's answer


class VllmStates(Vllm):
    """A vLLM engine that gives the hidden states of texts, by its method `extract_hidden_states`.

    Args:
        model: As of `Vllm`.
        layers: Decoder layers, 0-based, whose outputs are given (`models.hidden_states`); -1: the
            embeddings.
        **options: As of `Vllm`.
    """

    def __init__(self, model: str, layers: Sequence[int], **options):
        self._states = tempfile.TemporaryDirectory(prefix="states_")
        # Its ids are of the layers that read them: the output of layer i has i + 1.
        ids = {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in layers]}
        method = "extract_hidden_states"
        options["speculative_config"] = {
            "method": method,
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": ids},
        }
        options["kv_transfer_config"] = {
            "kv_connector": "SynchronousStates",
            "kv_connector_module_path": "parade_states",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": self._states.name,
                "use_synchronization_lock": False,
            },
        }
        try:
            super().__init__(model, enable_prefix_caching=False, **options)
        except BaseException:
            self._states.cleanup()
            raise

    def states(self, texts: Sequence[list[int]]) -> list[Tensor]:
        """Return the states [n, L, H] of each text of n token ids, in the engine's type."""
        jobs = [{"max_tokens": 1, "temperature": 0, "stop_token_ids": [], "logprobs": None}] * len(
            texts
        )
        found = []
        for answer in self._ask({"prompts": [*texts], "params": jobs})["answers"]:
            if "states" not in answer:
                raise ValueError(answer.get("refused", "vLLM gives no hidden states"))
            path, until = Path(answer["states"]), time.monotonic() + PATIENCE
            while not path.exists():
                if time.monotonic() > until or self._process.poll() is not None:
                    raise ValueError(f"vLLM wrote no hidden states to {path}")
                time.sleep(0.01)
            found.append(load_file(path)["hidden_states"])
            path.unlink()
        return found

    def close(self) -> None:
        super().close()
        self._states.cleanup()
