"""A contributor's clone: a method, a benchmark and a study page, written as our pages say, pass what is asked."""

import ast
import json
import os
import re
import shutil
import sys

import pytest
from conftest import ROOT, without_library

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


ROW = """  tint: {form: "one right text, one wrong", chance: "50", tested: miniature, files: pairs.json, size: 2 items,
    items: [2], home: example.org, licence: CC0}
"""
USE = """from c2lip.lab.evaluation.suites import READERS, Request, suite_table
assert list(READERS) == list(suite_table())
try:
    READERS["tint"](Request(".", "tint"))
except Exception as e:
    assert "it should hold pairs.json; from example.org" in str(e), e
else:
    raise AssertionError"""


def add_benchmark(clone):
    "The reader that the page of suites shows, under a name of its own: a line in a room's table, and a row of suites"
    (cell,) = [code for code in code_of("5_evaluation/11_suites") if "def read_shade" in code]
    (reader,) = [node for node in ast.parse(cell).body if getattr(node, "name", "") == "read_shade"]
    reader = ast.get_source_segment(cell, reader).replace("shade", "tint")

    room = clone / "nbs" / "5_evaluation" / "07_composition.ipynb"
    page = json.loads(room.read_text(encoding="utf8"))
    for cell in page["cells"]:
        code = "".join(cell["source"])
        if "COMPOSITION = {" in code:
            code = code.replace("export\n", "export\nfrom c2lip.lab.evaluation.base import find_image\n\n", 1)
            code = code.replace("COMPOSITION = {", f'{reader}\n\n\nCOMPOSITION = {{\n    "tint": read_tint,')
            cell["source"] = code.splitlines(True)
    room.write_text(json.dumps(page), encoding="utf8")
    with (clone / "data" / "suites.yaml").open("a", encoding="utf8") as file:
        file.write(ROW)


PAGE = [
    "# What did the default run change?\n\n> A question, and the record that answers it.",
    "from c2lip.lab.evaluation.results import read_record",
    'trials = read_record("default")\nassert len(trials)\ntrials.head()',
]


@pytest.mark.timeout(3600)  # a minute; many of a busy machine
def test_a_stranger_is_welcome(tmp_path, run):
    here = tmp_path / "clone"
    shutil.copytree(ROOT, here, ignore=LEFT_OUT)
    pages = {"3_relatives/90_uniformity": lesson(), "9_study/90_stranger": PAGE}
    for name, cells in pages.items():
        (here / "nbs" / f"{name}.ipynb").write_text(notebook(cells), encoding="utf8")
    add_benchmark(here)
    tests = here / "tests" / "test_methods.py"
    tests.write_text(re.sub(r"(METHODS = .*?)(?=\".split)", r"\1 uniformity", tests.read_text()), encoding="utf8")

    env = {"PYTHONPATH": os.pathsep.join([str(here / "tests" / "offline"), str(here)])}
    env |= {"C2LIP_WALLS": "", "C2LIP_REFUSED": str(tmp_path / "refused")}
    (tmp_path / "refused").touch()  # the session of tests reads and deletes it
    tests = "tests/test_gates.py tests/test_methods.py -k".split() + ["test_gates or (bfloat16 and uniformity)"]
    for words, forks in (
        ([sys.executable, "-c", "from c2lip.lab.dev.upkeep import tidy; tidy()"], without_library()),
        *((["nbdev-test", f"nbs/{name}.ipynb"], without_library()) for name in [*pages, "5_evaluation/07_composition"]),
        ([sys.executable, "-c", USE], without_library()),
        ([sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *tests], {"C2LIP_FORKS": ""}),
    ):
        done = run(*words, cwd=here, env=env | forks, timeout=900)
        assert done.returncode == 0, done.out[-4000:]
    assert "uniformity" in done.out and "test_nothing_lags_behind" in done.out
    assert (here / "c2lip" / "lab" / "relatives" / "uniformity.py").is_file()
