# A node: one daemon per cluster, on the host whose GPUs train. Dials out only.
#
#     docker build -f docker/node.Dockerfile -t farloop-node .                   # CUDA
#     docker build -f docker/node.Dockerfile --target cpu -t farloop-node:cpu .  # without (docker/README.md: PIP_ARGS)
#
# torch's CUDA wheels bring their own CUDA libraries, and the container runtime brings the driver, so a CUDA base would
# only be a second copy of them. To use one all the same, name it: --build-arg BASE=...
ARG BASE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
ARG PIP_ARGS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/farloop
WORKDIR /src
COPY docker/requirements.txt ./
# hadolint ignore=SC2086
RUN /opt/farloop/bin/pip install ${PIP_ARGS} --no-deps --require-hashes --requirement requirements.txt
COPY . .
# What torch's CUDA wheel needs comes here, in the versions that it names; without CUDA nothing is left to fetch.
# hadolint ignore=SC2086
RUN /opt/farloop/bin/pip install ${PIP_ARGS} --constraint constraints.txt --no-build-isolation '.[cloud,hf]'

FROM build AS build-cpu
RUN /opt/farloop/bin/python3 docker/slim.py /opt/farloop/lib/python3*/site-packages

FROM build AS build-cuda
ARG PIP_ARGS=""
# hadolint ignore=SC2086
RUN /opt/farloop/bin/pip install ${PIP_ARGS} --constraint constraints.txt --no-build-isolation '.[gpu]'

# hadolint ignore=DL3006
FROM ${BASE} AS base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="farloop node" \
      org.opencontainers.image.description="Trains on this cluster's GPUs and exchanges quantized fragments with the others" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && groupadd --gid 10001 farloop \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin farloop \
    && install --directory --owner=10001 --group=10001 --mode=0700 /var/lib/farloop
ENV PATH=/opt/farloop/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp NUMBA_CACHE_DIR=/var/lib/farloop/.numba TRITON_CACHE_DIR=/var/lib/farloop/.triton MPLCONFIGDIR=/tmp/matplotlib \
    FARLOOP_LOG_JSON=true FARLOOP_NODE__HTTP=0.0.0.0:9710
USER 10001:10001
WORKDIR /var/lib/farloop
VOLUME ["/var/lib/farloop"]
EXPOSE 9710
# Alive, not ready: a node that waits for its coordinator is healthy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python3", "-m", "farloop.monitoring.healthcheck", "127.0.0.1:9710/healthz"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "farloop"]
CMD ["node", "/etc/farloop/node.toml"]

FROM base AS cpu
COPY --from=build-cpu /opt/farloop /opt/farloop

FROM base AS cuda
USER 0
# Triton compiles its launchers when a kernel is first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/farloop /opt/farloop
USER 10001:10001
