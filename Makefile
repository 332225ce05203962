# `make` alone lists what there is.
#
# Paths are relative, and everything installed is run as `.venv/bin/python -m ...`, because the first line of an
# installed script breaks when the path of the checkout holds a space.

PY := .venv/bin/python
ARGS ?=
export CHAPTER
# The tests start a hundred processes: let them find the course compiled (make clean removes it).
unexport PYTHONDONTWRITEBYTECODE
# Jupyter refuses to run as root (as in a container) unless it is told to.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# As many processes as tests/processes.py says; loadfile keeps the cells of one notebook together and in order.
SUITE := -m pytest -n auto --dist loadfile --nbval-lax --nbval-current-env --nbval-cell-timeout=300
# $(call tested,python): run the tests of one chapter, or all; tests/chapters.py knows which those are.
tested = files=$$($(1) tests/chapters.py "$$CHAPTER") && $(1) $(SUITE) $$files $(ARGS)

.PHONY: help lab test bench generate site notebooks lint browser-test site-test cards mutations test-latest pins clean

help:
	@echo 'make lab           open the course in JupyterLab (the first time: make .venv and install)'
	@echo 'make test          run every test, notebooks included; CHAPTER=07 for those of one chapter'
	@echo 'make bench         measure every kernel on this machine'
	@echo 'make generate      let a small language model write; MODEL=mamba2 or a folder of yours, PROMPT="..." to begin with'
	@echo 'make site          build the course as web pages, in build/site; REPOSITORY=owner/name links them to GitHub'
	@echo
	@echo 'for authors:'
	@echo 'make notebooks     write exercises/ from solutions/, then run all notebooks and store their outputs'
	@echo 'make lint          check style and layout with ruff'
	@echo 'make browser-test  use three chapters and an exercise in JupyterLab, in a browser'
	@echo 'make site-test     look at every page of the site in a browser: links, pictures, formulas, accessibility'
	@echo 'make cards         compile every kernel for every card; ARGS="sm_75 gemv/" for some'
	@echo 'make mutations     plant known mistakes in a copy, one after another: does a test see each?'
	@echo 'make test-latest   run the tests with the newest version of everything, in .venv-latest'
	@echo 'make pins          upgrade everything, write constraints.txt, test'
	@echo 'make clean         remove .venv, .venv-latest, .venv-site, caches and everything built'
	@echo
	@echo 'ARGS="..." is passed on, as in  make lab ARGS=--no-browser  or  make test ARGS="-k gemv"'
	@echo 'PYTHON=... names the Python to use, 3.11 or newer'

# $(call ready,lab,options): find a Python that really runs (a pyenv shim may exist and yet fail) and is new
# enough, then let lab/bootstrap.py complete .venv. The second time this takes a fraction of a second.
define ready
@if [ -n "$$PYTHON" ]; then set -- "$$PYTHON"; else set -- python3 python3.13 python3.12 python3.11; fi; \
found=; \
for p do \
	if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
		exec "$$p" lab/bootstrap.py --for $(1) $(2); \
	fi; \
	version=$$("$$p" -V 2>/dev/null) || version='does not run'; \
	found="$$found$${found:+, }$$p ($$version)"; \
done; \
echo "make $(1) expected Python 3.11 or newer and found $$found: install one," \
	"or name it with  make $(1) PYTHON=/path/to/python3" >&2; \
exit 1
endef

lab:
	$(call ready,lab)
	$(PY) -m jupyterlab $(AS_ROOT) --LabApp.default_url=/lab/tree/notebooks/01_roofline.ipynb $(ARGS)

test:
	$(call ready,test)
	$(call tested,$(PY))

bench:
	$(call ready,bench)
	$(PY) -m kernels.bench $(ARGS)

export MODEL PROMPT
generate:
	$(call ready,generate)
	$(PY) -m models.generate "$${MODEL:-models/small}" --prompt "$${PROMPT:-A warp reads}" $(ARGS)

export REPOSITORY
site:
	$(call ready,site,--site site)
	.venv-site/bin/python -m book $(if $(REPOSITORY),--repository "$$REPOSITORY") $(ARGS)

notebooks:
	$(call ready,notebooks)
	$(PY) -m lab.notebooks strip $(ARGS)
	$(PY) -m lab.notebooks execute $(ARGS)
	$(PY) -m lab.notebooks check $(ARGS)

lint:
	$(call ready,lint)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# Playwright drives the Chromium of the machine. Where one of the two is not to be had, the tests are skipped and say why.
browser-test:
	$(call ready,browser-test)
	@$(PY) -c 'import playwright' 2>/dev/null || $(PY) -m pip install -q -c constraints.txt -e '.[browser]' || true
	$(PY) -m pytest tests/browser.py $(ARGS)

# The Chromium of the machine, as above.
site-test:
	$(call ready,site-test,--site site site-test)
	.venv-site/bin/python -m book
	.venv-site/bin/python -m pytest --noconftest -q tests/site_pages.py $(ARGS)

# ARGS="sm_75 gemv/": for these architectures, sources with this in their names.
cards:
	$(call ready,cards)
	$(PY) -m tests.every_card $(ARGS)

# ARGS="PDL ring": those with one of these words in their names.
mutations:
	$(call ready,mutations)
	$(PY) -m tests.mutations $(ARGS)

# No constraints: whatever pyproject.toml allows, as new as pip finds it today.
test-latest:
	$(call ready,test-latest,--latest)
	$(call tested,.venv-latest/bin/python)

pins:
	$(call ready,pins,--pins)
	$(call ready,pins,--pins --site site site-test)
	$(MAKE) test

clean:
	rm -rf .venv .venv-latest .venv-site .venv.lock .build build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
	find . -name .ipynb_checkpoints -prune -exec rm -rf {} +
