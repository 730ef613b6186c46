"""The package: both distributions are built, and the wheel is used from an empty folder without a clone around it."""

import itertools
import os
import sys
import tarfile
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
from conftest import OFFLINE, ROOT, without_library

from c2lip.core.files import read_json
from c2lip.lab.evaluation.suites import benchmark_folder, evaluate
from c2lip.towers import load

pytestmark = pytest.mark.skipif(
    not find_spec("build") or not find_spec("setuptools"),
    reason="the packages build and setuptools make distributions: pip install -e '.[dev]'",
)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory, run):
    "(sdist, the unpacked wheel, which is made from the sdist); a run of all tests has begun them at its start"
    home = Path(os.environ.get("C2LIP_BUILT") or tmp_path_factory.mktemp("distributions"))
    if "C2LIP_BUILT" not in os.environ:
        run(sys.executable, OFFLINE / "distributions.py", home)
    while not (home / "ended").exists():
        time.sleep(0.1)
    code, _, shown = (home / "ended").read_text().partition("\n")
    assert code == "0", shown[-4000:]
    (sdist,), (wheel,) = (home / "dist").glob("*.tar.gz"), (home / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home / "site-packages")
    return sdist, home / "site-packages"


def below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_the_distributions_hold(distributions):
    sdist, installed = distributions
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"settings.ini", "setup.py", "constraints.txt", "Makefile", "nbs/train.ipynb", "nbs/images/overview.png"}
    wanted |= {"nbs/1_method/01_core.ipynb", "tests/test_package.py", "data/suites.yaml", "data/base/tokenizer.json"}
    assert not wanted - names
    assert not [name for name in names if name.startswith(("data/cache", "runs", "build", "dist"))]
    shipped = {name for name in below(ROOT / "data") if not name.startswith(("cache/", "results/", "."))}
    shipped |= {"nbs/train.ipynb", "nbs/evaluate.ipynb"}
    records = itertools.product(("short_default", "world"), ("trials", "changes"))
    shipped |= {f"results/{record}/{table}.csv" for record, table in records}
    assert below(installed / "c2lip" / "shipped") == shipped
    assert sum(path.stat().st_size for path in installed.rglob("*") if path.is_file()) < 13.5e6
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {"c2lip"}


USE = """
import shutil
import sys
import c2lip
from pathlib import Path
from c2lip.concepts import noun_phrases
from c2lip.lab.dev.command import main
from c2lip.core.files import cache_folder, project_root, shipped
from c2lip.lab.evaluation.published import read_published

assert "site-packages" in c2lip.__file__, c2lip.__file__
assert project_root() == Path.cwd() and "site-packages" in str(shipped("recipes"))
print([phrase.text for phrase in noun_phrases("A red mug stands on the wooden table.")])
assert len(read_published()) > 1000
assert "caches" in str(cache_folder())
assert not list(Path.cwd().iterdir()), "nothing is written where the user stands"
shutil.copy(shipped("base/record.json"), ".")  # any file: no image is opened here
Path("captions.csv").write_text("image,caption\\nrecord.json,A red mug on a table.\\n")
assert main(["prepare", "captions.csv", "out"]) == 0
assert {"captions.csv", "out", "record.json"} == {path.name for path in Path.cwd().iterdir()}
sys.exit(main(sys.argv[1:]))
"""


def test_the_library_works_anywhere(distributions, tmp_path, run):
    "A command of the unpacked wheel in an empty folder, with its caches beside it"
    here = tmp_path / "here"
    here.mkdir()
    paths = os.pathsep.join([str(distributions[1]), os.environ["PYTHONPATH"].split(os.pathsep)[0]])  # and the guard
    env = {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path / "caches"), "C2LIP_CACHE": "", **without_library()}
    words = "evaluate -p models base,again=base -p items 2 -p bench_images 20 -p split validation".split()
    words += ["-p", "suites", "world_sugarcrepe,zeroshot", "-p", "run_dir", "mine"]
    done = run(sys.executable, "-c", USE, *words, cwd=here, env=env, timeout=300)
    assert done.returncode == 0 and "everything is in mine" in done.out and (tmp_path / "caches").is_dir(), done.out
    assert not (here / "data").exists()
    assert "['A red mug', 'the wooden table']" in done.out and "1 captions, 2 phrases" in done.out, done.out
    assert all(text in done.out for text in ("SugarCrepe", "mixture", "c2lip list suites says where")), done.out
    assert not any(text in done.out for text in ("Published", "Unable to parse", "unknown parameter")), done.out
    check_evaluation(here / "mine")


def check_evaluation(folder):
    "The rows that `evaluate` gives; drawn suites have no place in a paper's table"
    files = {"table.md", "the_embedded_world.md", "table.csv", "changes_again.png", "evaluate.ipynb"}
    assert {p.name for p in folder.iterdir()} >= files
    assert not list(folder.glob("c2lip_*"))
    world = benchmark_folder("world", "validation", items=2, images=20)
    mine = evaluate(load("base"), world, ["world_sugarcrepe", "zeroshot"], progress=False)
    frame = pd.read_csv(folder / "table.csv")
    for m in ("base", "again"):
        part = frame[(frame.model == m) & frame.against.isna()]
        assert part.value.tolist() == pytest.approx(mine.value.tolist()) and part.n.tolist() == mine.n.tolist()
    changes = frame[frame.against == "base"]
    assert len(changes) == len(mine) and (changes.value == 0).all()  # of two items no error is known
    assert read_json(folder / "params.json")["models"] == ["base", "again=base"]
