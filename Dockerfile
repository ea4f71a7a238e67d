# The server in a container, on CPUs or on a GPU (docs/how_to/serve.md#in-a-container).
#
#   docker build -t parade .                             # CPUs
#   docker build -t parade --build-arg DEVICE=cuda .     # an NVIDIA GPU
#   docker run -p 8000:8000 -e PARADE_API_KEY=... -v "$PWD/runs:/runs:ro" parade model=/runs/deer_stage2/export
#
# Not built by CI, which has no docker; tests/test_docker.py checks what it names.
ARG DEVICE=cpu

FROM python:3.11-slim AS base
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY constraints.txt .

FROM base AS cpu
RUN pip install -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch

# torch's wheel on PyPI brings CUDA's libraries, so that only the driver is the host's.
FROM base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN pip install -c constraints.txt torch

FROM ${DEVICE}
COPY . .
RUN pip install -c constraints.txt '.[serve,cpu]' && rm -r /src/*
RUN useradd --create-home --uid 1000 parade
USER parade
WORKDIR /home/parade
EXPOSE 8000
# A large model takes minutes to load.
HEALTHCHECK --interval=30s --timeout=10s --start-period=15m \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["python", "-m", "decoding.serve", "host=0.0.0.0", "port=8000"]
