"""The push of an export to the Hub: only files of an export, and one line for errors.

huggingface_hub retries by itself the requests that carry data. A push may be repeated at any point:
the Hub finds a file that it has by its hash, and it is not sent again.
"""

import glob
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import HFValidationError, validate_repo_id

from data.files import read_text, refuse_links
from decoding.loading import artefacts
from recipes.command import one_line
from trainers.publishing.private import private_part

WEIGHTS = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_model*.safetensors",
    "adapter_config.json",
)

BINARY = (".safetensors", ".tensors", ".model", ".bpe")
LICENSES = "LICENSE*"
# The files that may be pushed, `*` within one folder. A list of those that may not would forget
# some: optimizer state and checkpoints have many names.
FILES = (
    *WEIGHTS,
    *artefacts(),
    "README.md",
    LICENSES,
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "parade_*.json",
    "parade_*.yaml",
    "custom_generate/*.py",
    "custom_generate/requirements.txt",
)

PASSING = (408, 429, 500, 502, 503, 504)  # HTTP errors that time may mend
AGAIN = "run this again; what is there already is not sent twice"


def uploads(folder: Path) -> tuple[dict[str, int], list[str]]:
    """Return {path: size in bytes} of an export's files to push, and the paths of the others.

    A link among the files to push raises ValueError.
    """
    chosen = {path for pattern in FILES for path in folder.glob(pattern)}
    refuse_links(folder.parent, sorted(chosen))  # the folder is a run's: it may be a link itself
    there = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path: path.relative_to(folder).as_posix() for path in there}
    files = {names[path]: path.stat().st_size for path in there if path in chosen}
    return files, [names[path] for path in there if path not in chosen]


def check_public(folder: Path, files: Iterable[str]) -> None:
    """Raise ValueError for a path or a secret of this machine in a file that is to be pushed."""
    for path in (folder / name for name in files):
        if path.suffix in BINARY:
            continue
        settings = path.suffix in (".yaml", ".md") or path.name.endswith("config.json")
        if found := private_part(read_text(path), paths=settings):
            raise ValueError(
                f"{path} names {found}, which is of this machine alone: export again from models "
                "that are named by their Hub ids (of an adapter with lora.merge=true), or take it "
                "out of the file"
            )


def check_name(repo: str) -> None:
    """Raise ValueError unless the name of a repository is 'org/name'."""
    try:
        validate_repo_id(repo)
        named = "/" in repo
    except HFValidationError:
        named = False
    if not named:
        raise ValueError(
            f"push={repo!r} is not the name of a repository: give push=org/name, of letters, "
            "digits, '-', '_' and '.'"
        )


def push(
    folder: Path, repo: str, *, revision: str | None, message: str, private: bool | None
) -> str:
    """Upload an export to 'org/name', which is made if missing, and return the commit's URL."""
    files, _ = uploads(folder)
    api = HfApi(token=get_token())
    if not api.endpoint.startswith(("http://", "https://")):
        raise ValueError(f"HF_ENDPOINT={api.endpoint!r} is no address: it starts with https://")
    if api.token is None:
        raise ValueError(f"no token to push to {repo!r} with: run `hf auth login`, or set HF_TOKEN")

    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise ValueError("it is there already and public; private=true is for a new one")
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        # Whatever an earlier push left is loaded with the new weights: a template, tokens, code.
        left = [name for name in api.list_repo_files(repo, revision=revision) if _written(name)]
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=[glob.escape(name) for name in files],
            delete_patterns=[glob.escape(name) for name in left],
            revision=revision,
            commit_message=message,
        )
        return commit.commit_url
    except Exception as error:  # the client has many; a user needs one line
        reason = _reason(error, api.endpoint)
        raise ValueError(f"could not push to {repo!r}: {reason}") from error


def _written(name: str) -> bool:
    """Return whether exports write files of a name; licences are their owner's."""
    path, written = PurePosixPath(name), (PurePosixPath(p) for p in FILES if p != LICENSES)
    return any(len(path.parts) == len(p.parts) and path.match(str(p)) for p in written)


def _reason(error: Exception, endpoint: str) -> str:
    """Return in one line the cause of an error, and its remedy."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # of the upload of one file
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status == 401:
            return f"{endpoint} does not accept the token: run `hf auth login`, or set HF_TOKEN"
        if status == 403:
            return f"the token may not write there: {one_line(error)}"
        return f"{one_line(error)}: {AGAIN}" if status in PASSING else one_line(error)
    if isinstance(error, HTTPError):
        return f"no connection to {endpoint} ({one_line(error)}; HF_ENDPOINT names it): {AGAIN}"
    return one_line(error)
