"""README.md says what the records say: its sentences are free, its figures are drawn from data/ when it is made."""

import ast
import re
from pathlib import Path

import pytest

from c2lip.core.files import read_json
from c2lip.workshop.readme import readme

ROOT = Path(__file__).resolve().parents[1]
CELLS = [cell for cell in read_json(ROOT / "nbs" / "index.ipynb")["cells"] if "".join(cell["source"]).strip()]
# what no record knows: the oldest Python, the name of the licence, the width of an interval
TYPED = {"3.11", "2.0", "95 ", "2603.25722"}
FIGURE = re.compile(r"\d+\.\d+|\d[\d,]* (?=points|seeds|steps|images|%)|[+-]\d+ (?=points)")


def is_code(cell):
    return cell["cell_type"] == "code" and "nbdev_export" not in "".join(cell["source"])


def shown(cell, names):
    "What the last line of a code cell is, after the lines before it"
    lines = ast.parse("".join(cell["source"])).body
    exec(compile(ast.Module(lines[:-1], []), "index", "exec"), names)
    assert isinstance(lines[-1], ast.Expr), "a cell of the index ends with what it shows"
    return eval(compile(ast.Expression(lines[-1].value), "index", "eval"), names)


@pytest.fixture(scope="module")
def made():
    "[(cell, the markdown that it makes from the records as they are now)] of the index's code cells"
    names = {}
    return [(cell, shown(cell, names).data) for cell in CELLS if is_code(cell)]


def test_figures_are_those_of_the_records(made):
    "Every cell still makes what is stored; a claim that a record no longer bears out is a ValueError"
    assert len(made) >= 6
    for cell, markdown in made:
        (stored,) = cell["outputs"]
        assert "".join(stored["data"]["text/markdown"]) == markdown, "`make outputs ARGS=index` is due"


def test_no_figure_is_typed():
    "Neither in markdown nor in the texts of code cells: a number of points, seeds, steps or images, or a decimal"
    for cell in CELLS:
        source = "".join(cell["source"])
        texts = [re.sub(r"```.*?```", "", source, flags=re.S)]
        if cell["cell_type"] == "code":
            texts = [
                n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and type(n.value) is str
            ]
        found = {figure for text in texts for figure in FIGURE.findall(text)} - TYPED
        assert not found, f"typed by hand: {found}"
    assert FIGURE.findall("8 points, 71.7, 8,600 images and 5 seeds") == ["8 ", "71.7", "8,600 ", "5 "]


def test_the_page_says_what_holds_and_what_does_not(made):
    "Of both there is a paragraph, with the benchmarks on which the paper rests"
    page = readme(ROOT)
    assert page == (ROOT / "README.md").read_text(encoding="utf8")
    assert page.index("**What appears.**") < page.index("**What does not.**")
    against = page.split("**What does not.**")[1].split("\n\n")[0]
    assert "SugarCrepe++" in against and "in the paper" in against and "held-out" in against
    assert "**For whom.**" in page and "c2lip list methods" in page


def test_every_expectation_is_on_the_page(made):
    "Those of data/expected.yaml, decided or not"
    import yaml

    asked = yaml.safe_load((ROOT / "data" / "expected.yaml").read_text(encoding="utf8"))
    (said,) = [markdown for _, markdown in made if "Undecided" in markdown]
    rows = [line for line in said.splitlines() if line.startswith("| ") and "± " in line]
    assert rows and said.count("≥") == len(asked)
    for *_, expected in asked:
        assert f"≥ {expected:+g}" in said


def test_the_page_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf8").split()) <= 2320
