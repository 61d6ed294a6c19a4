# The planning service. BASE is any image with Python 3.11 or newer, its venv module and pip.
ARG BASE=python:3.13-slim-trixie

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /source
RUN python3 -m venv /opt/autoshard
# What rarely changes comes first, so that a build after a change of the code is quick.
COPY pyproject.toml constraints.txt ./
RUN /opt/autoshard/bin/python -m pip install --constraint constraints.txt --group service
# The service runs no models. With torch it also finds rules for operators of torch that have none.
ARG TORCH=
RUN if [ -n "${TORCH}" ]; then \
        /opt/autoshard/bin/python -m pip install --constraint constraints.txt "${TORCH}"; \
    fi
# With torch and transformers it also makes the models of configs.
ARG CONFIGS=
RUN if [ -n "${CONFIGS}" ]; then \
        /opt/autoshard/bin/python -m pip install --constraint constraints.txt --group configs; \
    fi
COPY README.md LICENSE ./
COPY autoshard autoshard
COPY server server
COPY solver_cache solver_cache
RUN /opt/autoshard/bin/python -m pip install --no-deps . \
    && /opt/autoshard/bin/python -m pip uninstall --yes pip \
    && find /opt/autoshard/lib -path "*/scipy/*/tests" -prune -exec rm -r {} +

FROM ${BASE}
LABEL org.opencontainers.image.title="autoshard" \
      org.opencontainers.image.description="Planning service: sharding plans for PyTorch models" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /var/lib/autoshard \
        --shell /usr/sbin/nologin autoshard \
    && install --directory --owner=autoshard --group=autoshard --mode=0750 /var/lib/autoshard
COPY --from=build /opt/autoshard /opt/autoshard
# All that is written goes to the volume and to /tmp; the rest may be read-only.
ENV AUTOSHARD_STORE_URL=sqlite:////var/lib/autoshard/store.sqlite3 \
    HOME=/var/lib/autoshard \
    PATH=/opt/autoshard/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/autoshard
VOLUME /var/lib/autoshard
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/livez', timeout=4)"]
ENTRYPOINT ["autoshard"]
CMD ["serve", "--host", "0.0.0.0"]
