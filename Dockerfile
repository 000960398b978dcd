# Server and dashboard in one image; the agent runs where the training runs. BASE_IMAGE: any Debian with Python 3.11+;
# what else they need is installed where it lacks.
ARG BASE_IMAGE=python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c
FROM ${BASE_IMAGE}

WORKDIR /opt/collage-monitor
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE ./
COPY tools/package_page.py tools/
COPY collage_monitor collage_monitor
COPY agent agent
COPY server server
COPY dashboard dashboard
COPY studies studies
# An environment of its own: Debian's Python is managed by Debian, and its pip refuses to install. A checkout made
# under umask 077 is readable by root alone until then.
ENV PATH=/opt/collage-monitor/environment/bin:$PATH
# hadolint ignore=DL3008
RUN if ! python3 -c "import ensurepip" || ! command -v openssl; then \
        apt-get update \
        && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends openssl python3-venv \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
    && chmod -R a+rX . \
    && python3 -m venv environment \
    && environment/bin/pip install --no-cache-dir --constraint constraints.txt . "./server[archive]" \
    && useradd --create-home --uid 10001 collage \
    && install --directory --owner collage /data

USER 10001
VOLUME /data
EXPOSE 7420 7421
ENTRYPOINT ["collage-monitor"]
# Add --allowed-host NAME: the name under which agents and browsers reach the container.
CMD ["serve", "--host", "0.0.0.0", "--allowed-host", "collage-monitor", "--dir", "/data"]
