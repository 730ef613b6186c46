"""The bare wheel in an environment that has the heart's requirements alone: README's loop, load, save, noun phrases."""

import re
import subprocess
import sys
from functools import partial
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
from conftest import OFFLINE, ROOT
from packaging.requirements import Requirement
from PIL import Image
from test_package import distributions  # noqa: F401  (a fixture)

from c2lip.core import UserError
from c2lip.lab.data.prepare import _in_ray
from c2lip.score import Store, compress
from c2lip.towers.onnx import export_onnx


def requirements_of(names):
    "All distributions that these names need, themselves included; without extras"
    found = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue

        found[name] = distribution(name)
        for line in found[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return list(found.values())


def link_packages(installed, home, extra="none"):
    "The Python of an environment with the wheel and links to what it and an extra require, and nothing else"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    for path in installed.iterdir():
        (packages / path.name).symlink_to(path)

    (metadata,) = installed.glob("*.dist-info/METADATA")
    asked = rf'^Requires-Dist: ([^;\n]+?)(?:; extra == "{extra}")?$'
    lines = re.findall(asked, metadata.read_text(encoding="utf8"), re.M)
    direct = [Requirement(line).name for line in lines]
    assert len(direct) <= 18, direct

    for package in requirements_of(direct):
        for name in {file.parts[0] for file in package.files} - {"..", "__pycache__"}:
            link = packages / name
            if not link.exists():
                link.symlink_to(Path(package.locate_file(name)))
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def heart(distributions, tmp_path_factory):  # noqa: F811
    return link_packages(distributions[1], tmp_path_factory.mktemp("heart"))


@pytest.fixture
def in_the_heart(heart, run, tmp_path):
    env = {"PYTHONPATH": str(OFFLINE), "C2LIP_FORKS": "", "XDG_CACHE_HOME": str(tmp_path / "caches")}
    return partial(run, heart, cwd=tmp_path, env=env)


def test_a_search_needs_no_lab(distributions, run, tmp_path):  # noqa: F811
    python = link_packages(distributions[1], tmp_path / "search", "search")
    program = "import sys; from c2lip.lab.dev.command import main; sys.exit(main(sys.argv[1:]))"
    call = partial(run, python, "-c", program, cwd=tmp_path, env={"PYTHONPATH": str(OFFLINE), "C2LIP_FORKS": ""})
    for colour in ("red", "blue"):
        Image.new("RGB", (96, 96), colour).save(tmp_path / f"{colour}.png")
    assert "2 images tried" in call("index", tmp_path).out
    done = call("search", "a red mug")
    assert done.returncode == 0 and "red.png" in done.out, done.out
    done = call("search", "a red mug", "--html", "page.html")
    assert done.returncode == 2 and done.out.endswith("pip install 'c2lip[lab]'\n"), done.out


def test_the_lab_is_not_there(in_the_heart):
    missing = "pandas papermill IPython matplotlib scipy sklearn pyarrow tensorboard".split()
    done = in_the_heart("-c", f"import importlib.util as i; print([n for n in {missing} if i.find_spec(n)])")
    assert done.out.strip() == "[]", done.out


LOOP = """
import torch
from c2lip.towers import load

towers = load("base")
model, tokenizer = towers.model, towers.tokenizer
captions = ("A red mug is left of a blue fish.", "A green key is on a table.")
pairs = [{{"image": torch.randn(3, 96, 96), "text": caption}} for caption in captions]
{loop}
print("trained", sum(map(len, batch["phrases"])))
"""


def test_the_loop_of_the_readme(in_the_heart):
    readme = (ROOT / "README.md").read_text(encoding="utf8")
    (loop,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.S) if "PhraseCollate(" in block)
    done = in_the_heart("-c", LOOP.format(loop=loop))
    assert done.returncode == 0 and "trained 4" in done.out, done.out


USE = """
import torch
from c2lip.concepts import noun_phrases
from c2lip.towers import load, save

print([phrase.text for phrase in noun_phrases("A red mug stands on the wooden table.")])
towers = load("base_clip")
again = load(save(towers, "mine"))
ids = towers.tokenizer(["a red mug"])
assert torch.equal(towers.model.encode_text(ids), again.model.encode_text(ids))
"""


def test_models_and_phrases(in_the_heart):
    done = in_the_heart("-c", USE)
    assert done.returncode == 0 and "['A red mug', 'the wooden table']" in done.out, done.out


def test_the_command_says_what_is_missing(in_the_heart):
    program = "import sys; sys.argv = ['c2lip', 'list', 'methods']; from c2lip.lab.dev.command import main; main()"
    done = in_the_heart("-c", program)
    (line,) = done.out.strip().splitlines()
    assert done.returncode == 1 and line.endswith("pip install 'c2lip[lab]'"), done.out


MISSING = {  # module → its extra, and what needs it
    "onnxscript": ("onnx", lambda folder: export_onnx(None, folder)),
    "scipy.cluster": ("serve", lambda folder: compress(np.ones((4, 3)), Store(vectors=1))),
    "ray": ("ray", lambda folder: next(_in_ray(None, [], 1, "local"))),
}


@pytest.mark.parametrize("module", MISSING)
def test_a_missing_extra_is_named_in_one_line(module, tmp_path, monkeypatch):
    extra, use = MISSING[module]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError) as e:
        use(tmp_path)
    assert re.fullmatch(rf"[\w.-]+ is missing: pip install 'c2lip\[{extra}\]'", str(e.value)), e.value


def test_the_package_starts_fast(in_the_heart):
    "Of torch's own start at most as much again, and 4 s: the bound is wide, since machines differ"
    program = "import time; start = time.perf_counter(); import torch; middle = time.perf_counter(); " + (
        "from c2lip import C2LIPLoss; print(middle - start, time.perf_counter() - middle)"
    )
    done = in_the_heart("-c", program)
    torch_alone, rest = map(float, done.out.split()[-2:])
    assert rest < max(4, 2 * torch_alone), done.out
