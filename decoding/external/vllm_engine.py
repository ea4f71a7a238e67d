"""vLLM as an engine beside ours: started in its own environment, spoken with in token ids.

vLLM pins its own torch, so it rarely shares an environment with anything: `make vllm` makes one.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

from data.files import read_json
from decoding.engine.params import SamplingParams
from decoding.external.reply import Reply, request_options

FORMATS = {"pard": "draft_model", "dflash": "dflash"}  # of drafters, and vLLM's methods for them
WORKER = Path(__file__).with_name("vllm_worker.py")
OWN_ENVIRONMENT = Path(".venv-vllm/bin/python")  # of `make vllm`
ON_CPU = {  # arguments of `Vllm` where the engine runs on a CPU
    "enforce_eager": True,  # compiling takes minutes
    # vLLM 0.32.0 rewinds the generator of a request whose prompt was read in part, which a
    # generator of the CPU cannot.
    "enable_chunked_prefill": False,
}
KV_CACHE_GB = 2  # of the CPU's memory; vLLM's own default is half of all


class Vllm:
    """A vLLM engine in a process of its own; a context manager that ends it.

    Args:
        model: Folder of the target, which vLLM loads by itself.
        python: The interpreter of vLLM's environment; None: that of `make vllm`, or this one.
        threads: Processor threads of the engine on a CPU; None: as many as vLLM takes.
        **options: Further arguments of `vllm.LLM`, such as speculative_config=, dtype=, seed=.

    Attributes:
        version: vLLM's.

    Raises:
        ValueError: There is no such interpreter, or vLLM does not start; one line says why.
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

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        eos: Sequence[int] = (),
        seeds: Sequence[int] | None = None,
        logprobs: int = 0,
    ) -> Reply:
        """Decode prompts as one batch.

        Args:
            prompts: Token ids.
            params, eos, seeds: See `request_options`.
            logprobs: How many of the most probable tokens come with each token of an answer.

        Returns:
            A `Reply`.

        Raises:
            ValueError: A stop string, or what vLLM refused; one line.
        """
        each = request_options(len(prompts), params, eos, seeds)
        jobs = [options | {"logprobs": logprobs or None} for options in each]
        found = self._ask({"prompts": list(prompts), "params": jobs})
        answers = found["answers"]
        return Reply(
            [a["token_ids"] for a in answers],
            ["eos" if a["finish_reason"] == "stop" else "length" for a in answers],
            found["seconds"],
            found["drafts"],
            [[[tuple(p) for p in step] for step in a["top"]] for a in answers if "top" in a],
        )

    def _ask(self, message: dict) -> dict:
        """Send a message and wait for its reply."""
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ValueError(f"vLLM ended without an answer: {self._last_words()}")
        found = json.loads(line)
        if "error" in found:
            lines = found["error"].strip().splitlines()
            told = " ".join(map(str.strip, lines[: 2 if "validation error" in lines[0] else 1]))
            raise ValueError(f"vLLM refused: {shorten(told, 300)}{self._reason()}")
        return found

    def _last_words(self) -> str:
        lines = [
            line for line in self._log.read_text(errors="replace").splitlines() if line.strip()
        ]
        return lines[-1].strip() if lines else "it printed nothing"

    def _reason(self) -> str:
        """What the engine's own process said before an error that points there."""
        log = self._log.read_text(errors="replace").splitlines()
        told = [line for line in log if "Error: " in line and "See root cause" not in line]
        return f" ({told[0].rpartition('] ')[2].strip()})" if told else ""

    def close(self) -> None:
        """End the engine and all of its processes."""
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.stdin.close()
            self._process.wait(timeout=20)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> "Vllm":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def worker_environment(threads: int | None) -> dict[str, str]:
    """The environment variables of an engine's process.

    Args:
        threads: Of the processor; None: as many as vLLM takes.

    Returns:
        Those of this process, whose own settings of vLLM win. Under torchrun the engine sees the
        GPU of this process alone, and nothing of torchrun's processes, which are not its own.
    """
    ours = {"VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GB), "VLLM_NO_USAGE_STATS": "1"}
    ours["PYTHONSAFEPATH"] = "1"  # nothing beside the worker hides what it imports
    if threads is not None:
        ours["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    found = ours | os.environ
    if int(found.get("WORLD_SIZE", 1)) > 1:
        rank = int(found.get("LOCAL_RANK", 0))
        visible = found.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(rank + 1)))
        found["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank]
    torchrun = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_.*|TORCHELASTIC_.*")
    return {name: value for name, value in found.items() if not torchrun.fullmatch(name)}


def interpreter(python: str | None = None) -> str:
    """The interpreter that has vLLM.

    Args:
        python: A path or name; None: that of `make vllm`, or this one where it has vLLM.

    Raises:
        ValueError: There is none.
    """
    if python is not None:
        if shutil.which(python) is None:
            raise ValueError(f"python={python} is no program: give the interpreter that has vLLM")
        return python
    if OWN_ENVIRONMENT.exists():
        return str(OWN_ENVIRONMENT)
    if find_spec("vllm") is not None:
        return sys.executable
    raise ValueError(
        "engine=vllm needs vLLM: make vllm (an environment of its own in .venv-vllm), or give the "
        "interpreter of one that has it, python=/path/to/bin/python"
    )


def speculative_config(folder: Path, block_size: int | None = None) -> dict:
    """vLLM's `speculative_config` for a drafter, from the drafter's own config.json.

    Args:
        folder: The drafter's export.
        block_size: Tokens drafted a cycle; None: the export's own.

    Raises:
        ValueError: The drafter is in no format, or has no layout, that vLLM runs.
    """
    config = read_json(folder / "config.json")
    count = block_size or (config.get("parade") or {}).get("block_size")
    common = {"model": str(folder.resolve()), "num_speculative_tokens": count}
    if "pard_token" in config:
        return {"method": FORMATS["pard"], "parallel_drafting": True, **common}
    if "dflash_config" in config:  # its blocks begin with the last committed token
        if config["dflash_config"].get("context", "fused") != "fused":
            raise ValueError(
                f"{folder} was trained with network.context=layerwise, which vLLM does not run: it "
                "knows one context for all layers, network.context=fused"
            )
        if config["dflash_config"].get("sample_from_anchor"):
            raise ValueError(
                f"{folder} was trained with layout=dspark, whose last committed token drafts the "
                "first one: vLLM's method dflash would not sample there, and runs drafters with "
                "layout=dflash alone"
            )
        common["num_speculative_tokens"] = count or config["block_size"] - 1
        return {"method": FORMATS["dflash"], **common}
    raise ValueError(
        f"{folder} is in no format that vLLM runs (its config.json has neither pard_token nor "
        "dflash_config). These recipes train drafters that are: python -m trainers.fit "
        "recipe=deer_stage2 layout=pard, and recipe=dflash"
    )
