.DEFAULT_GOAL := help
SHELL := /bin/sh

# Any Python from 3.11 on will do to get going; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
TOOLS := .nox/.tools
NOX := $(TOOLS)/bin/nox

.PHONY: help serve test clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  More: $(NOX) -l lists every session; CONTRIBUTING.md explains them."

serve: $(NOX) ## Install SIE and serve MiniLM (PORT=9000, CONFIG=sie.yaml, EMULATE=256MiB, ARGS=...)
	@$(NOX) --session serve -- install
	@ln -sfn .nox/serve .venv
	@exec .venv/bin/sie serve $(if $(PORT),--port $(PORT)) $(if $(CONFIG),--config $(CONFIG)) \
		$(if $(EMULATE),--emulate-device $(EMULATE)) $(ARGS)

test: $(NOX) ## Run every check, as CI does
	@$(NOX) --parallel 2

clean: ## Remove every environment and cache
	rm -rf .nox .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(NOX): constraints/tools.txt
	@test -n "$(PYTHON)" || { echo "SIE needs Python 3.11 or newer: none found (set PYTHON=/path/to/python3)"; exit 1; }
	@echo "Setting up nox in $(TOOLS) ..."
	@"$(PYTHON)" -m venv --clear $(TOOLS)
	@$(TOOLS)/bin/python -m pip install -qq --disable-pip-version-check -r constraints/tools.txt
	@touch $(NOX)
