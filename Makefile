# `make demo` and `make test` are all the set-up there is: each prepares .venv in this folder first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The training run of the demo: small enough for two cores and three minutes.
DEMO_FLAGS ?= --steps 5000 --batch-size 128 --width 64 --layers 2 --heads 4 --context 3 --critic-width 64 \
  --lr 1e-3 --critic-lr 1e-3 --warmup 100 --dropout 0 --attention-dropout 0 --candidates 16
DEMO_LIMITS ?= 10 40 70

.PHONY: demo test test-slow golden lint format docs bench setup clean

setup: $(READY)

# Packages are installed again when the list of them changes; the sources are used where they lie.
$(READY): pyproject.toml src/qpt/cli/sims.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Python 3.11 or 3.12 is needed, not {v[0]}.{v[1]}; say which: make $(MAKECMDGOALS) PYTHON=python3.11")'
	@# Where venv comes without ensurepip (Debian), pip itself puts pip there.
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev,sims]'
	$(BIN)/qpt sims install all
	touch $@

# Train on the data that come with the package, then run the policy in the simulator at three cost limits.
demo: $(READY)
	rm -rf demo
	$(BIN)/qpt train --task BallCircle --data embedded:ballcircle --out demo/run $(DEMO_FLAGS)
	$(BIN)/qpt evaluate --checkpoint demo/run --task BallCircle --limits $(DEMO_LIMITS) --episodes 20 \
	  --out demo/episodes.csv --picture demo/plane.png

# Two processes of one thread each.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

# Make the golden traces anew (see CONTRIBUTING.md): without a change of the numbers the same files, byte for byte.
golden: $(READY)
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m golden.traces

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[docs]'
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

bench: $(READY)
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/sampling.py

clean:
	rm -rf $(VENV) demo dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
