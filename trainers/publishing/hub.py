"""The push of an export to the Hub: only files of an export, retried, one line for errors.

huggingface_hub does the transfer. It retries by itself the requests that carry data (the check of
each file, the LFS or Xet upload); the short requests around them (repository, branch, model card,
commit) it sends once, so those are retried here. A push may be repeated at any point: a file that
the Hub has already is found there by its hash and not sent again.
"""

import glob
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import HFValidationError, validate_repo_id

from decoding.commands.cli import one_line
from decoding.loading import artefacts

WEIGHTS = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_model*.safetensors",
    "adapter_config.json",
)

# The files that may be pushed, `*` within one folder. A list of those that may not would forget
# some: optimizer state and checkpoints have many names.
FILES = (
    *WEIGHTS,
    *artefacts(),
    "README.md",
    "LICENSE*",
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
REPEATED = ("/preupload/", "/info/lfs/")  # the client itself retries these requests
PAUSES = (1, 2, 4, 8)  # seconds before each retry


def uploads(folder: Path) -> tuple[dict[str, int], list[str]]:
    """The files of an export that are pushed, and those that are not.

    Args:
        folder: The export.

    Returns:
        ({path in the export: size in bytes} of the files to push, paths of the others).
    """
    chosen = {path for pattern in FILES for path in folder.glob(pattern)}
    files, others = {}, []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if path in chosen:
            files[name] = path.stat().st_size
        else:
            others.append(name)
    return files, others


def check_name(repo: str) -> None:
    """Check the name of a repository.

    Args:
        repo: 'org/name'.

    Raises:
        ValueError: It is something else.
    """
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
    """Upload an export; HF_TOKEN and HF_ENDPOINT are honoured.

    Args:
        folder: The export.
        repo: 'org/name'; the repository is made if there is none.
        revision: A branch, made if there is none; None: main.
        message: Of the commit.
        private: Whether a new repository is private; None: its owner's default.

    Returns:
        The URL of the commit.

    Raises:
        ValueError: A wrong name, no token, or a push that failed; one line says why.
    """
    check_name(repo)
    api = HfApi(token=get_token())
    if not api.endpoint.startswith(("http://", "https://")):
        raise ValueError(f"HF_ENDPOINT={api.endpoint!r} is no address: it starts with https://")
    if api.token is None:
        raise ValueError(f"no token to push to {repo!r} with: run `hf auth login`, or set HF_TOKEN")

    def upload() -> CommitInfo:
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise ValueError("it is there already and public; private=true is for a new one")
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=[glob.escape(name) for name in uploads(folder)[0]],
            # Weights of an earlier push in other shards: from_pretrained might take them.
            delete_patterns=list(WEIGHTS),
            revision=revision,
            commit_message=message,
        )

    try:
        return patiently(upload).commit_url
    except Exception as error:  # the client has many; a user needs one line
        reason = _reason(error, api.endpoint)
        raise ValueError(f"could not push to {repo!r}: {reason}") from error


def patiently(step: Callable[[], CommitInfo]) -> CommitInfo:
    """The result of a step that may be repeated; after a temporary failure it is retried.

    Args:
        step: Makes its requests and returns the commit.

    Returns:
        What `step` returns.

    Raises:
        Exception: What `step` raises last, or for a failure that is not temporary.
    """
    for pause in PAUSES:
        try:
            return step()
        except Exception as error:
            if not _passing(error):
                raise
            print(f"{one_line(error)}: again in {pause} s", file=sys.stderr)
            time.sleep(pause)
    return step()


def _passing(error: Exception) -> bool:
    """Whether a step may succeed later, and the client has not retried it already."""
    if isinstance(error, json.JSONDecodeError):  # a proxy's page where the Hub's answer should be
        return True
    if not isinstance(error, HTTPError):
        return False
    answer = error.response if isinstance(error, HfHubHTTPError) else None
    request = answer.request if answer is not None else error.request
    if any(part in str(request.url) for part in REPEATED):
        return False
    return answer is None or answer.status_code in PASSING


def _reason(error: Exception, endpoint: str) -> str:
    """One line: what went wrong, and what mends it."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__  # of the upload of one file
    if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
        return f"{endpoint} does not accept the token: run `hf auth login`, or set HF_TOKEN"
    if isinstance(error, HfHubHTTPError) and error.response.status_code == 403:
        return f"the token may not write there: {one_line(error)}"
    if isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError):
        return (
            f"no connection to {endpoint} ({one_line(error)}): see to the network or HF_ENDPOINT "
            "and run this again; what is there already is not sent twice"
        )
    return one_line(error)
