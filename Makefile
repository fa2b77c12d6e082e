# Every target works on a fresh machine: it makes .venv and installs what it needs (torch 2.13.0: any build, no GPU is used).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
EXTRA := .venv-extra
EXTRA_STAMP := $(EXTRA)/.installed
EXTRA_PYTEST := $(EXTRA)/bin/python -m pytest -n 2 --dist loadfile
SITE := import site; print(site.getsitepackages()[0])
VGPU := .venv-vgpu
VGPU_STAMP := $(VGPU)/.installed

.PHONY: demo test unit conformance extra lint types contracts wheel bench accuracy vgpu vgpu-truth format clean

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[hf,deepspeed,test,lint]'
	touch $(STAMP)

demo: $(STAMP)  ## a job that would die, with what would help; then one that fits
	@cd examples/llama31-8b-deepspeed-auto && echo "$$ launchguard check -- $$(cat command.txt)" && \
	  { ../../$(BIN)/launchguard check -- $$(cat command.txt); test $$? -eq 1; }
	@echo
	@cd examples/llama13b-zero3 && echo "$$ launchguard check -- $$(cat command.txt)" && \
	  ../../$(BIN)/launchguard check -- $$(cat command.txt)

test: $(STAMP)  ## all tests
	$(PYTEST) tests

unit: $(STAMP)  ## everything but the comparisons with real frameworks
	$(PYTEST) tests --ignore tests/conformance

$(EXTRA_STAMP): $(STAMP)  # over .venv: what .[conformance] names, one by one; the tests of a library that cannot be had are skipped
	test -x $(EXTRA)/bin/python || $(PYTHON) -m venv $(EXTRA)
	$(BIN)/python -c "$(SITE)" > "$$($(EXTRA)/bin/python -c "$(SITE)")/venv.pth"
	for name in 'bitsandbytes>=0.49' 'torchao>=0.10' 'schedulefree>=1.4' grokadamw torch-optimi lomo-optim \
	  'liger-kernel>=0.8'; do \
	  $(EXTRA)/bin/pip install --quiet --no-deps "$$name" || echo "$$name cannot be had here: its tests are skipped"; done
	touch $(EXTRA_STAMP)

conformance: $(EXTRA_STAMP)  ## the real libraries, with the table of residuals
	$(EXTRA_PYTEST) tests/conformance

extra: $(EXTRA_STAMP)  ## what needs bitsandbytes, another library's optimizers or Liger
	$(EXTRA_PYTEST) tests/conformance/test_optimizers.py tests/conformance/test_quantisation.py tests/conformance/test_peft.py tests/trace/test_liger.py

lint: $(STAMP)  ## style, types, import contracts
	$(BIN)/ruff check launchguard integrations tests examples
	$(BIN)/ruff format --check launchguard integrations tests examples
	$(BIN)/mypy --no-incremental
	$(BIN)/lint-imports

wheel: $(STAMP)  ## build the wheel and try it without torch in an environment of its own
	rm -rf dist build/wheel-venv
	$(BIN)/python -m build --wheel --outdir dist . >/dev/null
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/pip install --quiet dist/*.whl
	$(BIN)/python tests/check_wheel.py dist build/wheel-venv

bench: $(STAMP)  ## speed, each time as a ratio to what it cannot avoid
	$(BIN)/python tests/benchmarks/speed.py

accuracy: $(STAMP)  ## error on the measured cases
	$(BIN)/python tests/benchmarks/accuracy.py tests/measured/vgpu_dev.yaml tests/measured/cases_dev.yaml

$(VGPU_STAMP): $(STAMP)  # a CUDA build of torch, none of the nvidia wheels, and the libraries of .venv
	test -x $(VGPU)/bin/python || $(PYTHON) -m venv $(VGPU)
	$(VGPU)/bin/pip install --quiet --no-deps torch==2.14.1 triton bitsandbytes
	mkdir -p build && $(BIN)/pip freeze --exclude-editable | grep -v '^torch[ =]' > build/vgpu-requirements.txt
	$(VGPU)/bin/pip install --quiet --no-deps -r build/vgpu-requirements.txt
	touch $(VGPU_STAMP)

vgpu: $(VGPU_STAMP)  ## rehearsals on virtual cards: a second environment with a CUDA build of torch, no GPU
	$(PYTEST) tests/rehearsal

vgpu-truth: $(VGPU_STAMP)  ## every recorded virtual-card run again, through `launchguard rehearse`, to the byte (half an hour)
	$(BIN)/python tests/benchmarks/rehearsal.py --python $(VGPU)/bin/python tests/measured/vgpu_dev.yaml

format: $(STAMP)
	$(BIN)/ruff check --fix launchguard integrations tests examples
	$(BIN)/ruff format launchguard integrations tests examples

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache *.egg-info
