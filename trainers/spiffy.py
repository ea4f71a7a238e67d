"""Spiffy's calibration: the search for the best draft graph in traces of vanilla decoding.

No weight is trained. A step decodes a batch of prompts, or reads their traces where an earlier run
has written them; the graph is computed from all traces when it is first asked for, at a validation
or at the export.
"""

import json
from collections.abc import Collection
from pathlib import Path

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from data.corpora.fingerprints import input_fingerprint
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
from decoding.loading import sampling_config
from decoding.masked.draft_graph import DraftGraph, Formula, graph_of, reach_of, show
from decoding.samplers import denoise, spiffy
from models import public
from models.blockwise import is_foreign
from trainers.base import BaseModule
from trainers.runs.provenance import commit

say = rank_zero_only(print)
# Of a public model.
COMMAND = (
    "python -m decoding.generate model=<this folder or repository> {trust}prompt='def fib(n):'"
)
FORMAT = 2  # of a trace: to be raised when the same key would give another one


class Calibration(BaseModule):
    """The module that finds the draft graph of a masked diffusion LM (Spiffy, Algorithm 2).

    Args:
        model: The LM's folder or Hub id: an export, or a public model.
        sampling: Knobs of `denoise` that replace the export's; a graph belongs to an unmasking
            rate or a threshold.
        nodes: D, the nodes of a graph at most.
        objective: One of OBJECTIVES (`decoding.calibration.draft_graphs`).
        lookahead: Levels of a graph at most.
        top: Candidates a level (3 in the paper).
        width: Tokens that are ranked at a position.
        max_new_tokens: Tokens of each calibrating decode at most.
        temperature: Of the calibrating decodes.
        seed: Of the calibrating decodes.
        traces: The folder of the traces, shared by all calibrations that differ only in the graph
            that they look for.

    Raises:
        ValueError: A value outside of its range, or a model that is no masked diffusion LM.
    """

    def __init__(
        self,
        *args,
        model: str,
        sampling: dict,
        nodes: int,
        objective: str,
        lookahead: int,
        top: int,
        width: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        traces: str,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        for name, given in (("nodes", nodes), ("lookahead", lookahead), ("top", top)):
            if given < 1:
                raise ValueError(f"module.{name}={given} is not allowed: it must be at least 1")
        if objective not in OBJECTIVES:
            raise ValueError(f"unknown objective {objective!r}. Choose from {list(OBJECTIVES)}")
        knobs = (f"{key}={value}" for key, value in sampling.items())
        self.entry = sampling_config(model, ("method=spiffy", *knobs))
        try:
            self.entry |= denoise.options(self.network, self.tokenizer, self.entry)
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
        self.next_block = spiffy.from_export(self.network, self.tokenizer, None, sampled).next_block
        if is_foreign(self.network) or public.layout_of(model):
            self.exports_weights = False  # it is there for everyone: the export refers to it
        self.nodes, self.objective, self.lookahead, self.top = nodes, objective, lookahead, top
        self.width, self.traces, self._graph = width, [], None
        self.model, self.folder, self.seed = model, traces, seed
        self.digest = input_fingerprint(model) if Path(model).exists() else commit(model) or model
        self.params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
        self.network.requires_grad_(False)
        self.idle = nn.Parameter(torch.zeros(()))  # steps are counted by an optimizer's

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        """The weight of each prompt, [B]: 1."""
        return torch.ones_like(batch["size"], dtype=torch.float32)

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The vanilla passes of each prompt, [B], and their weights; no gradient.

        The prompts' traces are kept, on every process those of all processes.
        """
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
        """The traces of a batch of prompts; those on disk are read.

        Args:
            batch: `input_ids` [B, S] and `size` [B], the length of each prompt.

        Returns:
            A trace for each prompt, in the layout of `decoding.calibration.draft_graphs.Tracer`.
        """
        prompts = [ids[:n].tolist() for ids, n in zip(batch["input_ids"], batch["size"].tolist())]
        options = denoise.options(self.network, self.tokenizer, self.entry)
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
        """Everything that the trace of a prompt depends on, under which it is stored."""
        return {
            "format": FORMAT,
            "model": self.digest,
            "dtype": str(self.network.dtype),
            "precision": self.trainer.precision,
            "options": options,
            "width": self.width,
            "eos": sorted(tracer.eos),
            "max_new_tokens": self.params.max_new_tokens,
            "temperature": self.params.temperature,
            "seed": self.seed,
            "prompt": prompt,
        }

    def evaluate(self, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """The passes that the graph saves on held-out prompts.

        Args:
            batch: Prompts.

        Returns:
            {name: (sum, total)} with `loss`, passes with the graph for each vanilla pass, and
            `nfe_speedup`, its inverse.
        """
        blocks = self.blocks([self.trace(batch)])
        found = self.passes(self.graph().nodes, blocks), passes([], blocks)
        drafted, vanilla = (torch.tensor(float(n), device=self.device) for n in found)
        return {"loss": (drafted, vanilla), "nfe_speedup": (vanilla, drafted)}

    def passes(self, nodes: Collection[Formula], blocks: list[TracedBlock]) -> int:
        """The passes of decoding with a graph of these nodes."""
        return passes(nodes, blocks, reach_of(nodes, self.rate) if self.next_block else 0)

    def blocks(self, traces: list[Tensor]) -> list[TracedBlock]:
        """Every block that was decoded, answer by answer."""
        answers = (answer for batch in traces for answer in batch)
        return [block for answer in answers for block in blocks_of(answer, self.lookahead)]

    def graph(self) -> DraftGraph:
        """The best graph for all traces so far; prints its value and whether it is optimal."""
        if self._graph is None:
            nodes = self.best(self.blocks(self.traces))
            self._graph = graph_of(self.entry["block_size"], self.rate, nodes)
        return self._graph

    def best(self, blocks: list[TracedBlock]) -> list[Formula]:
        """The nodes of the graph that the objective prefers, `nodes` of them at most.

        Args:
            blocks: Every decoded block, answer by answer.
        """
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
        """The file of the graph alone, to be used with other exports."""
        return {"parade_graph.json": json.dumps(self.graph().to_dict(), indent=1)}

    def state_dict(self, *arguments, **options) -> dict:
        """The traces so far, all that a run changes; the network's weights are not in it."""
        return {"traces": self.traces}

    def load_state_dict(self, state_dict: dict, *arguments, **options) -> None:
        self.traces, self._graph = state_dict["traces"], None
