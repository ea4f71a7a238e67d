"""The model card of an export: its purpose, its training, and measurements with their method."""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import ModelCardData, metadata_load
from omegaconf import OmegaConf

from data.files import read_json, read_text
from models.options import looks_local
from models.weights import one_line
from recipes.stored import read_config
from trainers.publishing.private import public
from trainers.runs.curve import latest

# Tables that benches add to a card, by their files in the run's folder: title and meaning.
SECTIONS = {
    "bench/bench.csv": (
        "Side by side",
        "Acceptance length is tokens emitted per target pass, the bonus or correction token "
        "included; speed-up is the median over prompts, against plain decoding.",
    ),
    "bench_vllm/engine.csv": (
        "In vLLM and in parade",
        "Each engine against its own plain decoding; `at i` is the share of drafts of which at "
        "least i tokens were accepted.",
    ),
}
LICENCE = ("license", "license_name", "license_link")  # of a card's metadata
ACCEPTANCE = "acceptance_length_t"
CARD = """---
{metadata}
---
# A parade model: {method}

{about}

```
{serve}
```

{facts}

## Measured

The last value of each until the step of the weights; acceptance and `val_`: of a validation.

{measured}
"""


def model_card(config: dict, folder: Path, step: int | None = None) -> str:
    """Write an export's README.md.

    Args:
        config: Its `parade` entry.
        folder: The run's folder.
        step: The step of the weights; None for the run's last.
    """
    settings = OmegaConf.to_container(read_config(folder / "config.yaml"))
    metrics = latest(folder / "metrics.csv", step)
    if step is None:
        step = max((metric.step for metric in metrics.values()), default=0)
    with one_line("the facts of a run", str(folder)):  # its folder may be a stranger's
        bases = [*_paths(settings["network"]), *filter(None, [config.get("target")])]
        origins = {name: _origin(name) for name in bases}
        story = public(read_json(folder / "provenance.json"))
        return _card(public(config), metrics, story, public(settings), step, origins)


class _Origin(NamedTuple):
    """Where a model is from, as its name or its folder says: its Hub id and its licence."""

    name: str | None
    licence: dict[str, str]


def _origin(name: str) -> _Origin:
    """Return the origin of a folder or Hub id; a folder's card or config may tell."""
    if looks_local(name):
        card, config = Path(name, "README.md"), Path(name, "config.json")
        told = (metadata_load(card) if card.is_file() else None) or {}
        licence = public({k: told[k] for k in LICENCE if k in told})
        base = told.get("base_model") or (
            read_json(config).get("_name_or_path") if config.is_file() else None
        )
        base = base[0] if isinstance(base, list) and base else base
        name = base if isinstance(base, str) and base and not looks_local(base) else ""
        if licence or not name:
            return _Origin(name or None, licence)
    link = f"https://huggingface.co/{name}"
    licence = {"license": "other", "license_name": "of-the-base-model", "license_link": link}
    return _Origin(name, licence)


def _card(
    config: dict, metrics: dict, story: dict, settings: dict, step: int, origins: dict[str, _Origin]
) -> str:
    """Write the card of public settings and facts."""
    target = config.get("target")
    named = [origin.name or public(name) for name, origin in origins.items()]
    bases = [origin.name for origin in origins.values() if origin.name]
    # Weights made from others' weights are under the others' terms, whatever parade's own are.
    licence, terms = {"license": "apache-2.0"}, "Apache-2.0; the training data keeps its own terms"
    if origins:
        unknown = [public(name) for name, origin in origins.items() if not origin.licence]
        licence = {"license": "unknown"}
        terms = f"unknown, as that of {' and '.join(unknown)} is"
        if not unknown:
            licence = next(iter(origins.values())).licence
            terms = f"that of {' and '.join(dict.fromkeys(named))} ({licence['license']})"
    lora = settings["lora"] if settings["lora"]["rank"] else None
    kept = lora is not None and not lora["merge"]
    # Drafters of language models decode with transformers alone, nothing of parade installed.
    stock = bool(target) and "tokenizer_fingerprint" in config and not kept
    tags = ["parade", *["speculative-decoding"] * bool(target), *["custom_generate"] * stock]
    metadata = ModelCardData(
        library_name="peft" if kept else "transformers",
        **licence,
        base_model=[*dict.fromkeys(bases)] or None,
        tags=tags,
    )
    about = "A causal LM." if config["method"] == "plain" else "Decoding with it is lossless."
    if target:
        about = f"A drafter for `{target}`: decoding with it is lossless."
    details = [k for k in config if k not in ("method", "target", "example", "graph", "command")]
    started_from = [*_paths(settings["network"])]
    facts = {
        "Base model": ", ".join(f"`{name}`" for name in started_from) or "none, random weights",
        "Target": f"`{target}`" if target else None,
        "Method": ", ".join([config["method"], *(f"{k} {config[k]}" for k in details)]),
        "LoRA": _lora(lora) if lora else None,
        **_training(settings, story, step),
        "Licence": terms,
    }
    return CARD.format(
        metadata=metadata.to_yaml(),
        method=config["method"],
        about=about,
        serve=_serve(config, stock),
        facts="\n".join(f"- {name}: {fact}" for name, fact in facts.items() if fact),
        measured=_measured(metrics, settings["acceptance"]),
    )


def _serve(config: dict, stock: bool) -> str:
    """Return the command that decodes with an export, and the call of stock transformers."""
    prompt = config.get("example", "def fib(n):")
    serve = f"python -m decoding.generate model=<this folder or repository> prompt='{prompt}'"
    serve = config.get("command", serve)
    if stock:
        serve += f"""

# or, in Python:
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained({config["target"]!r})
tokenizer = AutoTokenizer.from_pretrained({config["target"]!r})
inputs = tokenizer({prompt!r}, return_tensors="pt")
output = target.generate(
    **inputs, custom_generate="<this folder or repository>", trust_remote_code=True
)
print(tokenizer.decode(output[0]))"""
    return serve


def _training(settings: dict, story: dict, step: int) -> dict[str, str]:
    """Describe a run's data, inputs, recipe and machine."""
    trainer, train = settings["trainer"], dict(settings["data"]["train"])
    epochs, most = trainer.get("max_epochs"), trainer["max_steps"]
    whole = f" of {most}" if epochs is None else f" of {epochs:g} epochs"
    length = f"{step}{whole if epochs is not None or step < most else ''} steps"
    reader = train.pop("_target_")
    dirty = ", with uncommitted changes" if story["git_dirty"] else ""
    rows = {split: about.get("fingerprint") for split, about in story["data"].items()}
    packed = [f"{digest} ({split})" for split, digest in rows.items() if digest]
    inputs = [f"`{name}` ({digest})" for name, digest in story["inputs"].items()]
    versions = [f"Python {story['python']}", *(f"{k} {v}" for k, v in story["packages"].items())]
    t, hardware = story["trainer"], story["hardware"]
    machine = ", ".join(dict.fromkeys(hardware["gpus"])) or hardware["processor"]
    resumed = [f"at step {s['step']} ({s['time']})" for s in story.get("resumed", [])]
    return {
        "Data": f"{', '.join(f'{k}={v}' for k, v in train.items())} ({reader})",
        "Packed rows": ", ".join(packed),
        "Inputs": ", ".join(inputs),
        "Recipe": f"`{settings['recipe']}` at scale `{settings['scale']}`: {length} "
        f"of {trainer['batch_size']} rows, seed {settings['seed']}; every setting is in "
        "`parade_config.yaml`",
        "Command": f"`{story['command']}` (commit {story['git_commit']}{dirty})",
        "Versions": ", ".join(versions),
        "Machine": f"{t['world_size']} x {machine}, {t['strategy']} in {t['precision']}"
        f"{'; resumed ' if resumed else ''}{', '.join(resumed)}",
    }


def _lora(lora: dict) -> str:
    values = ", ".join(f"{key} {lora[key]:g}" for key in ("rank", "alpha", "dropout"))
    kept = "merged into the weights" if lora["merge"] else "kept: peft adds it to the base model"
    return f"{values}, targets {' '.join(lora['targets'])}; {kept}"


def _measured(metrics: dict, acceptance: dict) -> str:
    names = [k for k in sorted(metrics) if k.startswith(ACCEPTANCE)]
    lengths = [(k.removeprefix(ACCEPTANCE), *metrics[k]) for k in names]
    others = [(k, *metrics[k]) for k in sorted(metrics) if k not in names]
    text = _table(["metric", "value", "at step"], others)
    if lengths:
        length = acceptance["prompt_length"]
        of = "" if length is None else f" of {length} tokens"
        text = f"""{_table(["temperature", "acceptance length", "at step"], lengths)}

Acceptance length is tokens emitted per target pass, the bonus or correction token included:
{acceptance["prompts"]} held-out prompts ({acceptance["source"]}){of}, \
{acceptance["max_new_tokens"]} new tokens each, target in {acceptance["dtype"]}.

{text}"""
    return text


def with_bench(card: str, results: Path, command: str) -> str:
    """Add a bench's table (of SECTIONS) to a model card's end, in place of an older one."""
    head, *rows = csv.reader(read_text(results).splitlines())
    name = results.parent.name
    title, about = SECTIONS[f"{name}/{results.name}"]
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    section = f"""{begin}
## {title}

Measured by `{public(command)}`. {about}

{_table(head, public(rows))}
{end}"""
    old = re.compile(rf"\s*{begin}.*?{end}", re.DOTALL)
    return f"{old.sub('', card).rstrip()}\n\n{section}\n"


def _table(head: Sequence[str], rows: Iterable[Sequence]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _paths(node) -> Iterator[str]:
    """Yield the models that a network's settings load: every value of a key `path`."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "path":
                yield value
            else:
                yield from _paths(value)
