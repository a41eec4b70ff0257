# `make demo` and `make test` work on a fresh clone; scripts/install makes the environment once and is a no-op after that.
.DEFAULT_GOAL := help
.PHONY: help install proto lint demo test chaos test-failed test-slow test-slow-failed bench-teacher clean

PYTHON_BIN := .venv/bin/python
export OMP_NUM_THREADS ?= 1

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

install:  ## create or update .venv
	@scripts/install

proto: install  ## regenerate protos/gen from protos
	@PATH="$(CURDIR)/.venv/bin:$$PATH" scripts/generate-protos

lint: install  ## ruff, mypy, buf
	.venv/bin/ruff check .
	.venv/bin/mypy families services tests
	cd protos && ../.venv/bin/buf lint

demo: install  ## serve, chat, give feedback, train, and show the new version (DEMO_MODEL=tiny takes 3 minutes)
	@DEMO_MODEL="$(DEMO_MODEL)" $(PYTHON_BIN) -m atoll.cli.demo

test: install  ## every test but the slow ones
	$(PYTHON_BIN) -m pytest

test-slow: install  ## the tests that take minutes (TESTS=tests/e2e: only those of a folder)
	$(PYTHON_BIN) -m pytest -m slow $(TESTS)

chaos: install  ## 212 SIGKILLs of random processes of a running loop (20 minutes; CHAOS_SEED=N for another order)
	$(PYTHON_BIN) -m tests.chaos --kills 200 --real-kills 12 --seed $(or $(CHAOS_SEED),1)

test-failed test-slow-failed: install
	$(PYTHON_BIN) -m pytest --last-failed --last-failed-no-failures none $(if $(findstring slow,$@),-m slow) $(TESTS)

bench-teacher: install  ## the teacher service against its bare engine
	$(PYTHON_BIN) benchmarks/teacher.py

clean:  ## remove what tools left behind (not .venv)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
