# Every command works in a fresh clone; what it needs is made in .testbed/ first.

PYTHON ?= python3.11
ENGINE := .testbed/venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help env check test demo bench clean

help:  ## list these commands
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

env:  ## make the environments, models and vLLM versions that the tests use
	$(PYTHON) tools/testbed.py all

check:  ## format, lint, types, unit tests and laws: needs no vLLM
	$(PYTHON) tools/run_tests.py check

test:  ## everything, on every supported vLLM
	$(PYTHON) tools/run_tests.py all

demo:  ## three users on one engine, two of them limited
	$(PYTHON) examples/demo.py

bench:  ## measure step cost, served rate and throughput
	$(PYTHON) tools/testbed.py env models
	$(ENGINE) benchmarks/run.py

clean:  ## remove everything that was made
	rm -rf .testbed .mypy_cache .pytest_cache .ruff_cache .hypothesis dist site demo-output
