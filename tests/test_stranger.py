"""A contributor's clone: a method, a benchmark and a study page, written as our pages say, pass what is asked."""

import ast
import json
import os
import re
import shutil
import sys

import pytest
from conftest import ROOT

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "runs", "cache", "__pycache__", "_site", "*.egg-info")


def notebook(cells):
    "A notebook of Markdown and of code, whose cells begin with another sign than #"
    kinds = ["markdown" if re.match("# |>", text) else "code" for text in cells]
    made = [{"cell_type": kind, "metadata": {}, "source": text} for kind, text in zip(kinds, cells)]
    made = [cell | {"id": f"stranger{number}"} for number, cell in enumerate(made)]
    outputs = {"outputs": [], "execution_count": None}
    made = [cell | outputs if cell["cell_type"] == "code" else cell for cell in made]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def code_of(room):
    cells = json.loads((ROOT / "nbs" / f"{room}.ipynb").read_text(encoding="utf8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def lesson():
    "The cells of *Write your own method*, the three exported that the page names, without its module by hand"
    imports, examples, potential, check, method, _ = code_of("3_relatives/07_your_own")
    exported = [f"#| export\n{code}" for code in (imports, potential, method)]
    begin, end = "#| default_exp lab.relatives.uniformity", "import nbdev\n\nnbdev.nbdev_export()"
    return [begin, "# Uniformity\n\n> A method.", exported[0], examples, exported[1], check, exported[2], end]


def benchmark():
    "The reader that the page of suites shows, read by name"
    (cell,) = [code for code in code_of("5_evaluation/11_suites") if "def read_shade" in code]
    (reader,) = [node for node in ast.parse(cell).body if getattr(node, "name", "") == "read_shade"]
    imports = "from c2lip.lab.evaluation.base import Item, NotHere, Request, find_image, read_entries, require_files"
    imports += (
        "\nfrom c2lip.lab.evaluation.choices import choice_suite\nfrom c2lip.lab.evaluation.suites import READERS"
    )
    use = """READERS["shade"] = read_shade
try:
    READERS["shade"](Request(project_root() / "nowhere", "shade"))
except NotHere as e:
    print(e)"""
    imports += "\nfrom c2lip.core.files import project_root"
    return ["# Shade\n\n> A benchmark.", imports, ast.get_source_segment(cell, reader), use]


PAGE = [
    "# What did the default run change?\n\n> A question, and the record that answers it.",
    "from c2lip.lab.evaluation.results import read_record",
    'trials = read_record("default")\nassert len(trials)\ntrials.head()',
]


@pytest.mark.timeout(3600)  # a minute; many of a busy machine
def test_a_stranger_is_welcome(tmp_path, run):
    here = tmp_path / "clone"
    shutil.copytree(ROOT, here, ignore=LEFT_OUT)
    pages = {"3_relatives/90_uniformity": lesson(), "5_evaluation/90_shade": benchmark(), "9_study/90_stranger": PAGE}
    for name, cells in pages.items():
        (here / "nbs" / f"{name}.ipynb").write_text(notebook(cells), encoding="utf8")
    tests = here / "tests" / "test_methods.py"
    tests.write_text(re.sub(r"(METHODS = .*?)(?=\".split)", r"\1 uniformity", tests.read_text()), encoding="utf8")

    env = {"PYTHONPATH": os.pathsep.join([str(here / "tests" / "offline"), str(here)])}
    env |= {"C2LIP_FORKS": "", "C2LIP_WALLS": "", "C2LIP_REFUSED": str(tmp_path / "refused")}
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    for words in (
        [sys.executable, "-P", "-c", "from c2lip.lab.dev.upkeep import tidy; tidy()"],
        *(["nbdev-test", f"nbs/{name}.ipynb"] for name in pages),
        [*pytest_, "tests/test_gates.py", "-k", "not lags"],  # what lags behind, tidy has just made
        [*pytest_, "tests/test_methods.py", "-k", "bfloat16 and uniformity"],
    ):
        (tmp_path / "refused").touch()  # a session of tests reads and deletes it
        done = run(*words, cwd=here, env=env, timeout=900)
        assert done.returncode == 0 and "no tests ran" not in done.out, done.out[-4000:]
    assert (here / "c2lip" / "lab" / "relatives" / "uniformity.py").is_file()
