# CPU:  docker build -t lightning-dist --build-arg TORCH_INDEX=<index of torch's CPU builds> .
# CUDA: docker build -t lightning-dist --build-arg TORCH_INDEX=<index of torch's builds for your CUDA> .
# Without TORCH_INDEX, pip takes the build of the default index, which is for CUDA on Linux.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH_INDEX=""
ARG EXTRAS="cli,hf"
WORKDIR /opt/lightning-dist
COPY . .
RUN python -m pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url} ${TORCH_INDEX} torch
RUN python -m pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"
RUN lightning-dist --version
WORKDIR /workspace
ENTRYPOINT ["lightning-dist"]
