"""The walkthrough's shell lines run as they stand in the prose, with stand-ins for downloads and for trainings."""

import re
import subprocess

import pytest
from conftest import ROOT

from c2lip.core.files import read_json

STAND_INS = ROOT / "tests" / "data" / "walkthrough.sh"
FETCH = ("git", "cd", "make", ".", "hf", "python", "c2lip prepare", "curl", "mkdir")


def bash(script, folder):
    return subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    home = tmp_path_factory.mktemp("remote")
    bash(f". {STAND_INS}; fill {home}", home)
    return home


def lines_of_the_prose():
    "Those of its blocks, a continued one whole, and those within a line"
    cells = read_json(ROOT / "nbs" / "walkthrough.ipynb")["cells"]
    prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    found = re.findall(r"(?m)^    (\S.*)$|`(papermill nbs/[^`]+ -[^`]+)`", prose.replace("\\\n", " "))
    return [block or inline for block, inline in found]


def walk(lines, remote, home, quick=""):
    "Downloads first, with the phrases that the recipe's head prepares, and then the rest"
    recipe = (ROOT / "data" / "recipes" / "c2lip_paper.yaml").read_text()
    own = f"cp {remote}/ILSVRC2012_img_val.tar ."
    fetched = [line for line in lines if line.startswith(FETCH)]
    others = [line for line in lines if not line.startswith(FETCH)]
    head = re.search(r"c2lip prepare .*", recipe)[0]
    start = f"quick={quick} root={ROOT} remote={remote} log={home}/log; . {STAND_INS}"
    place = fetched.index("cd c2lip") + 1
    return bash("\n".join([start, *fetched[:place], own, *fetched[place:], head, *others, "check"]), home)


def test_the_lines_run_and_fill_the_tables(remote, tmp_path):
    done = walk(lines_of_the_prose(), remote, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "right, wrong, says",
    [
        ("unzip -q val2017.zip -d benchmarks", "unzip -q val2017.zip -d benchmarks/sugarcrepe", "'sugarcrepe"),
        ("--local-dir benchmarks/flickr8k", "--local-dir benchmarks/flickr", "flickr8k is not in"),
        ("-p run_dir runs/paper-npc", "-p run_dir runs/paper-ncp", "model runs/paper-npc/model is not there"),
        ("-p lambda_xac 0", "-p lamda_xac 0", "no setting 'lamda_xac'"),
    ],
)
def test_one_changed_path_fails(right, wrong, says, remote, tmp_path):
    lines = lines_of_the_prose()
    assert any(right in line for line in lines)
    done = walk([line.replace(right, wrong) for line in lines], remote, tmp_path, quick=1)
    assert done.returncode and says in done.stderr, done.stderr[-1000:]
