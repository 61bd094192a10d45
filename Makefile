# make demo    train, evaluate and draw on the generated data set; everything is set up first
# make test    run the tests, in two processes, without the slow ones; PYTEST_ARGS=… for pytest's
#              own arguments, such as PYTEST_ARGS='-m slow'
# make gpu     measure what the layer costs on this machine's GPU, in six minutes; GPU_ARGS=… for
#              the report's arguments, such as GPU_ARGS='--minutes 10' or GPU_ARGS=--rehearse
# make setup   only make or renew .venv
# make lint    check formatting and lint

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test gpu setup lint

demo: $(VENV)/.ready
	$(BIN)/python tools/demo.py

test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(PYTEST_ARGS)

gpu: $(VENV)/.ready
	$(BIN)/python tools/gpu_report.py $(GPU_ARGS)

lint: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

setup: $(VENV)/.ready

# Made anew when the requirements change. Detectron2's wheel is unpacked beside the environment
# first: its compiled part is for another Python, and its top-level "tools" would shadow ours, and
# so stay outside the search path, for the tests.
$(VENV)/.ready: requirements.txt requirements-detectron2.txt requirements-robustness.txt setup.py
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --progress-bar off -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --progress-bar off --no-deps \
		-r requirements-robustness.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --progress-bar off --require-hashes \
		--no-deps --only-binary=:all: --python-version 3.10 --target $(VENV)/unpacked \
		-r requirements-detectron2.txt
	rm -f $(VENV)/unpacked/detectron2/_C*.so
	mv $(VENV)/unpacked/detectron2 $(VENV)/unpacked/sal_detectron2-*.dist-info \
		"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	mv $(VENV)/unpacked/tools $(VENV)/detectron2_tools
	rm -r $(VENV)/unpacked
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@
