"""Spiffy's calibration: the search for the best draft graph in traces of vanilla decoding.

No weight is trained. A step decodes prompts, or reads the traces of an earlier run. The graph is
computed from all traces when first needed, at a validation or at the export.
"""

import json
from collections.abc import Collection
from typing import Literal

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from data.arguments import Seed, Small, Temperature, Tokens
from data.corpora.fingerprints import model_fingerprint
from decoding.calibration.draft_graphs import (
    OBJECTIVES,
    TracedBlock,
    Tracer,
    blocks_of,
    candidates_of,
    fewest_passes,
    optimum,
    passes,
)
from decoding.calibration.traces import read_trace, write_trace
from decoding.engine.params import SamplingParams
from decoding.engine.randomness import derived_seed
from decoding.loading import sampler_of, sampling_config
from decoding.masked.draft_graph import DraftGraph, Formula, graph_of, reach_of, show
from decoding.samplers import denoise
from decoding.samplers.spiffy import SpiffySampler
from models import public
from models.blockwise import is_foreign
from terminal.progress import Work
from trainers.base import BaseModule

say = rank_zero_only(print)
# The command that decodes with a public model.
COMMAND = (
    "python -m decoding.generate model=<this folder or repository> {trust}prompt='def fib(n):'"
)
FORMAT = 2  # format of a trace: raise it when the same key would give another one


class Calibration(BaseModule):
    """The module that finds the draft graph of a masked diffusion LM (Spiffy, Algorithm 2).

    Args:
        model: The LM's folder or Hub id: an export, or a public model.
        sampling: Knobs of `denoise` that replace the export's; a graph belongs to an unmasking
            rate or a threshold.
        nodes: D, the maximum number of nodes of a graph.
        objective: One of OBJECTIVES (`decoding.calibration.draft_graphs`).
        lookahead: Maximum number of levels of a graph.
        top: Candidates per level (3 in the paper).
        width: Tokens ranked per position.
        max_new_tokens, temperature, seed: Settings of each calibrating decode.
        traces: The folder of the traces, shared by calibrations that differ only in their graph.
    """

    def __init__(
        self,
        *args,
        model: str,
        sampling: dict,
        nodes: Small,
        objective: Literal[*OBJECTIVES],
        lookahead: Small,
        top: Small,
        width: Small,
        max_new_tokens: Tokens,
        temperature: Temperature,
        seed: Seed,
        traces: str,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        knobs = (f"{key}={value}" for key, value in sampling.items())
        self.entry = sampling_config(model, ("method=spiffy", *knobs))
        try:
            self.entry |= denoise.METHOD.arguments(self.network, self.tokenizer, self.entry)
        except ValueError as error:
            raise ValueError(
                f"{model!r} is no masked diffusion LM with a known attention: python -m "
                "trainers.fit recipe=dllm_block makes one; of another one say what its "
                "configuration does not tell, +module.sampling.attention=bidirectional "
                "+module.sampling.mask_id=..."
            ) from error
        threshold = self.entry.get("threshold") is not None
        self.rate = None if threshold else self.entry.get("tokens_per_step", 1)
        # As the export's sampler has it.
        sampled = {**self.entry, "graph": "chain:1"}
        sampler = sampler_of(sampled, self.network, self.tokenizer)
        assert isinstance(sampler, SpiffySampler)
        self.next_block = sampler.next_block
        if is_foreign(self.network) or public.layout_of(model):
            self.exports_weights = False  # it is there for everyone: the export refers to it
        self.nodes, self.objective, self.lookahead, self.top = nodes, objective, lookahead, top
        self.width, self.traces = width, list[Tensor]()
        self._graph: DraftGraph | None = None
        self.model, self.folder, self.seed = model, traces, seed
        self.digest = model_fingerprint(model)
        self.params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
        self.network.requires_grad_(False)
        self.idle = nn.Parameter(torch.zeros(()))  # steps are counted by an optimizer's

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.ones_like(batch["size"], dtype=torch.float32)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Store the prompts' traces of all processes; return each prompt's vanilla passes."""
        traces = self.trace(batch)
        every = traces
        if self.trainer.world_size > 1:  # gloo knows no 16 bits
            every = self.all_gather(traces.int()).flatten(0, 1).to(traces.dtype)
        self.traces.append(every.cpu())
        self._graph = None
        steps = (traces[:, :, 0].amax(-1) + 1).clamp_min(0).sum(1).to(torch.float32)
        return steps + 0 * self.idle, self.weight(batch)

    @torch.no_grad()
    def trace(self, batch: dict[str, Tensor]) -> Tensor:
        """Decode prompts (`input_ids` [B, S], `size` [B]), or read traces (`Tracer`'s layout)."""
        prompts = [ids[:n].tolist() for ids, n in zip(batch["input_ids"], batch["size"].tolist())]
        options = denoise.METHOD.arguments(self.network, self.tokenizer, self.entry)
        tracer = Tracer(self.network, self.tokenizer, width=self.width, **options)
        keys = [self.key(tracer, options, prompt) for prompt in prompts]
        found = [read_trace(self.folder, key) for key in keys]
        missing = [n for n, trace in enumerate(found) if trace is None]
        if missing:
            seeds = [derived_seed(self.seed, *prompts[n]) for n in missing]
            made = tracer.trace([prompts[n] for n in missing], self.params, seeds)
            for n, trace in zip(missing, made):
                write_trace(self.folder, keys[n], trace)
                found[n] = trace
        return torch.stack(found).to(self.device)

    def key(self, tracer: Tracer, options: dict, prompt: list[int]) -> dict:
        """Return everything that a prompt's trace depends on, the key of the stored trace."""
        return {
            "format": FORMAT,
            "model": self.digest,
            "dtype": str(self.network.dtype),
            "precision": self.trainer.precision,
            "options": options,
            "width": self.width,
            "eos": sorted(tracer.eos),
            "max_new_tokens": self.params.most,
            "temperature": self.params.temperature,
            "seed": self.seed,
            "prompt": prompt,
        }

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `loss`, passes with the graph per vanilla pass, and its inverse."""
        blocks = self.blocks([self.trace(batch)])
        found = self.passes(self.graph().nodes, blocks), passes([], blocks)
        drafted, vanilla = (torch.tensor(float(n), device=self.device) for n in found)
        return {"loss": (drafted, vanilla), "nfe_speedup": (vanilla, drafted)}

    def passes(self, nodes: Collection[Formula], blocks: list[TracedBlock]) -> int:
        """Count the passes of decoding with a graph of these nodes."""
        return passes(nodes, blocks, reach_of(nodes, self.rate) if self.next_block else 0)

    def blocks(self, traces: list[Tensor]) -> list[TracedBlock]:
        """Return every block that was decoded, answer by answer."""
        answers = (answer for batch in traces for answer in batch)
        return [block for answer in answers for block in blocks_of(answer, self.lookahead)]

    def graph(self) -> DraftGraph:
        """Return the best graph for all traces so far; print its value and proof."""
        if self._graph is None:
            with Work("search for the best draft graph"):
                nodes = self.best(self.blocks(self.traces))
            self._graph = graph_of(self.entry["block_size"], self.rate, nodes)
        return self._graph

    def best(self, blocks: list[TracedBlock]) -> list[Formula]:
        """Return the nodes of the graph that is best by the objective for decoded blocks."""
        candidates = candidates_of(blocks, self.rate, self.top)
        wanted = optimum(self.objective, self.nodes, candidates)
        proof = "proved" if wanted.proved else "not proved"
        say(
            f"{self.objective}: {len(wanted.nodes)} of {len(candidates.counts)} candidates, value "
            f"{wanted.value}, no graph exceeds {wanted.bound:.6g}: {proof} optimal"
        )
        nodes = wanted.nodes
        if self.objective == "replay":
            published = candidates_of(blocks, self.rate, min(3, self.top))
            others = [optimum(o, self.nodes, published).nodes for o in OBJECTIVES]
            found = [nodes, *others]
            nodes = fewest_passes(found, self.nodes, candidates, blocks, self.next_block)
        before, after = passes([], blocks), self.passes(nodes, blocks)
        say(
            f"{after} passes for {before} on the traces (a factor of {before / max(1, after):.3f}) "
            f"with {', '.join(map(show, nodes))}"
        )
        return nodes

    def export_config(self) -> dict:
        entry = {**self.entry, "graph": self.graph().to_dict()}
        if not self.exports_weights:
            trust = "trust_remote_code=true " if is_foreign(self.network) else ""
            entry |= {"target": self.model, "command": COMMAND.format(trust=trust)}
        return entry

    def export_files(self) -> dict[str, str | bytes]:
        """Return the file of the graph alone, to be used with other exports."""
        return {"parade_graph.json": json.dumps(self.graph().to_dict(), indent=1)}

    def state_dict(self, *arguments, **options) -> dict:
        """Return the traces so far; the network's weights do not change."""
        return {"traces": self.traces}

    def load_state_dict(self, state_dict: dict, *arguments, **options) -> None:
        self.traces, self._graph = state_dict["traces"], None
