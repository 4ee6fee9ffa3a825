# `make` alone lists the targets. Nothing here needs root, and everything it makes stays in this folder
# (and in pip's own cache).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: setup serve test test-long test-compiled test-gpu check validate fuzz-api fuzz-router bench-router bench-handoff bench-connectors bench-tiers bench-real bench-load bench-lengths bench-prefixes bench-choose bench-policy bench-bound bench-breakeven soak bench-twin chaos-table compile bench-compare bench-sim bench-vidur lock clean help bench-bodies bench-defaults bench-admission bench-plan licences audit plan-example test-k8s bench-scaling wheel helm

# The first Python that fits; or say which: make PYTHON=/path/to/python3.11
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
    "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && { echo "$$p"; break; }; done)
DEVICE ?= auto
BIN := .venv/bin

setup: ## make .venv with everything in it (DEVICE=cpu|gpu, otherwise it looks); at once when it is there already
	@if [ -z "$(PYTHON)" ]; then \
	    echo "setup: Python 3.11 or 3.12 is needed and neither was found on PATH. On Debian or Ubuntu: apt install python3 python3-venv" >&2; \
	    exit 2; \
	fi
	@$(PYTHON) tools/setup.py --device $(DEVICE)

serve: setup ## a whole cluster on this machine with the model that ships: http://127.0.0.1:8000 (ARGS= for `baton up`)
	@$(BIN)/python -m tools.compile --beside & exec $(BIN)/baton up $(ARGS)

test: setup check ## every test but the long ones, live engines last: 10 to 18 minutes on two cores
	@$(BIN)/python tools/run_tests.py $(ARGS)

test-long: setup helm ## what takes longer: tests marked long, live ones with vLLM's own connector, new examples of properties, fuzzing
	@$(BIN)/python -m pytest -m long $(ARGS)
	@$(BIN)/python -m pytest tests/live -m "live and not long" --connector nixl $(ARGS)
	@$(BIN)/python -m pytest tests/property --hypothesis-profile=searching $(ARGS)
	@$(BIN)/python -m pytest tests/fuzz --fuzz-s 600 $(ARGS)

test-gpu: setup ## live tests with their engines on this machine's first GPU, but for the storm of ten minutes
	@$(BIN)/python -m pytest --gpu -m live --deselect "tests/live/test_connector_faults.py::test_a_storm_of_clients_that_leave[10 min]" tests/live/test_connector.py tests/live/test_connector_faults.py tests/live/test_handoff.py tests/live/test_seeding.py tests/live/test_guard.py tests/live/test_early_leg.py tests/live/test_early_parts.py tests/live/test_tiers.py tests/live/test_tiers_fence.py tests/live/test_peers.py $(ARGS)

compile: setup ## compile router and simulator to machine code: half the CPU of a simulation, a fifth to a quarter less in a router (two minutes; needs a C compiler)
	@$(BIN)/python -m tools.compile

wheel: setup ## dist/: a wheel with the compiled modules inside, and the lock of what routers need (k8s/images/ take both)
	@$(BIN)/python -m tools.wheel

helm: setup ## fetch Helm and kubectl into .bench/helm, for the tests of the chart
	@$(BIN)/python -m tools.helm

test-compiled: compile ## the tests of what is compiled, compiled (10 minutes); what reaches into it is skipped
	@BATON_COMPILED=1 $(BIN)/python -m pytest tests/unit tests/property tests/playbook tests/sim tests/contract tests/fuzz tests/chaos -m "not long" $(ARGS)

test-k8s: setup ## the operator's tests; with KUBECONFIG=FILE against that API server (a controller-manager, no kubelet)
	@$(BIN)/python -m pytest tests/contract/test_k8s_operator.py tests/contract/test_k8s_scenarios.py tests/contract/test_k8s_actuator.py tests/contract/test_k8s_api.py $(if $(KUBECONFIG),--kubeconfig $(KUBECONFIG)) $(ARGS)

check: setup ## format, lint, types, import direction
	@$(BIN)/ruff format --check --quiet . || { echo "check: run .venv/bin/ruff format ." >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench-router: compile ## what a router costs: Baton, vllm-router, a bare relay (ARGS=--quick, --publish)
	@BATON_COMPILED=1 $(BIN)/python -m bench.router $(ARGS)

bench-handoff: setup ## what a hand-over costs a client and two real engines (ARGS=--quick, --part client|connectors|router, --gpu, --publish)
	@$(BIN)/python -m bench.handoff $(ARGS)

bench-bodies: setup ## the worst bodies we know: how long other requests wait meanwhile, and memory (ARGS=--only NAME, --publish)
	@$(BIN)/python -m bench.bodies $(ARGS)

bench-connectors: setup ## bench-handoff's second part: vLLM's connectors and Baton's (ARGS=--quick, --only, --publish)
	@$(BIN)/python -m bench.handoff --part connectors $(ARGS)

bench-tiers: setup ## evicted prompts back from host memory, disk and other engines; ranks' caches; real engines, an hour, resumable (ARGS=--quick, --only PART, --publish)
	@$(BIN)/python -m bench.tiers $(ARGS)

bench-real: setup ## requests in time on two real engines: Baton, the same serving whole, plain vLLM; two hours, resumable; needs BATON_DATA (ARGS=--quick, --full, --publish)
	@$(BIN)/python -m bench.real $(ARGS)

bench-load: setup ## `baton load` beside `vllm bench serve` and guidellm on one mock (ARGS=--quick, --publish)
	@$(BIN)/python -m bench.load $(ARGS)

bench-compare: setup ## aggregated, disaggregated and rivals, simulated; traces need BATON_DATA (ARGS=--quick, --only, --publish)
	@$(BIN)/python -m bench.compare $(ARGS)

bench-twin: setup ## what the engine twin costs: µs a leg, memory (ARGS=--only decode)
	@$(BIN)/python -m bench.twin $(ARGS)

chaos-table: setup ## what clients get when things go wrong: Baton and vllm-router (ARGS=--quick, --publish, --only TEXT)
	@$(BIN)/python -m bench.chaos $(ARGS)

validate: setup ## measured runs of real engines beside what the twin predicts; needs BATON_DATA (ARGS=--markdown, --json)
	@if [ ! -d "$${BATON_DATA:-}/measured" ]; then \
	    echo "validate: set BATON_DATA to a folder that holds measured/; docs/validation.md says where to get it" >&2; \
	    exit 2; \
	fi
	@$(BIN)/baton validate "$$BATON_DATA/measured" $(ARGS)

bench-sim: compile ## how fast the simulator is: 1,000 instances, a million requests (ARGS=--quick, --publish)
	@BATON_COMPILED=1 $(BIN)/python -m bench.sim $(ARGS)

bench-vidur: setup ## Vidur beside our simulator on the same requests: CPU for each (ARGS=--quick, --publish)
	@$(BIN)/python -m bench.vidur $(ARGS)

bench-lengths: setup ## predicted answer lengths on traces; needs BATON_DATA (ARGS=--quick, --publish)
	@$(BIN)/python -m bench.lengths $(ARGS)

bench-prefixes: setup ## what the prefix index expects and what engines hold; needs BATON_DATA (ARGS=--quick, --publish)
	@$(BIN)/python -m bench.prefixes $(ARGS)

bench-choose: compile ## what one choice costs the router, by policy and size of the fleet (ARGS=--publish)
	@BATON_COMPILED=1 $(BIN)/python -m bench.choose $(ARGS)

bench-policy: compile ## Baton against the best rival with the same admission, and a bound; simulated, three hours, resumable; needs BATON_DATA (ARGS=--quick, --minutes N, --publish)
	@BATON_COMPILED=1 $(BIN)/python -m bench.policy $(ARGS)

bench-bound: setup ## a bound that a long load keeps, beside the published cells of bench-policy; some ten minutes; needs BATON_DATA (ARGS="--only TEXT", --publish)
	@$(BIN)/python -m bench.policy_bound $(ARGS)

bench-scaling: compile ## the goodput controller against rivals' scaling laws, simulated; traces need BATON_DATA (ARGS=--quick, --full, --publish)
	@BATON_COMPILED=1 $(BIN)/python -m bench.scaling $(ARGS)

fuzz-api: setup ## what docs/openapi.json allows and does not, sent to a router on mocks; installs schemathesis in .bench/fuzz
	@$(BIN)/python -m bench.rivals fuzz >/dev/null
	@$(BIN)/python -m pytest -m long tests/contract/test_fuzz_api.py $(ARGS)

fuzz-router: setup ## hostile bodies, heads, engines' answers and registry values, given to a router (ARGS="--fuzz-s 600")
	@$(BIN)/python -m pytest tests/fuzz $(ARGS)

bench-breakeven: compile ## always, never or sometimes hand off; what single decisions cost; needs BATON_DATA (ARGS=--publish)
	@BATON_COMPILED=1 $(BIN)/python -m bench.breakeven $(ARGS)

soak: setup ## 30 minutes at 70 % load, mock instances coming and going: memory, holds, counters (ARGS="--minutes 5")
	@$(BIN)/python -m bench.soak $(ARGS)

bench-defaults: compile ## TTFT of `baton router` as it starts beside vllm-router's policies, on mocks (ARGS=--quick, --publish)
	@BATON_COMPILED=1 $(BIN)/python -m bench.defaults $(ARGS)

bench-admission: setup ## what admission lets in and keeps: overloads, simulated and on mocks (ARGS="--only simulated", --publish)
	@$(BIN)/python -m bench.admission $(ARGS)

bench-plan: compile ## `baton plan` beside other planners, and papers' claims through it; needs BATON_DATA (ARGS="--only search", --publish)
	@BATON_COMPILED=1 $(BIN)/python -m bench.plan $(ARGS)

plan-example: setup ## plan the example, start the plan on mocks, load it, and compare what was promised with what is seen
	@$(BIN)/python -m bench.plan_example $(ARGS)

licences: setup ## licences of all locked packages, by their own metadata; unknown and copyleft ones are marked
	@$(BIN)/python tools/licences.py

audit: setup ## known vulnerabilities of the locked packages, by pip-audit in .bench/audit
	@$(BIN)/python tools/audit.py

lock: setup ## resolve requirements/*.txt again (UPGRADE=1 takes the newest versions)
	@$(BIN)/python tools/lock.py $(if $(UPGRADE),--upgrade)

clean: ## remove .venv and everything that tools left here
	@rm -rf .venv .bench build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
