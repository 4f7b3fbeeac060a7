# syntax=docker/dockerfile:1
#
# docker build --target gpu -t hybridrl:gpu .      NVIDIA clusters: sm_80, sm_90a, sm_100; CUDA 13, Python 3.12
# docker build --target cpu -t hybridrl:cpu .      laptops and CI: real Megatron-core and vLLM on CPU, Python 3.11
#
# The gpu target compiles the kernels and pins the packages; no training run on GPUs was tested yet, and `hybridrl train`
# refuses them. The cpu target runs everything that the tests run.
#
# Where pip does not find CPU builds of torch by itself, give PyTorch's CPU wheel index:
#   docker build --target cpu --build-arg PIP_EXTRA_INDEX_URL=... .
#
# Bases are exact tags; to pin one by digest, hand it over: --build-arg CPU_BASE=python@sha256:...
# Packages of the distribution are those of the base's release: its mirrors keep no older versions that a pin could name (DL3008).
# TOKENIZERS_PARALLELISM is no secret (DL3064).

ARG GPU_BASE=nvcr.io/nvidia/pytorch:26.05-py3
ARG CPU_BASE=python:3.11.14-slim-bookworm

# ---- GPU: the base brings the CUDA toolkit, NCCL and the cluster's network stack. Its own torch is a build of its own
# ---- to which no vLLM wheel fits, so that everything Python lies in an environment of its own.
FROM ${GPU_BASE} AS gpu-build
ENV PIP_CONSTRAINT="" \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PATH=/opt/hybridrl/venv/bin:$PATH
WORKDIR /opt/hybridrl/src
RUN python3.12 -m venv /opt/hybridrl/venv

# Packages first: this layer is rebuilt only when a pin changes. torch comes before the rest, because Transformer Engine
# compiles its PyTorch part against the torch that is installed.
COPY requirements/gpu.txt requirements/gpu.txt
ARG MAX_JOBS=8
ENV NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS="80;90;100" MAX_JOBS=${MAX_JOBS}
RUN pip install "$(grep '^torch==' requirements/gpu.txt)" "$(grep '^setuptools==' requirements/gpu.txt)" "$(grep '^pybind11==' requirements/gpu.txt)" \
 && pip install --no-build-isolation -r requirements/gpu.txt

# The kernels, with their CUDA part: without nvcc the build fails here rather than falling back.
COPY setup.py pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY hybridrl hybridrl
ENV HYBRIDRL_BUILD_CUDA=1
RUN pip install --no-build-isolation --no-deps . \
 && python -I -c "import hybridrl._C"

FROM ${GPU_BASE} AS gpu
LABEL org.opencontainers.image.title="HybridRL" \
      org.opencontainers.image.licenses="Apache-2.0"
# hadolint ignore=DL3064
ENV PIP_CONSTRAINT="" \
    PATH=/opt/hybridrl/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false
RUN groupadd --gid 10001 hybridrl \
 && useradd --create-home --uid 10001 --gid 10001 --shell /bin/bash hybridrl \
 && install -d -o hybridrl -g hybridrl /workspace/runs
COPY --from=gpu-build /opt/hybridrl/venv /opt/hybridrl/venv
COPY --chown=hybridrl:hybridrl configs /workspace/configs
COPY --chown=hybridrl:hybridrl scripts /workspace/scripts
USER 10001:10001
WORKDIR /workspace
ENTRYPOINT ["hybridrl"]
CMD ["--help"]

# ---- CPU ----
FROM ${CPU_BASE} AS cpu-build
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL} \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PATH=/opt/hybridrl/venv/bin:$PATH
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/hybridrl/src
COPY requirements/cpu.txt requirements/cpu-lock.txt requirements/
# The three packages at the end do not match a CPU torch and break `import transformers`; text models need none of them.
RUN python3 -m venv /opt/hybridrl/venv \
 && pip install -r requirements/cpu.txt -c requirements/cpu-lock.txt \
 && pip uninstall -y torchvision torchaudio torchcodec
COPY setup.py pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY hybridrl hybridrl
ENV HYBRIDRL_BUILD_CUDA=0
RUN pip install --no-build-isolation --no-deps . \
 && python -I -c "import hybridrl._C"

FROM ${CPU_BASE} AS cpu
LABEL org.opencontainers.image.title="HybridRL" \
      org.opencontainers.image.licenses="Apache-2.0"
# hadolint ignore=DL3064
ENV PATH=/opt/hybridrl/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TOKENIZERS_PARALLELISM=false
# vLLM compiles small C++ parts when it starts and counts cores with lscpu and numactl's library.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libnuma1 util-linux \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 hybridrl \
 && useradd --create-home --uid 10001 --gid 10001 --shell /bin/bash hybridrl \
 && install -d -o hybridrl -g hybridrl /workspace/runs
COPY --from=cpu-build /opt/hybridrl/venv /opt/hybridrl/venv
COPY --chown=hybridrl:hybridrl configs /workspace/configs
COPY --chown=hybridrl:hybridrl scripts /workspace/scripts
USER 10001:10001
WORKDIR /workspace
ENTRYPOINT ["hybridrl"]
CMD ["train", "configs/demo/calc.yaml"]
