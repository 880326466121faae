# All targets use the package installed in .venv, not the source tree. Start with `make serve`.
#
#   make serve             build, download the default model, start the server on http://127.0.0.1:8000
#   make hello             answer one prompt on the command line
#   make build             build and install only
#   make test              linter, formatter, type checker, tests
#   make test-models       tests on larger models that are already in the cache
#   make check-avx512      kernel self-test on an emulated AVX-512 CPU
#   make bench-model       measure kernels and engine; writes benchmarks/results/*.json and the tables made from them. Also:
#                          bench-calibration, bench-itl, bench-serve, bench-versions, bench-scheduler, bench-simulator, bench-batching, bench-clients, bench-peers-model,
#                          bench-peers
#   make report            write the tables and plots again without measuring
#   make clean             delete .venv, builds and caches
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

SOURCES := $(shell find src native -type f ! -name '*.pyc') CMakeLists.txt pyproject.toml
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: serve hello build test test-models bench-model bench-peers-model bench-busy bench-calibration bench-scheduler bench-simulator bench-batching bench-itl bench-serve bench-versions bench-clients bench-peers report check-avx512 clean
.DELETE_ON_ERROR:

serve: $(VENV)/installed
	$(BIN)/twostep serve

hello: $(VENV)/installed
	$(BIN)/twostep generate --stats "Why is the sky blue?"

build: $(VENV)/installed

test: $(VENV)/installed $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not models"

# Tests on larger models; skips models that are not in the cache. Takes minutes, and 10 GB of memory for the reference executor.
test-models: $(VENV)/installed $(VENV)/dev
	$(BIN)/python -m pytest -m models

bench-model: $(VENV)/installed
	$(BIN)/python -m benchmarks.model
	$(BIN)/python -m benchmarks.report

# Needs other engines; `.venv/bin/python -m benchmarks.peers_model --help` explains how to install them.
bench-peers-model: $(VENV)/installed
	$(BIN)/python -m benchmarks.peers_model $(addprefix --llama-dir ,$(LLAMA_DIR)) \
	  $(addprefix --openvino-python ,$(OPENVINO_PYTHON)) $(if $(LLAMA_VERSION),--llama-version "$(LLAMA_VERSION)")
	$(BIN)/python -m benchmarks.report

# Decode of one stream beside busy loops that it starts itself; less than three minutes without LLAMA_DIR.
bench-busy: $(VENV)/installed
	$(BIN)/python -m benchmarks.busy $(addprefix --llama-dir ,$(LLAMA_DIR)) \
	  $(if $(LLAMA_VERSION),--llama-version "$(LLAMA_VERSION)")
	$(BIN)/python -m benchmarks.report

# About a minute. Needs idle cores.
bench-calibration: $(VENV)/installed
	$(BIN)/python -m benchmarks.calibration
	$(BIN)/python -m benchmarks.report

bench-simulator: $(VENV)/installed
	$(BIN)/python -m benchmarks.simulator
	$(BIN)/python -m benchmarks.report

bench-scheduler: $(VENV)/installed
	$(BIN)/python -m benchmarks.scheduler
	$(BIN)/python -m benchmarks.report

# Measures Twostep, and other engines if given; see `.venv/bin/python -m benchmarks.batching --help`.
bench-batching: $(VENV)/installed
	$(BIN)/python -m benchmarks.batching $(addprefix --llama-dir ,$(LLAMA_DIR)) \
	  $(addprefix --openvino-python ,$(OPENVINO_PYTHON)) $(if $(LLAMA_VERSION),--llama-version "$(LLAMA_VERSION)")
	$(BIN)/python -m benchmarks.report

# About four minutes. Needs idle cores.
bench-serve: $(VENV)/installed
	$(BIN)/python -m benchmarks.serve
	$(BIN)/python -m benchmarks.report

# Installs other engines into $PEERS_FOLDER (default: ~/.cache/twostep/peers) unless paths are given. Building llama.cpp takes
# about 15 minutes, measuring another 20. Needs idle cores.
bench-peers: $(VENV)/installed
	$(BIN)/python -m benchmarks.peers_install $(if $(LLAMA_DIR),--without llama.cpp) \
	  $(if $(OPENVINO_PYTHON),--without OpenVINO) $(if $(VLLM_PYTHON),--without vLLM)
	$(BIN)/python -m benchmarks.peers_serving $(addprefix --llama-dir ,$(LLAMA_DIR)) \
	  $(if $(LLAMA_VERSION),--llama-version "$(LLAMA_VERSION)") $(addprefix --openvino-python ,$(OPENVINO_PYTHON)) \
	  $(addprefix --vllm-python ,$(VLLM_PYTHON))
	$(BIN)/python -m benchmarks.report

# Inter-token latency against its budget, and other engines if they are installed. With ITL="--only budgets-4" a part of it.
bench-itl: $(VENV)/installed
	$(BIN)/python -m benchmarks.itl $(addprefix --llama-dir ,$(LLAMA_DIR)) \
	  $(addprefix --openvino-python ,$(OPENVINO_PYTHON)) $(ITL)
	$(BIN)/python -m benchmarks.report

# This version beside another that is installed elsewhere: BASE=/path/to/python BASE_NAME="commit 1234567". About ten minutes.
bench-versions: $(VENV)/installed
	$(BIN)/python -m benchmarks.versions --base $(BASE) --base-name "$(BASE_NAME)"
	$(BIN)/python -m benchmarks.report

# Compares `twostep bench` with guidellm and aiperf; `.venv/bin/python -m benchmarks.clients --help` explains how to install them.
bench-clients: $(VENV)/installed
	$(BIN)/python -m benchmarks.clients $(addprefix --guidellm ,$(GUIDELLM)) $(addprefix --aiperf ,$(AIPERF)) \
	  $(addprefix --tokenizer ,$(TOKENIZER))
	$(BIN)/python -m benchmarks.report

report: $(VENV)/installed
	$(BIN)/python -m benchmarks.report

# Kernel self-test on an emulated AVX-512 CPU, for machines without AVX-512. The script prints what it needs.
check-avx512: $(VENV)/tools
	$(BIN)/cmake -S . -B build/selftest -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DCMAKE_EXE_LINKER_FLAGS=-static
	$(BIN)/cmake --build build/selftest --target twostep_selftest
	tools/emulate-avx512 build/selftest/twostep_selftest

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Build tools are installed in .venv and builds are not isolated, so that a changed source file recompiles alone.
$(VENV)/tools: pyproject.toml scripts/needs.py
	@$(PYTHON) scripts/needs.py
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) 2>/dev/null || $(PYTHON) -m virtualenv --quiet $(VENV)
	@echo "twostep: installing build tools into $(VENV) (about half a minute)"
	@$(PIP_INSTALL) 'scikit-build-core>=0.10' 'nanobind>=2.2' 'cmake>=3.15' ninja
	@touch $@

$(VENV)/installed: $(SOURCES) $(VENV)/tools
	@echo "twostep: compiling the kernels and installing into $(VENV) (about two minutes on two cores the first time)"
	@$(PIP_INSTALL) --no-build-isolation '.[structured]'
	@touch $@

$(VENV)/dev: pyproject.toml $(VENV)/installed
	@echo "twostep: installing linter, type checker and test tools into $(VENV) (about a minute)"
	@$(PIP_INSTALL) --no-build-isolation '.[dev]'
	@touch $@
