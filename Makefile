# Every target sets up what it needs: the first call makes .venv from requirements/cpu.txt, later calls find it ready.
# Options of a command go through ARGS:  make demo ARGS="--set spec.seed=2"
#                                        make test ARGS="tests/rollout -k lease"

SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS   += --no-builtin-rules --no-print-directory
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON     := 3.11
UV_VERSION := 0.13.8
ARGS       ?=

CACHE  := $(or $(TAPFORGE_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/tapforge)
UV     := $(CACHE)/uv-$(UV_VERSION)/bin/uv
# The same name in a rule, where a blank ends a name: HOME may have one.
EMPTY  :=
UV_RULE := $(subst $(EMPTY) $(EMPTY),\ ,$(UV))
LOCK   := requirements/cpu.txt
BIN    := .venv/bin
# Stamps: the packages of the lock are in .venv; so is this checkout. Their names hold the checkout's path, because the
# commands of an environment that was moved or copied still start the old one.
HERE   := $(shell pwd | cksum | cut -d' ' -f1)
LOCKED := .venv/.locked-$(HERE)
READY  := .venv/.ready-$(HERE)

.PHONY: help axe docs reference pictures demo demo-cluster demo-autoscaling demo-queues dev tiny bench-operator test test-long test-models test-versions check-wheel release lint format lock setup clean

help: ## this list
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):.*## /\1\t/' | expand -t 18
	@for script in bench/*.py; do echo "bench-$$(basename "$$script" .py)"; done | paste -sd' ' | sed 's/^/benchmarks:       /'

demo: $(READY) ## train on the simulated phone: manifests/samples/quickstart.yaml
	@$(BIN)/tapforge run -f manifests/samples/quickstart.yaml $(ARGS)

demo-cluster: $(READY) ## a run on a Kubernetes of this machine, from apply to Complete: needs Go and root
	@$(BIN)/python -m e2e.demo

demo-autoscaling: $(READY) ## Karpenter brings and empties nodes for a pool of 200 slots, four minutes: needs Go
	@$(BIN)/python -m pytest tests/e2e/test_karpenter.py -m long -q -s --durations 0 $(ARGS)

demo-queues: $(READY) ## runs in a queue of Kueue's, on a control plane of this machine: needs Go
	@$(BIN)/python -m e2e.queues

dev: $(READY) ## the operator from this checkout on a control plane of this machine, again at every save: needs Go
	@$(BIN)/python -m e2e.dev

tiny: $(READY) ## rebuild the tiny base model from its seed (about ten minutes)
	@$(BIN)/tapforge tiny build $(ARGS)

reference: $(READY) ## the generated pages of docs/reference, from the code
	@$(BIN)/python -m e2e.reference

pictures: $(READY) ## the pictures of README and docs, from runs/quickstart; from another run: ARGS=FOLDER
	@$(BIN)/python -m e2e.pictures $(ARGS)

docs: $(UV_RULE) ## the site of docs/ into build/site, which needs no network afterwards; a lost link is an error
	@"$(UV)" run --quiet --no-project --python $(PYTHON) --with-requirements requirements/docs.txt -- \
	    sphinx-build --quiet --fresh-env --fail-on-warning --jobs auto -c docs . build/site $(ARGS)
	@echo "docs: build/site/index.html; with search: python3 -m http.server --directory build/site"

axe: $(READY) ## accessibility of the page of runs and of the phones' page, by axe-core in Chromium: needs npm
	@$(BIN)/python -m e2e.axe $(ARGS)

bench-operator: $(READY) ## the operator on a real control plane: e2e/bench; a part of it: ARGS="--only claims"
	@$(BIN)/python -m e2e.bench $(ARGS)

bench-%: bench/%.py $(READY) ## a benchmark of bench/; writes bench-results/*.json
	@$(BIN)/python $< $(ARGS)

# Every check runs, also after one that failed; the names of those that failed are in $$failed.
define LINT
failed=; \
check() { echo "lint: $$*"; $(BIN)/"$$@" || failed+=" '$$*'"; }; \
check ruff check --quiet --output-format concise; \
check ruff format --check --quiet --output-format concise; \
check mypy --no-error-summary; \
check lint-imports --no-logo; \
if [ -n "$$failed" ]; then echo "lint: failed:$$failed"; else echo "lint: clean"; fi
endef

test: $(READY) ## lint, then every test that shows a promise (tests/tiers.py); some of them: ARGS="tests/rollout -k lease"
ifneq ($(strip $(ARGS)),)
	@$(LINT); echo test: pytest $(ARGS); TAPFORGE_SAME_EXAMPLES=1 $(BIN)/python -m pytest $(ARGS) || failed+=" pytest"; \
	if [ -n "$$failed" ]; then echo "test: failed:$$failed"; exit 1; else echo "test: passed"; fi
else
	@$(BIN)/python -m tests.tiers test
endif

test-long: $(READY) ## the tests that take long: matrices, minutes of waiting, further whole runs
	$(if $(strip $(ARGS)),$(error test-long takes no ARGS: make test ARGS="FOLDER -m long" runs some of them))
	@$(BIN)/python -m tests.tiers test-long

test-versions: $(READY) ## the control plane's tests on the oldest and the newest Kubernetes and the oldest KubeRay: about 40 minutes
	@$(BIN)/python -m tests.versions $(ARGS)

test-models: $(READY) ## each model family at its real width, alone: an update on screens of 1080x2400; traces of whole models; minutes, 12 GiB
	@$(BIN)/python -m pytest tests/families tests/memory/test_trace.py -m "long or width" -v $(ARGS)

check-wheel: $(READY) ## the wheel on Python 3.11, 3.12 and 3.13, those that are here; one of them: ARGS="--python 3.12"
	@$(BIN)/python -m release.check_wheel --uv "$(UV)" $(ARGS)

release: $(READY) ## packages, chart, images, SBOMs and checksums into dist/: docs/release.md; ARGS="--no-images", "--trainer"
	@$(BIN)/python -m release --uv "$(UV)" $(ARGS)

lint: $(READY) ## ruff, mypy, import rules
	@$(LINT); [ -z "$$failed" ]

format: $(READY) ## write every file as ruff would have it
	@$(BIN)/ruff check --quiet --fix --exit-zero; $(BIN)/ruff format --quiet

# cpu.txt is this checkout's environment; the others are the images' (Dockerfile). What both hold has the same version, but
# for GPUs: vLLM's build for those wants versions of its own. The operator needs no pictures, arrays or colours, and it
# and phones render no page.
COMPILE = "$(UV)" pip compile --quiet --python-version $(PYTHON) --no-header --output-file
IMAGE   = --no-annotate pyproject.toml $(ARGS)
NO_PAGES = $(addprefix --no-emit-package ,jinja2 markupsafe)
LOGGERS = $(addprefix --extra ,tensorboard wandb swanlab mlflow)
lock: $(UV_RULE) ## write requirements/*.txt again from pyproject.toml; newest versions: ARGS=--upgrade
	@echo "lock: $(LOCK)"
	@$(COMPILE) $(LOCK) --extra operator --extra trainer-cpu --extra web --extra cluster --extra storage --extra data $(LOGGERS) --extra dev pyproject.toml $(ARGS)
	@echo "lock: requirements of the images"
	@$(COMPILE) requirements/operator.txt --constraint $(LOCK) --extra operator $(IMAGE) $(NO_PAGES) \
	    $(addprefix --no-emit-package ,numpy pillow psutil rich markdown-it-py mdurl pygments)
	@$(COMPILE) requirements/phone.txt --constraint $(LOCK) $(IMAGE) $(NO_PAGES)
	@$(COMPILE) requirements/web.txt --constraint $(LOCK) --extra web $(IMAGE) $(NO_PAGES)
	@$(COMPILE) requirements/trainer-cpu.txt --constraint $(LOCK) --extra trainer-cpu --extra storage --extra data $(LOGGERS) $(IMAGE)
	@$(COMPILE) requirements/docs.txt --constraint $(LOCK) --no-annotate --group docs $(ARGS)
	@$(COMPILE) requirements/trainer-gpu.txt --extra trainer-gpu --extra storage --extra data $(LOGGERS) $(IMAGE)
	@echo hatchling | $(COMPILE) requirements/build.txt --no-annotate $(ARGS) -
	@echo cyclonedx-bom | $(COMPILE) requirements/release.txt --no-annotate $(ARGS) -

setup: $(READY) ## only the environment
	@echo "setup: ready"

clean: ## remove the environment and every cache in the checkout; recorded runs and results stay
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis test-logs build dist
	@find crds operator trainer tests bench e2e -name __pycache__ -type d -prune -exec rm -rf {} +

# --- setting up -------------------------------------------------------------------------------------------------------

$(READY): $(LOCKED) pyproject.toml | $(UV_RULE)
	@echo "setup: this checkout into .venv"
	@"$(UV)" pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

# Hard links make the second environment free; they work only inside one file system. Compiled bytecode halves the time
# in which torch and vLLM are imported, at every start, also where Python is told to write none.
# TAPFORGE_CPU_INDEX names an index of torch's builds for CPUs: it is asked too, its build (2.13.0+cpu) counts as newer than
# the plain one, and the libraries of CUDA, which are what only the plain build needs, are left out.
CUDA := ^(cuda-|nvidia-)
KEPT := ^nvidia-ml-py==
$(LOCKED): $(LOCK) | $(UV_RULE)
	@version=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true); \
	if [ "$$version" != $(PYTHON) ] || [ -n "$$(ls .venv/.locked-* 2>/dev/null | grep -v $(HERE))" ]; then \
	    echo "setup: Python $(PYTHON) environment in .venv"; \
	    "$(UV)" venv --quiet --clear --python $(PYTHON) .venv; \
	fi
	@echo "setup: $$(grep -c == $(LOCK)) packages into .venv (the first time they are downloaded, which takes minutes)"
	@SECONDS=0; cached=$$("$(UV)" cache dir); mkdir -p "$$cached"; \
	[ "$$(stat -c %d "$$cached")" = "$$(stat -c %d .venv)" ] || export UV_LINK_MODE=copy; \
	lock=$(LOCK); index=(); \
	if [ -n "$${TAPFORGE_CPU_INDEX:-}" ]; then \
	    echo "setup: torch's build for CPUs from $$TAPFORGE_CPU_INDEX, without the libraries of CUDA"; \
	    lock=.venv/cpu.txt; awk '!/$(CUDA)/ || /$(KEPT)/' $(LOCK) > $$lock; \
	    index=(--index "$$TAPFORGE_CPU_INDEX" --index-strategy unsafe-best-match); \
	fi; \
	"$(UV)" pip sync --quiet --compile-bytecode --python $(BIN)/python "$${index[@]}" $$lock; \
	echo "setup: packages there after $$SECONDS s"
	@touch $@

# Needed only while something is being set up: an environment that is ready works without it.
.SECONDARY: $(UV_RULE)
$(UV_RULE):
	@echo "setup: uv $(UV_VERSION) into $(CACHE) (once per machine)"
	@python3 -m venv --clear "$(CACHE)/uv-$(UV_VERSION)" || { \
	    echo "setup: python3 can't make environments; on Debian: apt install python3-venv" >&2; exit 1; }
	@"$(CACHE)/uv-$(UV_VERSION)/bin/python" -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
