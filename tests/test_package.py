"""The package: both distributions are built, and the wheel is used from an empty folder without a clone around it."""

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


UV = """#!/bin/sh
test "$1" = --version && exec echo uv 0.9
env | grep -E '^(UV_|SSL_CERT_FILE|ALL_PROXY)' > "$0.env"
echo "$@" > "$0.words"
echo 'warning: copied, not linked' >&2
test -z "$UV_BREAKS" || { printf 'error: no such thing\n  cause: one\n  cause: no route\n\nhint: none\n' >&2; exit 2; }
"""


def test_uv_installs_from_where_pip_would(tmp_path, monkeypatch, run):
    "pip's settings reach uv, unless it has an index of its own; a failure is one line"
    uv = tmp_path / "uv"
    uv.write_text(UV)
    uv.chmod(0o755)
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://a.test/simple\n[install]\nfind-links = x y\n")
    own = [name for name in os.environ if name.startswith(("UV_", "PIP_"))]
    for name in (*own, "TORCH", "SSL_CERT_FILE", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://b.test/simple https://c.test/simple")

    def install(**variables):
        done = run(sys.executable, ROOT / "docs" / "install.py", "P", "-e", ".", env=os.environ | variables)
        got = dict(line.split("=", 1) for line in (tmp_path / "uv.env").read_text().splitlines())
        return done, got

    done, got = install(TORCH="cpu")
    assert (done.returncode, done.out) == (0, "")
    assert (tmp_path / "uv.words").read_text().split() == "pip install -q --python P -e .".split()
    assert (
        got.items()
        >= {
            "UV_INDEX_URL": "https://a.test/simple",
            "UV_EXTRA_INDEX_URL": "https://b.test/simple https://c.test/simple",
            "UV_INDEX_STRATEGY": "unsafe-best-match",
            "UV_FIND_LINKS": "x,y",
            "UV_TORCH_BACKEND": "cpu",
        }.items()
    )
    _, got = install(UV_DEFAULT_INDEX="https://own.test")
    assert "UV_INDEX_URL" not in got
    assert "UV_TORCH_BACKEND" not in got
    done, _ = install(UV_BREAKS="1")
    assert done.returncode == 1
    assert done.out.count("\n") == 1
    assert "no such thing; no route; is the" in done.out

    uv.write_text("#!/bin/sh\necho another program\n")
    done, _ = install(PIP_NO_INDEX="1")
    assert done.returncode == 1, "P is no Python; the other program would say yes"


def below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_the_distributions_hold(distributions):
    sdist, installed = distributions
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"settings.ini", "setup.py", "constraints.txt", "Makefile", "nbs/train.ipynb", "nbs/images/page.gif"}
    wanted |= {"nbs/1_method/01_core.ipynb", "tests/test_package.py", "data/suites.yaml", "data/base/tokenizer.json"}
    assert not wanted - names
    assert not [name for name in names if name.startswith(("data/cache", "runs", "build", "dist"))]

    shipped = {name for name in below(ROOT / "data") if not name.startswith(("cache/", "results/", "."))}
    shipped |= {"nbs/train.ipynb", "nbs/evaluate.ipynb"}
    shipped.add("results/readings/trials.csv")
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
    words += ["-p", "suites", "world_sugarcrepe_2,zeroshot", "-p", "alphas", "0.5", "-p", "run_dir", "mine"]
    done = run(sys.executable, "-c", USE, *words, cwd=here, env=env, timeout=300)
    assert done.returncode == 0 and "everything is in mine" in done.out and (tmp_path / "caches").is_dir(), done.out
    assert not (here / "data").exists()
    assert "['A red mug', 'the wooden table']" in done.out and "1 captions, 2 phrases" in done.out, done.out
    assert all(text in done.out for text in ("Binding", "phrases", "c2lip list suites says where")), done.out
    assert not any(text in done.out for text in ("Published", "Unable to parse", "unknown parameter")), done.out

    check_evaluation(here / "mine")


def check_evaluation(folder):
    "The rows that `evaluate` gives; drawn suites have no place in a paper's table"
    files = {"table.md", "the_embedded_world.md", "table.csv", "changes_again.png", "evaluate.ipynb"}
    assert {p.name for p in folder.iterdir()} >= files
    assert not list(folder.glob("c2lip_*"))

    world = benchmark_folder("world", "validation", items=2, images=20)
    mine = evaluate(load("base"), world, ["world_sugarcrepe_2", "zeroshot"], progress=False)
    frame = pd.read_csv(folder / "table.csv")
    for m in ("base", "again", "α 0.5"):
        part = frame[(frame.model == m) & frame.against.isna()]
        assert part.value.tolist() == pytest.approx(mine.value.tolist())
        assert part.n.tolist() == mine.n.tolist()

    changes = frame[frame.against == "base"]
    assert len(changes) == 2 * len(mine) and (changes.value == 0).all()  # of two items no error is known
    assert read_json(folder / "params.json")["models"] == ["base", "again=base"]
