"""Training: Lightning modules (one short file a method), losses, the run around them, exports."""

from decoding import check_not_shadowed

check_not_shadowed("recipes")
