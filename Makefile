# Needs Python 3.11 or newer, git and make; everything else goes into .venv. uv installs it: the machine's, or else pip
# brings it. TORCH=cpu takes torch's CPU wheels, from torch's own index (not tested: we could not reach that index).
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
HEART  := $(VENV)/heart/.installed
OUTSIDE := $(VENV)/outside/.installed
SITE   := $(VENV)/site/.installed
FOLDER ?= exercises
FINDPY := for p in $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python); do \
          $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done
# or a script beside a clone called c2lip imports that folder
COMPAT := --config-settings editable_mode=compat
export TORCH
# uv does not compile: a minute saved. The first import writes the bytecode of what it needs, also where the user's shell
# forbids it; what the shell adds to every Python is of other projects
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME

# $(call environment,FOLDER): a Python with pip, also where making it was interrupted
define environment
	@if ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
	  py=`$(FINDPY)`; \
	  if test -n "$$py"; then echo "c2lip: making $(1) with `$$py --version`"; $$py -m venv $(1); \
	  elif test -z "$(PYTHON)" && command -v uv >/dev/null; then echo "c2lip: making $(1) with uv"; uv venv -q --allow-existing --seed --python 3.11 $(1); \
	  else echo "c2lip: no Python 3.11 or newer with venv and ensurepip was found; install one (Debian: python3-venv) or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	  fi; \
	fi
endef

.DEFAULT_GOAL := help
.PHONY: help install heart train test quick outside lab notebooks outputs site pictures exercises solved clean

help:             ## say what can be made
	@sed -n 's/^\([a-z]*\): *[^#]*## */  make \1	/p' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with the tested versions (about 6 GB)

$(STAMP): settings.ini setup.py pyproject.toml constraints.txt
	$(call environment,$(VENV))
	@echo "c2lip: installing the packages of constraints.txt into $(VENV) (about 6 GB, a minute or some)"
	@$(BIN)/python docs/install.py $(BIN)/python -c constraints.txt -e '.[dev]' $(COMPAT)
	@ln -sf nbdev-test $(BIN)/nbdev_test  # its name before nbdev 3
	@touch $@

heart: $(HEART)   ## make .venv/heart: the method alone, for a loop of your own

$(HEART): settings.ini setup.py pyproject.toml constraints.txt
	$(call environment,$(VENV)/heart)
	@echo "c2lip: installing the heart's packages into $(VENV)/heart"
	@$(VENV)/heart/bin/python docs/install.py $(VENV)/heart/bin/python -c constraints.txt -e . $(COMPAT)
	@touch $@

train: $(STAMP)   ## the main job, nbs/train.ipynb (ARGS="-p epochs 2" adds)
	@$(BIN)/papermill nbs/train.ipynb $(ARGS)
	@echo "c2lip: for c2lip and papermill in this terminal: . $(BIN)/activate"

test: $(STAMP)    ## every notebook and test, offline (ARGS="-k losses" chooses)
	@$(BIN)/python -m pytest -n auto $(ARGS)

quick: $(STAMP)   ## gates and fast tests
	@$(BIN)/python -m pytest -n auto -m quick $(ARGS)

outside: $(OUTSIDE) ## other people's evaluation code, for tests/outside

$(OUTSIDE): $(STAMP) tests/outside/requirements.txt
	@echo "c2lip: making $(VENV)/outside"
	@$(BIN)/python -m venv --clear --without-pip $(VENV)/outside
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
	  `$(VENV)/outside/bin/python -c 'import site; print(site.getsitepackages()[0])'`/shared.pth
	@$(BIN)/python docs/install.py $(VENV)/outside/bin/python --no-deps -r tests/outside/requirements.txt
	@touch $@

lab: $(STAMP)     ## open the notebooks in JupyterLab
	@echo "c2lip: what you run is saved into nbs/; git restore nbs brings the stored pages back"
	@$(BIN)/jupyter-lab --ServerApp.root_dir=$(CURDIR) nbs/index.ipynb

notebooks: $(STAMP) ## before a commit: ruff, export, clean, README.md
	@$(BIN)/python -c 'from c2lip.lab.dev.upkeep import tidy; tidy()'

outputs: $(STAMP) ## run notebooks and store what they show (ARGS="train rooms")
	@$(BIN)/python -c 'import sys; from c2lip.lab.dev.upkeep import store_outputs; store_outputs(sys.argv[1:])' $(ARGS)

site: $(SITE)     ## the book, with search, and a page that runs two models: _site/html/index.html
	@$(VENV)/site/bin/python docs/build.py _site

$(SITE): $(STAMP) docs/requirements.txt
	@echo "c2lip: making $(VENV)/site"
	@$(BIN)/python -m venv --clear --without-pip $(VENV)/site
	@$(BIN)/python docs/install.py $(VENV)/site/bin/python -r docs/requirements.txt
	@touch $@

pictures: $(STAMP) ## the page docs/maps.html, and of it README's moving picture and a preview for links (needs Chromium)
	@$(BIN)/python docs/page.py docs/maps.html
	@$(BIN)/python docs/pictures.py docs/maps.html

exercises: $(STAMP) ## rooms without bodies, for you to fill in (FOLDER=my_exercises)
	@$(BIN)/python docs/exercises.py make $(FOLDER)

solved: $(STAMP)  ## which of your exercises pass
	@$(BIN)/python docs/exercises.py check $(FOLDER)

clean:            ## remove .venv and what tools leave behind; runs/ stays
	rm -rf $(VENV) c2lip.egg-info .pytest_cache .ruff_cache _proc _docs _site build dist
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
