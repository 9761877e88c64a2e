# The coordinator: holds the global model, serves the nodes and the pages. Runs on CPU alone.
#
#     docker build -f docker/coordinator.Dockerfile -t farloop-coordinator .
#
# PIP_ARGS reaches pip as it is: name there the index with PyTorch's CPU wheels (docker/README.md has the line); without
# it pip takes what its default index offers, on Linux the CUDA build, which works and is several GB larger.
ARG BASE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
ARG PIP_ARGS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/farloop
WORKDIR /src
# The heavy part in a layer of its own: it changes only with the pins.
COPY docker/requirements.txt ./
# hadolint ignore=SC2086
RUN /opt/farloop/bin/pip install ${PIP_ARGS} --no-deps --require-hashes --requirement requirements.txt
COPY . .
# What torch's CUDA wheel needs comes here, in the versions that it names; without CUDA nothing is left to fetch.
# hadolint ignore=SC2086
RUN /opt/farloop/bin/pip install ${PIP_ARGS} --constraint constraints.txt --no-build-isolation '.[cloud,hf]' \
    && /opt/farloop/bin/python3 docker/slim.py /opt/farloop/lib/python3*/site-packages

# hadolint ignore=DL3006
FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="farloop coordinator" \
      org.opencontainers.image.description="Holds the model that far-apart GPU clusters train together" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# tini reaps what torchrun leaves and passes SIGTERM on. The distribution's own version is the one that gets mends.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && groupadd --gid 10001 farloop \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin farloop \
    && install --directory --owner=10001 --group=10001 --mode=0700 /var/lib/farloop
COPY --from=build /opt/farloop /opt/farloop
# Everything that is written goes to /var/lib/farloop (kept) or /tmp (not): the root file system can be read-only.
ENV PATH=/opt/farloop/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp NUMBA_CACHE_DIR=/var/lib/farloop/.numba MPLCONFIGDIR=/tmp/matplotlib FARLOOP_LOG_JSON=true
USER 10001:10001
WORKDIR /var/lib/farloop
VOLUME ["/var/lib/farloop"]
EXPOSE 7700 9700
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python3", "-m", "farloop.monitoring.healthcheck", "127.0.0.1:9700/healthz"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--", "farloop"]
CMD ["coordinator", "/etc/farloop/run.toml"]
