"""vLLM as another engine, in its own process and environment, called with token ids.

vLLM pins its own torch, so it rarely shares an environment with anything.
`sh examples/smollm2/vllm_environment.sh` makes one for it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Self

from data.files import read_json
from decoding.external.reply import Engine, Reply

# Formats of drafters, and vLLM's methods for them.
FORMATS = {"pard": "draft_model", "dflash": "dflash", "dspark": "dspark", "eagle3": "eagle3"}
WORKER = Path(__file__).with_name("vllm_worker.py")
PLUGIN = WORKER.with_name("vllm_plugin")  # on the path of the engine's processes
OWN_ENVIRONMENT = Path(".venv-vllm/bin/python")  # sh examples/smollm2/vllm_environment.sh makes it
ON_CPU = {  # arguments of `Vllm` where the engine runs on a CPU
    "enforce_eager": True,  # compiling takes minutes
    # vLLM 0.32.0 rewinds the generator of a request whose prompt was read in part, which a
    # generator of the CPU cannot.
    "enable_chunked_prefill": False,
}
KV_CACHE_GB = 2  # of the CPU's memory; vLLM's own default is half of all


class Vllm(Engine):
    """A vLLM engine in its own process; a context manager that ends it.

    Args:
        model: Folder of the target, which vLLM loads by itself.
        python: The interpreter of vLLM's environment; None: .venv-vllm's, or this one.
        threads: CPU threads of the engine; None: vLLM's default.
        **options: Further arguments of `vllm.LLM`, such as speculative_config=, dtype=, seed=.

    Attributes:
        version: VLLM's.
    """

    def __init__(
        self, model: str, python: str | None = None, threads: int | None = None, **options
    ):
        # What the engine prints is long, and told only where it fails.
        self._folder = tempfile.TemporaryDirectory(prefix="vllm_")
        self._log = Path(self._folder.name) / "log"
        self._process = subprocess.Popen(
            [interpreter(python), str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            env=worker_environment(threads),
            start_new_session=True,  # the engine has processes of its own, which end with it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        arguments = {"model": model, "disable_log_stats": False, **options}
        try:
            drafter = options.get("speculative_config") or {}
            if drafter.get("method") == FORMATS["pard"]:
                # vLLM guesses its method from words in its path: 'dflash', 'eagle-', ...
                link = Path(self._folder.name) / "drafter"
                link.symlink_to(Path(drafter["model"]).resolve(), target_is_directory=True)
                arguments["speculative_config"] = {**drafter, "model": str(link)}
            self.version = self._ask(arguments)["vllm"]
        except BaseException:
            self.close()
            raise

    def _decode(self, prompts, each: list[dict], eos: list[int], logprobs: int) -> Reply:
        jobs = [options | {"logprobs": logprobs or None} for options in each]
        found = self._ask({"prompts": list(prompts), "params": jobs})
        answers = found["answers"]
        return Reply(
            [a.get("token_ids") for a in answers],
            ["eos" if a.get("finish_reason") == "stop" else "length" for a in answers],
            found["seconds"],
            found["drafts"],
            [[[tuple(p) for p in step] for step in a.get("top", [])] for a in answers]
            if logprobs
            else [],
            {n: a["refused"] for n, a in enumerate(answers) if "refused" in a},
        )

    def _ask(self, message: dict) -> dict:
        """Send a message and wait for its reply."""
        line = ""
        with suppress(BrokenPipeError):
            self._to.write(json.dumps(message) + "\n")
            self._to.flush()
            line = self._from.readline()
        found = json.loads(line or "{}")
        if line and "error" not in found:
            return found
        log = [x.strip() for x in self._log.read_text(errors="replace").splitlines() if x.strip()]
        if not line:
            told = log[-1] if log else "it printed nothing"
            raise ValueError(f"vLLM ended without an answer: {told}")
        lines = found["error"].strip().splitlines()
        told = " ".join(map(str.strip, lines[: 2 if "validation error" in lines[0] else 1]))
        # The engine's own process names the cause before an error that points there.
        causes = [x for x in log if "Error: " in x and "See root cause" not in x]
        reason = f" ({causes[0].rpartition('] ')[2]})" if causes else ""
        raise ValueError(f"vLLM refused: {shorten(told, 300)}{reason}")

    def close(self) -> None:
        """End the engine and all of its processes."""
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._to.close()
            self._process.wait(timeout=20)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._from.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def worker_environment(threads: int | None) -> dict[str, str]:
    """Return the environment of an engine's process: this one's, with our defaults for vLLM.

    Under torchrun the engine sees only this process's GPU, and none of torchrun's variables.
    """
    ours = {"VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GB), "VLLM_NO_USAGE_STATS": "1"}
    ours["PYTHONSAFEPATH"] = "1"  # no file of the worker's folder hides a module
    known = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*([known] if known else []), str(PLUGIN)])
    if threads is not None:
        ours["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    found = ours | os.environ | {"PYTHONPATH": path}
    if int(found.get("WORLD_SIZE", 1)) > 1:
        rank = int(found.get("LOCAL_RANK", 0))
        visible = found.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(rank + 1)))
        found["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank]
    torchrun = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_.*|TORCHELASTIC_.*")
    return {name: value for name, value in found.items() if not torchrun.fullmatch(name)}


def interpreter(python: str | None = None) -> str:
    """Return the interpreter that has vLLM: `python`, or .venv-vllm's, or this one."""
    if python is not None:
        if shutil.which(python) is None:
            raise ValueError(f"python={python} is no program: give the interpreter that has vLLM")
        return python
    if OWN_ENVIRONMENT.exists():
        return str(OWN_ENVIRONMENT)
    if find_spec("vllm") is not None:
        return sys.executable
    raise ValueError(
        "engine=vllm needs vLLM: sh examples/smollm2/vllm_environment.sh (it makes .venv-vllm), "
        "or give the interpreter of one that has it, python=/path/to/bin/python"
    )


def speculative_config(folder: Path, block_size: int | None = None) -> dict:
    """Return vLLM's `speculative_config` for an exported drafter, from its config.json.

    `block_size` is the tokens drafted per cycle (None: the export's own). Raises ValueError for a
    drafter with a format or layout that vLLM does not run.
    """
    config = read_json(folder / "config.json")
    count = block_size or (config.get("parade") or {}).get("block_size")
    common = {"model": str(folder.resolve()), "num_speculative_tokens": count}
    eagle3 = {"method": FORMATS["eagle3"], **common}
    if config.get("parallel_drafting"):
        return {"parallel_drafting": True, **eagle3}
    if "pard_token" in config:
        return {"method": FORMATS["pard"], "parallel_drafting": True, **common}
    if "dflash_config" in config:  # its blocks begin with the last committed token
        from models.dflash import unserved  # not before torch is needed

        if own := unserved(config["dflash_config"]):
            raise ValueError(
                f"{folder} was trained with {own}, which vLLM does not run: it knows one context "
                "for all layers, network.context=fused, and none in a tail, network.tail=0"
            )
        if config.get("markov_rank"):
            return {"method": FORMATS["dspark"], **common}
        if config["dflash_config"].get("sample_from_anchor"):
            raise ValueError(
                f"{folder} was trained with layout=dspark, whose last committed token drafts the "
                "first one: vLLM runs such drafters with a Markov head (network.markov_rank) alone"
            )
        common["num_speculative_tokens"] = count or config["block_size"] - 1
        return {"method": FORMATS["dflash"], **common}
    if "eagle_aux_hidden_state_layer_ids" in config:
        return eagle3
    raise ValueError(
        f"{folder} is in no format that vLLM runs (its config.json has neither pard_token nor "
        "dflash_config, nor EAGLE-3's layers). These recipes train drafters that are: python -m "
        "trainers.fit recipe=deer_stage2 layout=pard, recipe=dflash and recipe=eagle3"
    )
