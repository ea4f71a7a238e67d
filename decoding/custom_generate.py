"""Decoding through stock transformers: `target.generate(..., custom_generate='org/drafter')`.

`trainers.publishing.bundle` copies this module, and what it imports, into every drafter's export.
"""

import inspect
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoTokenizer,
    EosTokenCriteria,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding.engine.params import SamplingParams
from decoding.engine.vocabulary import check_vocabulary
from decoding.method import Method
from models import causal
from models.placement import input_device

# The processors that `decoding.engine.warp.warp` applies, in transformers' own order, each with
# the parameter that it applies and the attribute that holds its value.
PROCESSORS = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
# Arguments of `generate` that change the output, or what else it does, in ways not kept here.
REFUSED = (
    "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus",
    "assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask", "past_key_values",
    "cache", "position_ids", "inputs_embeds", "stop_strings",
)  # fmt: skip
# Arguments that transformers itself adds to a model's inputs.
PREPARED = {
    "attention_mask", "position_ids", "cache_position", "past_key_values", "cache", "use_cache",
    "logits_to_keep", "output_attentions", "output_hidden_states",
}  # fmt: skip
HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")

# The last drafter used with each target; it is freed with the target.
_LOADED: WeakKeyDictionary[PreTrainedModel, tuple] = WeakKeyDictionary()


def generate(
    method: Method,
    model: PreTrainedModel,
    *,
    drafter: str | None = None,
    seed: int | None = None,
    verify: str = "coupled",
    block_size: int | None = None,
    streamer=None,
    **arguments,
) -> Tensor:
    """Return the tokens that `model.generate(**arguments)` returns, decoded with a drafter.

    transformers prepares everything as it always does (defaults, padding, end tokens, processors)
    and leaves only the decoding loop to the sampler.

    Args:
        method: The `METHOD` of the sampler's module.
        model: The target.
        drafter: The drafter's folder or Hub id; None takes the one that `custom_generate` names.
        seed: Each row's own is derived from it as in `SamplingParams`; None draws one from torch's
            generator, so `torch.manual_seed` repeats a call.
        verify: The verification rule, as in `SamplingParams`.
        block_size: Tokens drafted per cycle; None takes the drafter's own.
        streamer: Receives the tokens of a single row as they are accepted.
        arguments: Of transformers' `generate`.

    Returns:
        Prompts and answers [B, L], the shorter rows padded at the end.

    Raises:
        ValueError: An argument would change the output in a way that the sampler cannot keep
            exactly, or model and drafter do not fit each other.
    """
    name = drafter or _named_by(inspect.currentframe())
    hub = {key: arguments.pop(key) for key in HUB if key in arguments}
    _check_target(model)
    for key in REFUSED:
        value = arguments.get(key)
        # An empty list of processors, and synced_gpus=False, ask for nothing.
        if not (value is None or value is False or (isinstance(value, list) and not value)):
            raise _unsupported(key)

    usual = _is_usual(arguments, model.generation_config)

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs,
    ) -> Tensor:
        """Run the sampler in place of transformers' decoding loop."""
        if streamer is not None and len(input_ids) > 1:
            raise _unsupported("a streamer with more than one row")
        values = _values(generation_config, logits_processor, model_kwargs)
        max_length, eos = _ends(stopping_criteria)
        if (own := seed) is None:  # greedy decoding leaves torch's generator alone
            own = int(torch.randint(1 << 48, ())) if generation_config.do_sample else 0
        values |= {"seed": own, "verify": verify, "block_size": block_size}
        most = max_length - input_ids.shape[1]
        params = SamplingParams(max_new_tokens=None if usual else most, **values)
        network, tokenizer, entry, parts = _load(method, name, model, hub)
        training = model.training
        sampler = method.build(model, tokenizer, network, entry, **parts)
        sampler.eos = frozenset(eos)
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        prompts = [row[seen.bool()].tolist() for row, seen in zip(input_ids, mask)]
        each: SamplingParams | list[SamplingParams] = params
        if usual:  # the length that transformers assumes, or what room there is
            rows = [sampler.encode(prompt, params) for prompt in prompts]
            each = [sampler.with_room(row, params, max(1, most)) for row in rows]
        answers: list[list[int]] = [[] for _ in prompts]
        try:
            # Closed at once on an error: torch's inference mode ends with it.
            with closing(sampler.stream(prompts, each, text=streamer is not None)) as chunks:
                for chunk in chunks:
                    answers[chunk.request] += chunk.token_ids
                    for token in chunk.token_ids if streamer is not None else ():
                        streamer.put(torch.tensor([token]))
        finally:
            model.train(training)  # a sampler puts its target into evaluation mode
        if streamer is not None:
            streamer.end()
        if (pad := generation_config.pad_token_id) is None:
            pad = eos[0] if eos else 0  # without an end token every row is full
        rows = [torch.tensor(answer, dtype=torch.long) for answer in answers]
        padded = pad_sequence(rows, batch_first=True, padding_value=pad)
        return torch.cat([input_ids, padded.to(input_ids.device)], 1)

    # The class's own method: an instance may have one that its repository replaced.
    return type(model).generate(model, **arguments, streamer=streamer, custom_generate=decode)


def _is_usual(arguments: dict[str, Any], default: GenerationConfig) -> bool:
    """Return whether nobody has said how long an answer is, so that transformers takes its 20."""
    config = arguments.get("generation_config") or default
    keys = "max_new_tokens", "max_length"
    given = any(arguments.get(key) is not None for key in keys)
    return not given and config.max_new_tokens is None and config.max_length in (None, 20)


def _unsupported(what: str) -> ValueError:
    return ValueError(
        f"{what} is not supported with a drafter: the output would not be that of plain decoding. "
        "Leave it out, or call generate without custom_generate"
    )


def _named_by(frame: FrameType | None) -> str:
    """Return the `custom_generate` of the `generate` call that led here.

    transformers passes on every other argument, and runs a copy of this code that does not know its
    folder: only the caller's frame still has the name.
    """
    while frame is not None:
        name = frame.f_locals.get("custom_generate")
        if isinstance(name, str):
            return name
        frame = frame.f_back
    raise ValueError("which drafter? Name its folder or Hub id: generate(..., drafter='org/name')")


def _check_target(model: PreTrainedModel) -> None:
    """Raise ValueError if the target is a drafter, or its attention takes no draft block's mask."""
    target = (getattr(model.config, "parade", None) or {}).get("target")
    if target is not None:
        raise ValueError(
            f"this model is a drafter: load its target {target!r} and call the target's generate "
            "with custom_generate= the drafter"
        )
    attention = model.config._attn_implementation
    if attention != "sdpa" and model._supports_sdpa:
        raise ValueError(
            f"attention implementation {attention!r} cannot take the mask of a draft block: load "
            "the target with attn_implementation='sdpa'"
        )
    if model.config.is_encoder_decoder:
        raise _unsupported(f"{type(model).__name__} as a target")


def _values(
    config: GenerationConfig, processors: LogitsProcessorList, model_kwargs: dict
) -> dict[str, Any]:
    """Return the sampling parameters that transformers prepared; refuse anything else in them."""
    mode = config.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        raise _unsupported(mode.replace("_", " "))
    if config.return_dict_in_generate:
        raise _unsupported("return_dict_in_generate")
    for key, value in model_kwargs.items():
        if key not in PREPARED and value is not None:
            raise _unsupported(key)
    values = {"temperature": 1.0 if config.do_sample else 0.0}
    for processor in processors:
        if type(processor) is LogitNormalization:
            continue  # changes no distribution
        if type(processor) not in PROCESSORS:
            raise _unsupported(type(processor).__name__)
        name, attribute = PROCESSORS[type(processor)]
        values[name] = getattr(processor, attribute)
    return values


def _ends(criteria: StoppingCriteriaList) -> tuple[int, list[int]]:
    """Return the longest length of a row, and the end-of-sequence tokens."""
    length, eos = 0, []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            length = criterion.max_length
        elif type(criterion) is EosTokenCriteria:
            eos = criterion.eos_token_id.tolist()
        else:
            raise _unsupported(type(criterion).__name__)
    return length, eos


def _load(
    method: Method, name: str, model: PreTrainedModel, hub: dict
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict, dict]:
    """Load the drafter, its tokenizer, its entry and its other parts, once per target.

    It is loaded again if the folder has changed.
    """
    config = Path(name) / "config.json"
    written = config.stat().st_mtime_ns if config.is_file() else None
    key = (name, written, repr(hub), input_device(model), model.dtype)
    if _LOADED.get(model, (None,))[0] != key:
        load = method.load_drafter or causal.load
        network = load(name, dtype=model.dtype, **hub).to(input_device(model))
        entry = dict(getattr(network.config, "parade", None) or {})
        if "target" not in entry:
            raise ValueError(f"{name!r} is no drafter: its config.json names no target")
        method.check(entry, f"{name}: parade.")
        parts = method.read_files(causal.files_of(name, **hub), entry)
        ours = getattr(network.config.get_text_config(), "vocab_size", None)
        theirs = model.config.get_text_config().vocab_size
        check_vocabulary(
            ours, theirs, parts.get("draft_ids"), f" ({name!r} drafts for {entry['target']!r})"
        )
        tokenizer = AutoTokenizer.from_pretrained(name, **hub)
        _LOADED[model] = key, network, tokenizer, entry, parts
    return _LOADED[model][1:]
