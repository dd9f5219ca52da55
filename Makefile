# Two commands: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
LIBRARIES := $(VENV)/libraries
# a worker that has nothing left takes tests from the others
WORKERS := -n auto --dist worksteal

.PHONY: demo test checks lint types layers unit variants fuzz libraries bench docs clean

demo: $(VENV)/.installed
	$(BIN)/stairwise demo

# what needs one core each is done at the same time
test: $(VENV)/.dev
	$(MAKE) --jobs 2 checks $(VENV)/.libraries
	$(MAKE) unit libraries

checks: lint types layers

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev
	$(BIN)/lint-imports

unit: $(VENV)/.dev
	$(BIN)/pytest $(WORKERS) -m "not libraries"

# the suite on a CPU without AVX-512, with one and two threads; warnings are errors in all of them. Not a part of CI.
variants: $(VENV)/.dev
	for isa in AVX2 DEFAULT; do for threads in 1 2; do \
		echo "ONEDNN_MAX_CPU_ISA=$$isa OMP_NUM_THREADS=$$threads"; \
		ONEDNN_MAX_CPU_ISA=$$isa OMP_NUM_THREADS=$$threads $(BIN)/pytest $(WORKERS) -m "not libraries" -W error \
			-W ignore::stairwise.checks.TheoryWarning || exit 1; \
	done; done

N ?= 1000
LINES ?= 200
FAULTS ?= 200
SEED ?= 0
fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --n $(N) --lines $(LINES) --faults $(FAULTS) --seed $(SEED)

libraries: $(VENV)/.libraries
	$(LIBRARIES)/bin/python -m pytest $(WORKERS) -m libraries tests/monitor tests/test_examples.py

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/bench_linear.py

PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# pip would compile on one core; some packages ship files that do not compile
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true

# pip, because a set-up that was cut off may have left python without it
$(BIN)/pip:
	$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed: make PYTHON=python3.12' if sys.version_info < (3, 11) else 0)"
	$(PYTHON) -m venv $(VENV)

# one of the following two at a time: both install into the same environment
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) --editable .
	$(COMPILE)
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) --editable '.[dev]'
	$(COMPILE)
	touch $(VENV)/.installed $@

# Libraries of others go into an environment on top of .venv. It holds what .venv lacks, and .venv stays as it is: PyPI's
# torchvision cannot be imported next to a torch without CUDA, and then Lightning cannot be imported either.
$(VENV)/.libraries: $(VENV)/.dev
	$(BIN)/python -m venv --without-pip $(LIBRARIES)
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
		> $$($(LIBRARIES)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth
	$(BIN)/pip --python $(LIBRARIES)/bin/python install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt 'stairwise[libraries]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info demo results runs site
