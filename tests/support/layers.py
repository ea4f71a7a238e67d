"""The layers of decoding/ and data/, from the bottom up: tests and docs are compared with them."""

LAYERS_OF_DECODING = [  # a package of decoding/ imports from those before it, and from itself
    {"report", "engine"},
    {"external", "method"},
    {"drafting", "any_subset", "masked", "continuous"},
    {"samplers"},
    {"loading"},
    {"calibration", "collectors", "auditing", "chat", "serving"},
    {"generate", "images", "collect", "calibrate", "fetch", "harness", "audit", "serve"},
    {"bench", "lm_eval"},
]
LAYERS_OF_DATA = [
    {"arguments", "files", "vae"},
    {"corpora"},
    {"text"},
    {"corruption"},
    {"rows", "images"},
]
