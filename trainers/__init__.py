"""Training: Lightning modules (one short file a method), losses, the run around them, exports."""

import sys

import decoding

if not hasattr(decoding, "check_not_shadowed"):  # another package of that name
    folder = next(iter(decoding.__path__))
    message = (
        f"{folder} hides parade's own package 'decoding': run elsewhere, or rename that folder"
    )
    if sys.argv[:1] == ["-m"]:  # a command that is still being located
        sys.exit(f"error: {message}")
    raise ImportError(message)
