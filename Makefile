# `make demo` and `make test` need nothing but Python 3.10 or later.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test quality bundled clean

demo: $(INSTALLED)
	$(RUN)/eagle-fsd generate --show-origins "At the museum, Mia buys 4 boxes with 6 pencils in every box. Then Mia gives 5 pencils to Tom. How many pencils are left in the end?"

test: $(INSTALLED)
	$(RUN)/python -m pytest -m "not slow"

quality: $(INSTALLED)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

# Everything the virtual environment holds follows from these two files.
$(INSTALLED): requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --upgrade pip
	$(RUN)/python -m pip install --quiet -r requirements.txt
	$(RUN)/python -m pip install --quiet --no-deps --editable .
	touch $@

# Train the pair that ships with the package from nothing; see eagle_fsd/train/recipes/bundled.py.
bundled: $(INSTALLED)
	$(RUN)/python -m eagle_fsd.train.recipes.bundled --stage target --stage head
	$(RUN)/eagle-fsd calibrate --max-drop 1 --count 2000 --batch 16 --install
	$(RUN)/python -m eagle_fsd.train.recipes.bundled --stage card

clean:
	rm -rf $(VENV) *.egg-info
