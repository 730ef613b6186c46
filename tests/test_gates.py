"""The tree is fit to be committed: notebooks, library, README and packaging agree with each other."""

import ast
import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from papermill.inspection import _infer_parameters
from papermill.iorw import load_notebook_node

from c2lip.training.settings import KINDS, check
from c2lip.workshop.launch import add_output
from c2lip.workshop.parameters import read_parameters, smoke
from c2lip.workshop.readme import kernel

ROOT = Path(__file__).resolve().parent.parent
NBS = sorted(p for p in (ROOT / "nbs").glob("*.ipynb") if not p.name.startswith("_"))
LAUNCHERS = [p for p in NBS if not p.name[0].isdigit() and p.stem != "index"]
read = lambda path: json.loads(path.read_text(encoding="utf8"))
sources = lambda path, kind="code": ["".join(c["source"]) for c in read(path)["cells"] if c["cell_type"] == kind]
name = lambda path: path.stem


# ---- notebooks and what is made from them


def test_nothing_lags_behind(tmp_path, run):
    "`make notebooks` in a copy without c2lip/ and README.md makes exactly the tree's: clean, exported, no stale module"
    shutil.copytree(ROOT / "nbs", tmp_path / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints", "_*"))
    shutil.copy(ROOT / "settings.ini", tmp_path)
    (tmp_path / "c2lip").mkdir()
    done = run(sys.executable, "-c", "from c2lip.workshop.readme import tidy; tidy()", cwd=tmp_path)
    assert done.returncode == 0, done.out
    tree = lambda root: {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in [*(root / "nbs").glob("*.ipynb"), *(root / "c2lip").rglob("*.py"), root / "README.md"]
        if not p.name.startswith("_") or p.suffix == ".py"
    }
    ours, made = tree(ROOT), tree(tmp_path)
    assert sorted(ours) == sorted(made), (
        f"modules without a notebook, or the reverse: {sorted(set(ours) ^ set(made))}; run make notebooks, delete what is stale"
    )
    late = [f for f in ours if ours[f] != made[f]]
    assert not late, f"not as `make notebooks` leaves them: {late}"


@pytest.mark.parametrize("path", NBS, ids=name)
def test_kernel(path):
    notebook = read(path)
    assert notebook["metadata"] == kernel and (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [c["id"] for c in notebook["cells"]]
    assert len(ids) == len(set(ids)), "two cells share an id"


def exports(path):
    "The module a notebook exports, or None"
    found = re.findall(r"^#\|\s*default_exp\s+(\S+)", "\n".join(sources(path)), re.M)
    assert len(found) < 2
    return found[0] if found else None


def imported(code):
    "Modules of c2lip that python code imports; magics and shell lines are skipped"
    code = "\n".join(line if line.lstrip()[:1] not in ("%", "!") else "" for line in code.splitlines())
    for node in ast.walk(ast.parse(code)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and (node.module == "c2lip" or (node.level == 1 and not node.module))
        ):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.level == 1 or (node.module or "").startswith("c2lip.")):
            yield node.module.removeprefix("c2lip.")
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("c2lip.") for a in node.names if a.name.startswith("c2lip."))


@pytest.mark.parametrize("path", [p for p in NBS if p.name[0].isdigit()], ids=name)
def test_imports_lower_numbers_only(path):
    number = {exports(p): p.stem.split("_")[0] for p in NBS if exports(p)}
    own = exports(path)
    assert own, "a numbered notebook exports a module"
    for code in sources(path):
        for module in imported(code):
            if module in number and module != own:
                assert number[module] < path.stem.split("_")[0], f"{path.name} imports {module}, {number[module]}"


def test_import_reader():
    assert list(
        imported(
            "import os\nfrom c2lip.core import a\nfrom c2lip import data, losses\n%matplotlib inline\nimport c2lip.towers as t"
        )
    ) == ["core", "data", "losses", "towers"]


# ---- launchers


@pytest.mark.parametrize("path", LAUNCHERS, ids=name)
def test_launcher(path):
    cells = read(path)["cells"]
    tagged = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1 and tagged[0]["cell_type"] == "code", "exactly one cell is tagged parameters"
    declared = read_parameters(path)
    inferred = {p.name: p for p in _infer_parameters(load_notebook_node(str(path)))}
    assert list(inferred) == list(declared), "papermill does not see every parameter; a second = in the line hides it"
    for p in declared.values():
        assert p.kind in KINDS and p.help, f"{p.name} needs a type and a comment"
        assert inferred[p.name].inferred_type_name == p.kind and inferred[p.name].help == p.help
    assert check(declared, {}) == {n: p.default for n, p in declared.items()}, "a default breaks its own rule or type"
    check(declared, smoke(ROOT, path.stem), f"data/smoke.yaml: {path.stem}")
    for code in sources(path):
        assert not re.search(r"^\s*(async\s+)?(def|class)\s", code, re.M), (
            "a launcher holds no def: put it into a numbered notebook"
        )
    assert any(re.search(rf"\bparameters\(\"{path.stem}\", globals\(\)\)", code) for code in sources(path)), (
        "launch.parameters is not called"
    )


@pytest.mark.parametrize("path", LAUNCHERS, ids=name)
def test_help_lists_every_parameter(path, run):
    done = run("papermill", "--help-notebook", path)
    assert done.returncode == 0, done.out
    for p in read_parameters(path).values():
        assert f"{p.name}: {p.kind} (default " in done.out and p.help in done.out


# ---- the page


def test_commands_of_the_readme(run):
    "Every command that README.md shows is one that works: make's targets exist, papermill's parameters are right"
    text = (ROOT / "README.md").read_text(encoding="utf8")
    commands = [
        line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines() if line.strip()
    ]
    assert {"make train", "make test"} <= set(commands)
    makefile = (ROOT / "Makefile").read_text(encoding="utf8")
    for command in commands:
        program, *words = command.split("#")[0].split()
        if program == "make":
            assert re.search(rf"^{words[0]}:", makefile, re.M), command
        if program == "papermill" and (ROOT / [w for w in words if w.endswith(".ipynb")][0]).exists():
            add_output([program, *words])


def test_readme_lists_every_launcher():
    text = (ROOT / "README.md").read_text(encoding="utf8")
    assert not [p.name for p in LAUNCHERS if f"](nbs/{p.name})" not in text]


def test_links_of_the_readme():
    "Links and images of README.md and CONTRIBUTING.md lead to files of the tree"
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)\s#]+)\)", (ROOT / page).read_text(encoding="utf8")):
            if not re.match(r"[a-z]+:", target):
                assert (ROOT / target).exists(), f"{page}: {target}"


# ---- the package


def settings():
    cfg = ConfigParser(delimiters=["="])
    cfg.read(ROOT / "settings.ini", encoding="utf8")
    return cfg["DEFAULT"]


def test_every_requirement_is_pinned():
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    plain = lambda s: re.split(r"[<>=!~\[;]", s)[0].lower().replace("_", "-")
    pinned = {plain(p) for p in pins}
    wanted = [plain(r) for r in (settings()["requirements"] + " " + settings()["dev_requirements"]).split()]
    assert not set(wanted) - pinned and {"torch", "torchvision"} <= pinned


def test_every_import_is_required():
    "What the library imports stands in settings.ini (requirements; nbdev, which only c2lip.workshop.readme needs, is for development, and Ray is an extra)"
    from importlib.metadata import packages_distributions

    plain = lambda s: re.split(r"[<>=!~\[;]", s)[0].lower().replace("_", "-")
    required = {plain(r) for r in settings()["requirements"].split()} | {"nbdev", "ray"}
    homes, missing = packages_distributions(), set()
    for f in sorted((ROOT / "c2lip").rglob("*.py")):
        for node in ast.walk(ast.parse(f.read_text(encoding="utf8"))):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom) and node.level == 0
                else []
            )
            for top in {n.split(".")[0] for n in names} - {"c2lip", *sys.stdlib_module_names}:
                if not {plain(d) for d in homes.get(top, [top])} & required:
                    missing.add(f"{f.name} imports {top}")
    assert not missing, f"not required in settings.ini: {sorted(missing)}"


def test_library_starts_light(run):
    "papermill loads c2lip.workshop.launch at each of its starts, in whatever project"
    code = "import sys, c2lip.workshop.launch; print(*{m.split('.')[0] for m in sys.modules} & {'torch','numpy','pandas','papermill','IPython','yaml'})"
    assert run(sys.executable, "-c", code).out.strip() == ""


def test_missing_python_is_said_clearly(tmp_path, run):
    done = run("make", "install", f"VENV={tmp_path}/venv", "PYTHON=/bin/false")
    assert done.returncode != 0 and "no Python 3.11 or newer" in done.out and not (tmp_path / "venv").exists()


# ---- the files


def files():
    "What git would commit; every file where there is no git"
    try:
        out = (
            subprocess.run(
                ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
            )
            .stdout.decode()
            .split("\0")
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / f for f in out if f and (ROOT / f).is_file()]


def test_no_large_file():
    large = {
        str(f.relative_to(ROOT)): f.stat().st_size
        for f in files()
        if f.stat().st_size > 4e6 and (ROOT / "data" / "base") not in f.parents
    }
    assert not large, f"over 4 MB: {large}"
    base = sum(f.stat().st_size for f in files() if (ROOT / "data" / "base") in f.parents)
    assert base <= 12.5e6, f"data/base holds {base} bytes"


FOREIGN = re.compile(r"(?<![\w.:/~-])/(?:home|root|Users|work|opt|mnt|data\d|scratch)/\w+|[.]pyenv/|[A-Z]:\\\\?Users")


def test_no_path_of_somebodys_machine():
    for f in files():
        try:
            text = f.read_text(encoding="utf8")
        except UnicodeDecodeError:
            continue
        found = FOREIGN.search(text)
        assert not found, f"{f.relative_to(ROOT)} names {found.group()}"
    assert FOREIGN.search("see /" + "home/me/x") and not FOREIGN.search("https://x.org/home/me and runs/work/x")
