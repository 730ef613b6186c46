# Needs Python 3.11 or newer, git and make; everything else goes into .venv.
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OUTSIDE := $(VENV)/outside/.installed
SITE   := $(VENV)/site/.installed
FOLDER ?= exercises
FINDPY := for p in $(or $(PYTHON),python3.11 python3.12 python3.13 python3 python); do \
          $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done

.DEFAULT_GOAL := help
.PHONY: help install train test quick outside lab app notebooks outputs site exercises solved clean

help:             ## say what can be made
	@sed -n 's/^\([a-z]*\): *[^#]*## */  make \1	/p' $(MAKEFILE_LIST)

install: $(STAMP) ## make .venv with the tested versions (about 6 GB)

$(STAMP): settings.ini setup.py pyproject.toml constraints.txt
	@if ! test -x $(BIN)/python; then \
	  py=`$(FINDPY)`; \
	  if test -z "$$py"; then \
	    echo "c2lip: no Python 3.11 or newer with venv and ensurepip was found; install one (Debian: python3-venv) or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	  fi; \
	  echo "c2lip: making $(VENV) with `$$py --version`"; $$py -m venv $(VENV); \
	fi
	@echo "c2lip: installing the packages of constraints.txt into $(VENV) (about 6 GB, some minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]' \
	  --config-settings editable_mode=compat # or a script beside a clone called c2lip imports that folder
	@touch $@

train: $(STAMP)   ## the main job, nbs/train.ipynb (ARGS="-p epochs 2" adds)
	@$(BIN)/papermill nbs/train.ipynb $(ARGS)

test: $(STAMP)    ## every notebook and test, offline (ARGS="-k losses" chooses)
	@$(BIN)/python -m pytest -n auto $(ARGS)

quick: $(STAMP)   ## gates and fast tests
	@$(BIN)/python -m pytest -n auto -m quick $(ARGS)

outside: $(OUTSIDE) ## other people's evaluation code, for tests/outside

$(OUTSIDE): $(STAMP) tests/outside/requirements.txt
	@echo "c2lip: making $(VENV)/outside"
	@$(BIN)/python -m venv --clear $(VENV)/outside
	@$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > \
	  `$(VENV)/outside/bin/python -c 'import site; print(site.getsitepackages()[0])'`/shared.pth
	@$(VENV)/outside/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r tests/outside/requirements.txt
	@touch $@

lab: $(STAMP)     ## open the notebooks in JupyterLab
	@$(BIN)/jupyter-lab nbs/index.ipynb

app: $(STAMP)     ## open the attention explorer as a page of its own
	@$(BIN)/voila nbs/explore.ipynb $(ARGS)

notebooks: $(STAMP) ## before a commit: ruff, export, clean, README.md
	@$(BIN)/python -c 'from c2lip.lab.dev.upkeep import tidy; tidy()'

outputs: $(STAMP) ## run notebooks and store what they show (ARGS="train rooms")
	@$(BIN)/python -c 'import sys; from c2lip.lab.dev.upkeep import store_outputs; store_outputs(sys.argv[1:])' $(ARGS)

site: $(SITE)     ## the book, with search, and a page that runs two models: _site/html/index.html
	@$(VENV)/site/bin/python docs/build.py _site
	@$(BIN)/python docs/page.py _site/html/maps.html

$(SITE): $(STAMP) docs/requirements.txt
	@echo "c2lip: making $(VENV)/site"
	@$(BIN)/python -m venv --clear $(VENV)/site
	@$(VENV)/site/bin/python -m pip install -qq --disable-pip-version-check -r docs/requirements.txt
	@touch $@

exercises: $(STAMP) ## rooms without bodies, for you to fill in (FOLDER=my_exercises)
	@$(BIN)/python docs/exercises.py make $(FOLDER)

solved: $(STAMP)  ## which of your exercises pass
	@$(BIN)/python docs/exercises.py check $(FOLDER)

clean:            ## remove .venv and what tools leave behind; runs/ stays
	rm -rf $(VENV) c2lip.egg-info .pytest_cache .ruff_cache _proc _docs _site build dist
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
