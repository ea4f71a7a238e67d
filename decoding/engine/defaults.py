"""Sampling that a model asks for in its generation_config.json: the defaults of a request."""

from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from decoding.engine.params import SamplingParams

if TYPE_CHECKING:
    from decoding.engine.sampler import Sampler

READ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# What would change a text and no sampler here has, and the number with which it asks for nothing;
# null, false and empty lists never ask for anything.
NOT_HAD: dict[str, float] = {
    "bad_words_ids": 0,
    "begin_suppress_tokens": 0,
    "constraints": 0,
    "diversity_penalty": 0,
    "dola_layers": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": 0,
    "force_words_ids": 0,
    "forced_bos_token_id": -1,
    "forced_eos_token_id": -1,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "sequence_bias": 0,
    "stop_strings": 0,
    "suppress_tokens": 0,
    "token_healing": 0,
    "top_h": 1,
    "typical_p": 1,
    "watermarking_config": 0,
}
NEUTRAL = "generation_config=ignore takes neutral defaults"


def model_defaults(sampler: "Sampler") -> dict[str, Any]:
    """Return the sampling parameters that a sampler's model names, for requests that name none.

    Raises ValueError of one line for a value that is not allowed, and for a setting that would
    change texts and that no sampler here has.
    """
    config = getattr(sampler.target, "generation_config", None)
    if not isinstance(config, GenerationConfig):
        return {}
    named = config.to_diff_dict()
    where = f"generation_config.json of {sampler.target.name_or_path!r}"
    for key, neutral in NOT_HAD.items():
        value = named.get(key)
        # In Python false is 0, and a forced token of id 0 is no such number.
        if value not in (None, [], {}) and value is not False and value != neutral:
            raise ValueError(
                f"{where} asks for {key}={str(value)[:60]}, which is not offered: {NEUTRAL}"
            )
    found = {key: named[key] for key in READ if named.get(key) is not None}
    try:
        sampler.check_params(SamplingParams(**found, lossy=True))  # a request says that itself
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {NEUTRAL}") from None
    return found


def told(defaults: dict[str, Any]) -> str:
    """Return the line that says which defaults of a model are in force."""
    values = ", ".join(f"{key}={value:g}" for key, value in defaults.items())
    return f"the model's own defaults: {values} ({NEUTRAL})"
