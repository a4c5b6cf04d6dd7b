# The verbs a person types. `make help` lists them.
SHELL := /bin/bash
export SIXFOLD_CACHE ?= $(HOME)/.cache/sixfold
# uv, where the machine has none: the environment is made with it, and the models' data come through it.
export PATH := $(PATH):$(SIXFOLD_CACHE)/uv/bin
UV := $(shell command -v uv || echo $(SIXFOLD_CACHE)/uv/bin/uv)
RUN := .venv/bin/python
STAGE := ./e2e/stage
# Torch and the BLAS libraries would otherwise fight over the cores of a small machine.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo demo-down test test-api test-models test-runtime test-cluster lint unit api runtime journeys crds models images sbom bench gpu-check cluster-up cluster-down

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

demo: .venv/.synced ## a cluster, the operator, the examples, real requests, a level change: the whole way once
	@$(RUN) e2e/demo/demo.py

demo-down: .venv/.synced ## remove what the demo started
	@$(RUN) e2e/demo/remove.py

test: ## every check, fast ones first
	@rm -f .cache/stages
	@$(STAGE) environment $(MAKE) -s .venv/.synced
	@$(STAGE) lint $(MAKE) -s lint
	@$(MAKE) -s -j2 test-api test-models
	@$(MAKE) -s -j2 test-runtime test-cluster
	@$(MAKE) -s journeys

test-api: .venv/.synced
	@$(STAGE) unit $(MAKE) -s unit
	@$(STAGE) kubernetes $(RUN) e2e/cluster/cluster.py binaries
	@$(STAGE) api $(MAKE) -s api

test-runtime: .venv/.synced
	@$(STAGE) runtime $(MAKE) -s runtime

test-cluster: .venv/.synced # beside the runtime's tests, which take one core; models are prepared meanwhile
	@$(STAGE) cluster $(RUN) e2e/journeys/prepare.py

test-models: .venv/.synced # beside the checks that need none: training takes one core for minutes
	@$(STAGE) models $(MAKE) -s models

lint: .venv/.synced ## ruff, mypy, import rules, generated files
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports
	@./e2e/check-generated

unit: .venv/.synced ## pure functions
	@$(RUN) -m pytest -q tests/unit

api: .venv/.synced ## CRDs, chart and operator against a real kube-apiserver
	@$(RUN) e2e/cluster/cluster.py binaries --control-plane-only
	@$(RUN) e2e/cluster/packages.py prometheus promtool prometheus-alertmanager amtool
	@$(RUN) -m pytest -q tests/api tests/helm tests/control_plane

runtime: .venv/.synced ## engine, gateway and preparation with real models
	@$(RUN) e2e/cluster/packages.py redis-server redis-sentinel redis-cli openssl chromium node prometheus promtool
	@$(RUN) -m pytest -q tests/runtime

journeys: .venv/.synced ## what users do, on a real cluster
	@$(RUN) -m pytest -q -s e2e/journeys

crds: .venv/.synced ## generate the CRDs and the chart's copy from the models
	@$(RUN) -m sixfold_api.crdgen crds helm/sixfold/crd-files

models: .venv/.synced ## build the example models that are not committed
	@$(RUN) e2e/models/build.py

images: .venv/.synced ## build both images and bring them into the cluster
	@$(RUN) e2e/cluster/cluster.py images

sbom: | $(UV) ## what each image holds, as CycloneDX: .cache/sbom/*.cdx.json
	@mkdir -p .cache/sbom
	@$(UV) export --quiet --frozen --no-default-groups --extra operator --format cyclonedx1.5 \
	  --output-file .cache/sbom/operator.cdx.json > /dev/null
	@$(UV) export --quiet --frozen --no-default-groups --extra runtime --extra quantise --format cyclonedx1.5 \
	  --output-file .cache/sbom/runtime.cdx.json > /dev/null

bench: .venv/.synced ## product and peer side by side: B=<name>, or all and one table (QUICK=1 for a minute each)
	@$(RUN) e2e/bench/bench.py $(B)

gpu-check: .venv/.synced ## the CUDA paths and a short bench, on a machine with a GPU: one JSON line at the end
	@$(RUN) e2e/gpu_check.py

cluster-up: .venv/.synced ## KUBECONFIG if set, else kind, else a single node built here (root)
	@$(RUN) e2e/cluster/cluster.py up

cluster-down: .venv/.synced ## stop and remove all that cluster-up started
	@$(RUN) e2e/cluster/cluster.py down

.venv/.synced: pyproject.toml uv.lock | $(UV)
	@echo "Installing the Python environment into .venv (torch is large; cached for the next time)"
	@$(UV) sync --frozen --all-extras
	@touch $@

$(SIXFOLD_CACHE)/uv/bin/uv:
	@python3 -m venv $(SIXFOLD_CACHE)/uv || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }
	@$(SIXFOLD_CACHE)/uv/bin/pip install -q uv
