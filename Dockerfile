# Server and dashboard in one image; the agent runs where the training runs. BASE_IMAGE: any Debian with Python 3.11+.
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
RUN python3 -m pip install --no-cache-dir --constraint constraints.txt ".[server,dashboard]" \
    && useradd --create-home --uid 10001 collage \
    && install --directory --owner collage /data

USER 10001
VOLUME /data
EXPOSE 7420 7421
ENTRYPOINT ["collage-monitor"]
# Add --allowed-host NAME: the name under which agents and browsers reach the container.
CMD ["serve", "--host", "0.0.0.0", "--allowed-host", "collage-monitor", "--dir", "/data"]
