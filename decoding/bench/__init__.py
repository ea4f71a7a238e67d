"""Commands that measure; `python -m decoding.bench` is `decoding.bench.text`."""
