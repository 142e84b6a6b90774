# make demo    a conversation moved between sessions, timed and verified
# make test    the short tier: what CI runs, under 10 minutes
# make help    the rest
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
SOURCES := pyproject.toml setup.py cuda_headers.py strata_copy.pyx $(wildcard include/*.h src/cudart/* src/host_runtime/* \
           src/strata_copy/*.pyx src/strata_copy/*.pxd)
PYX := strata_copy.pyx $(wildcard src/strata_copy/*.pyx)
LINTED := $(PYX) $(wildcard src/strata_copy/*.pxd bench/*/*.pyx bench/*/*.pxd tests/consumer/*.pyx examples/*/*/*.pyx examples/*/*/*.pxd)

.PHONY: help demo test test-full lint hints gpu gpu-test gpu-bench clean

help:
	@sed -n 's/^# make/make/p' $(MAKEFILE_LIST)

demo: $(VENV)/built
	$(RUN)/python -m strata_copy demo

test: $(VENV)/built
	$(RUN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not long"

# make test-full   everything, with the counts that are promised
test-full: $(VENV)/built
	$(RUN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --timeout=1800

# make lint    what CI checks besides the tests
lint: export PATH := $(CURDIR)/$(RUN):$(PATH)
lint: $(VENV)/built $(VENV)/linters hints
	$(RUN)/ruff check .
	$(RUN)/ruff format --check --quiet .
	$(RUN)/cython-lint $(LINTED)
	$(RUN)/codespell --skip '.venv,build,*.so,*.json' README.md CONTRIBUTING.md CHANGELOG.md docs src include tests bench examples strata_copy.pyx
	$(RUN)/mypy src/strata_copy
	$(RUN)/python -m mypy.stubtest strata_copy --allowlist tests/stubtest-allowlist.txt

# A performance hint is Cython saying that a nogil function takes the GIL to look for an exception.
hints: $(VENV)/linters
	@mkdir -p build/hints
	@for f in $(PYX); do \
	    $(RUN)/cython -3 $$(case $$f in *host_runtime.pyx) echo --cplus;; esac) -I src -I . --module-name strata_copy.$$(basename $$f .pyx | sed 's/^strata_copy$$/_core/') \
	        -X cdivision=True -X annotation_typing=False -o build/hints/$$(basename $$f).c $$f >build/hints/log 2>&1 || { cat build/hints/log; exit 1; }; \
	    if grep -q "performance hint" build/hints/log; then cat build/hints/log; exit 1; fi; \
	done; echo "no performance hints"

# make gpu     on a machine with CUDA 13, Cython, numpy, pytest and setuptools, without network: builds, tests, measures.
#              STRATA_COPY_COMMIT names what is measured; bench/results gets the figures. Nothing may skip.
#              `make gpu-test` and `make gpu-bench` are its halves. With pytest-xdist, PYTEST="-n 8 --dist loadfile -p no:benchmark"
#              makes the tests take a minute instead of seven. BENCHES="peers --no-long queueing" measures some: all take ten minutes.
gpu: gpu-test gpu-bench

gpu-test gpu-bench: export STRATA_COPY_RUNTIME := cuda
gpu-test gpu-bench: export PYTHONPATH := src:$(PYTHONPATH)
gpu-test:
	$(PYTHON) setup.py -q build_ext --inplace -j $(shell nproc)
	$(PYTHON) -m strata_copy info
	$(PYTHON) -m pytest -m "not long and not packaging" --no-skips -q $(PYTEST)
	$(PYTHON) -m strata_copy demo

gpu-bench:
	@test -n "$(STRATA_COPY_COMMIT)" || { echo "STRATA_COPY_COMMIT must name the commit that is measured"; exit 2; }
	$(PYTHON) setup.py -q build_ext --inplace -j $(shell nproc)
	sh bench/gpu.sh $(BENCHES)

clean:
	rm -rf build $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests bench examples -name '*.so' -delete
	rm -rf examples/engine_loop/build

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/built: $(VENV)/bin/python $(SOURCES)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

$(VENV)/linters: $(VENV)/bin/python pyproject.toml
	$(RUN)/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -c "import re,sys; \
	    print(' '.join(re.findall(r'\"([^\"]+)\"', re.search(r'^lint = \[(.*?)\]', open('pyproject.toml').read(), re.M).group(1))))") "cython>=3.1"
	@touch $@
