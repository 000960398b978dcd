# Everything a newcomer needs: `make demo` and `make test`. TORCH_PIP_ARGS is the place for an index of one's own.
PYTHON ?= python3
TORCH_PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# One more than the cores of a small machine: a fork also waits for servers, trainings and pages.
FORKS ?= 3
export OMP_NUM_THREADS := 1
# The tests start Python hundreds of times; each start would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo up docs generate screenshots studies release sbom packages test coverage quick check format nightly exhaustive mutants torture cluster containers hostile gpu doors bench clean

# The three distributions of this tree, each of which needs the one before it.
DISTRIBUTIONS := ./agent . ./server
$(VENV)/.stamp: pyproject.toml agent/pyproject.toml server/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_PIP_ARGS) --constraint constraints.txt torch numpy
	$(PIP) --constraint constraints.txt --editable ./agent --editable '.[all]' --editable ./server
	touch $@

# Triton lies apart: where it is installed without a device, some optimizers of others fail.
$(VENV)/.stamp-dev: $(VENV)/.stamp
	$(PIP) --constraint constraints.txt --editable ./agent --editable '.[all,dev]' --editable ./server
	if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
		$(PIP) --constraint constraints.txt --upgrade --no-deps --target $(VENV)/triton triton; fi
	touch $@

demo: $(VENV)/.stamp  ## Train five strategies, watched; DEMO_EXIT=1 ends afterwards instead of staying up
	$(BIN)/collage-monitor demo $(if $(DEMO_EXIT),--exit)

up: $(VENV)/.stamp  ## Start server and dashboard
	$(BIN)/collage-monitor up

docs: $(VENV)/.stamp-dev generate  ## Make figures, outputs of the tutorial and generated pages anew, and serve the site
	$(BIN)/python -m tools.figures
	$(BIN)/python -m tools.notebooks
	$(BIN)/python -m tools.static_demo
	$(BIN)/zensical serve

generate: $(VENV)/.stamp-dev  ## Pages and Prometheus rules that are made from the code
	$(BIN)/python -m collage_server.alert_documents rules > server/prometheus/collage.rules.yml
	$(BIN)/python -m collage_server.alert_documents runbook > docs/alerts.md
	$(BIN)/python -m tests.alerts.traces
	$(BIN)/python -m tests.paths
	for page in api_pages http_page command_page troubleshooting_page; do $(BIN)/python -m tools.$$page || exit 1; done

screenshots: $(VENV)/.stamp-dev  ## Pictures of every page, from the demo's data, into docs/images
	$(BIN)/python -m tests.browser.screenshots

studies: $(VENV)/.stamp  ## Run what the studies of docs/studies still lack, and write their pages
	$(BIN)/python -m collage_studies all --output docs/studies --dir studies-data

release: $(VENV)/.stamp-dev  ## Three wheels and sdists into dist/, checked; alone and together they do what they are for
	rm -rf dist
	for folder in $(DISTRIBUTIONS); do $(BIN)/python -m build --outdir dist $$folder || exit 1; done
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m tools.release dist

sbom: $(VENV)/.stamp-dev  ## What the wheels of dist/ bring, as CycloneDX: sbom/collage-monitor.cdx.json
	rm -rf sbom
	$(PYTHON) -m venv --without-pip sbom/environment
	$(BIN)/python -m pip --python sbom/environment install --quiet $(TORCH_PIP_ARGS) --constraint constraints.txt torch numpy
	$(BIN)/python -m pip --python sbom/environment install --quiet --constraint constraints.txt "$$(echo dist/collage_monitor-*.whl)[all]" dist/*.whl
	$(BIN)/uvx --from cyclonedx-bom==7.5.0 cyclonedx-py environment --output-reproducible --output-file sbom/collage-monitor.cdx.json sbom/environment

packages: $(VENV)/.stamp-dev  ## Each extra alone, newest and lowest versions: what is offered works; PACKAGES="--pythons 3.11,3.12"
	rm -rf dist
	for folder in $(DISTRIBUTIONS); do $(BIN)/python -m build --wheel --outdir dist $$folder || exit 1; done
	$(BIN)/python -m tools.packages dist $(PACKAGES)

test: $(VENV)/.stamp-dev  ## Every test but the long lanes
	@echo "left out here: the long lanes (make nightly, make exhaustive) and the CUDA lane (make gpu)"
	$(BIN)/python -m pytest --forks $(FORKS) -m "not nightly and not gpu"

coverage: $(VENV)/.stamp-dev  ## What the tests of the day run, by room, of statements and branches; and what they never enter
	rm -rf build/coverage
	$(BIN)/python -m coverage run -m pytest --forks $(FORKS) -m "not nightly and not gpu"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m tools.coverage_rooms

quick: $(VENV)/.stamp-dev  ## The fast part, for while you work: what is not marked slow; none of it starts a process
	$(BIN)/python -m pytest --forks 2 -m "not slow and not nightly and not gpu"

check: $(VENV)/.stamp-dev  ## Format, lint, types, boundaries, sizes, users of the contract, prose, compose file, Dockerfile, workflows, site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/sizes.py
	$(BIN)/python tools/contract_users.py
	$(BIN)/python tools/prose.py
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-actions action.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet .github action.yml
	$(BIN)/zensical build --clean --strict

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

nightly: $(VENV)/.stamp-dev exhaustive  ## The long lanes
	$(BIN)/python -m pytest -m nightly
	$(BIN)/python -m pytest --hypothesis-profile=nightly tests/server/store tests/agent_delivery/test_laws.py -k "Laws or laws"
	$(MAKE) mutants
	if [ "$$(id -u)" = 0 ]; then $(MAKE) containers; else echo "left out: make containers needs root"; fi

exhaustive: $(VENV)/.stamp-dev  ## Error-free transformations over all pairs of 16-bit numbers
	$(BIN)/python -m tests.numerics.exhaustive

mutants: $(VENV)/.stamp-dev  ## Faults of the kind that a maintainer makes, planted one at a time: do tests catch them? ROOMS="judgement" for some
	$(BIN)/python -m drills.mutants $(ROOMS)

torture: $(VENV)/.stamp-dev  ## Servers and databases killed at random; KILLS=1000 for longer, SEED=… to repeat one
	$(BIN)/python -m drills.torture --kills $(or $(KILLS),200) $(if $(SEED),--seed $(SEED))

cluster: $(VENV)/.stamp-dev  ## Each piece of a cluster killed under load (installs Debian's patroni, etcd, haproxy); KILLS=30
	.ci/install etcd-client etcd-server haproxy patroni postgresql
	$(BIN)/python -m drills.cluster --kills $(or $(KILLS),30) $(if $(SEED),--seed $(SEED))

containers: $(VENV)/.stamp-dev  ## The shipped docker-compose.yml run by Podman, as root, on Debian (installs podman, debootstrap)
	.ci/install aardvark-dns chromium-headless-shell debootstrap git iproute2 iptables netavark podman runc
	$(BIN)/python -m drills.containers

hostile: $(VENV)/.stamp-dev  ## One server under everything at once, for an hour; MINUTES=10 for less, BACKEND=postgresql, SEED=… to repeat one
	$(BIN)/python -m drills.torture.hour --minutes $(or $(MINUTES),60) --backend $(or $(BACKEND),sqlite) $(if $(SEED),--seed $(SEED))

gpu: $(VENV)/.stamp-dev  ## The CUDA lane
	$(BIN)/python -m pytest -m gpu

doors: $(VENV)/.stamp-dev  ## Trainings of real packages, each in an environment of its own under build/doors; DOORS="trl verl" for some
	$(BIN)/python -m drills.doors $(DOORS)

bench: $(VENV)/.stamp-dev  ## Every benchmark
	for name in watch first_steps averages deliver ingest load ranks query runs scale growth optimizer accumulation dashboard archive; do $(BIN)/python -m benchmarks.$$name || exit 1; done

clean:
	rm -rf $(VENV) demo-output
