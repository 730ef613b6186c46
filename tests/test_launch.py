"""The papermill entry point on a toy project: what a terminal shows and what a run leaves behind."""

import json
import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from c2lip.core import UserError
from c2lip.workshop.launch import OPTION_WORDS, add_output, enter, is_papermill
from c2lip.workshop.upkeep import KERNEL

CELL = """lambda_xac: float = 0.01  # weight, from 0 to 100
lr: float = 1e-5  # peak learning rate, above 0
run_dir: str = ""  # folder of the results
fail: str = "no"  # how to fail, one of: no, user, bug"""
RUN = """if fail == "user":
    raise UserError("there is no model ViT-B-61; did you mean ViT-B-16?")
if fail == "bug":
    1 / 0
save_parameters(settings, project_root() / run_dir)
print("step 1 loss 0.5", flush=True)"""
IMPORTS = """from c2lip.core import UserError; from c2lip.core.files import project_root
from c2lip.workshop.parameters import parameters, save_parameters"""


@pytest.fixture
def toy(tmp_path):
    "A project with one launcher, in a folder whose name is a trap for path templates"
    root = tmp_path / "pro{j}ect"
    (root / "nbs").mkdir(parents=True)
    (root / "settings.ini").write_text("[DEFAULT]\nlib_name = c2lip\n")
    nb = new_notebook(metadata=KERNEL)
    nb.cells = [
        new_code_cell(IMPORTS),
        new_code_cell(CELL, metadata={"tags": ["parameters"]}),
        new_code_cell('settings = parameters("train", globals())'),
        new_code_cell(RUN),
        new_code_cell("object()"),
    ]
    nbformat.write(nb, root / "nbs" / "train.ipynb")
    return root


def results(root):
    "The only run folder, with its executed notebook and parameters"
    (folder,) = (root / "runs").iterdir()
    return folder, json.loads((folder / "train.ipynb").read_text()), json.loads((folder / "params.json").read_text())


def test_table_of_options_is_papermills():
    from papermill.cli import papermill

    options = {o: p.nargs for p in papermill.params if p.param_type_name == "option" and not p.is_flag for o in p.opts}
    assert options == OPTION_WORDS
    flags = {
        o for p in papermill.params if p.param_type_name == "option" and p.is_flag for o in p.opts + p.secondary_opts
    }
    assert {
        "--log-output",
        "--no-log-output",
        "--progress-bar",
        "--no-progress-bar",
        "--help-notebook",
        "--version",
    } <= flags


def test_installed_entry_point():
    import entrypoints

    assert [e.module_name for e in entrypoints.get_group_all("papermill.engine") if e.name == "c2lip"] == [
        "c2lip.workshop.launch"
    ], "pip install -e . is due"


def test_in_a_terminal(toy):
    "Exactly the card's line, on a pseudo-terminal, from the root"
    import fcntl
    import pty
    import struct
    import termios

    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(toy)
        os.execvp("papermill", "papermill nbs/train.ipynb -p lambda_xac 0.01".split())
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    shown = b""
    while True:
        try:
            shown += os.read(fd, 65536)
        except OSError:
            break  # how Linux says that the other end has closed
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown.decode()
    folder, executed, params = results(toy)
    assert (
        f"runs/{folder.name}" in shown.decode()
        and "step 1 loss 0.5" in shown.decode()
        and "Executing" in shown.decode()
    )
    assert "encryption" not in shown.decode() and "object at 0x" not in shown.decode()
    assert "Executing Cell" not in shown.decode()
    assert params == {"lambda_xac": 0.01, "lr": 1e-5, "fail": "no"}
    assert any("injected-parameters" in c["metadata"].get("tags", []) for c in executed["cells"])


def test_with_pipes_from_the_notebooks_folder_and_again_from_its_record(toy, run):
    source = (toy / "nbs" / "train.ipynb").read_bytes()
    done = run("papermill", "train.ipynb", "-plr", "1e-5", cwd=toy / "nbs", stdin=None, input="not a notebook")
    assert done.returncode == 0 and "step 1 loss 0.5\n" in done.out and "Executing" not in done.out, done.out
    assert (toy / "nbs" / "train.ipynb").read_bytes() == source
    folder, _, params = results(toy)
    assert params["lr"] == 1e-5
    again = run(
        sys.executable,
        "-m",
        "papermill",
        "nbs/train.ipynb",
        "-f",
        folder / "params.json",
        "-p",
        "run_dir",
        "again",
        cwd=toy,
    )
    assert again.returncode == 0, again.out
    assert (
        json.loads((toy / "again" / "params.json").read_text()) == params and (toy / "again" / "train.ipynb").exists()
    )


REFUSED = [
    ("-p lamda_xac 1", "did you mean lambda_xac?"),
    ("-plamda_xac 1", "did you mean lambda_xac?"),
    ("-y {lamda_xac:1}", "did you mean lambda_xac?"),
    ("-f wrong.yaml", "did you mean lambda_xac?"),
    ("-f absent.yaml", "absent.yaml cannot be read"),
    ("-p lambda_xac 101", "from 0 to 100, not 101"),
    ("-p lambda_xac much", "a number from 0 to 100, not much"),
    ("-p lr 0", "above 0"),
    ("-p fail never", "one of: no, user, bug"),
    ("out.ipynb -p lamda_xac 1", "did you mean lambda_xac?"),
]


@pytest.mark.parametrize("words, said", REFUSED)
def test_refused(toy, monkeypatch, words, said):
    (toy / "wrong.yaml").write_text("lamda_xac: 1\n")
    monkeypatch.chdir(toy)
    with pytest.raises(UserError) as e:
        add_output(["papermill", "nbs/train.ipynb", *words.split()])
    assert said in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("words, said", [REFUSED[0], REFUSED[5], ("-p run_dir settings.ini", "cannot be made")])
def test_refused_before_any_work(toy, run, words, said):
    before = sorted(toy.rglob("*"))
    done = run("papermill", "nbs/train.ipynb", *words.split(), cwd=toy)
    assert done.returncode == 2 and said in done.out, done.out
    assert done.out.startswith("c2lip: ") and done.out.count("\n") == 1 and sorted(toy.rglob("*")) == before


def test_no_notebook_of_that_name(toy, run):
    done = run("papermill", "nbs/trian.ipynb", cwd=toy)
    assert done.returncode == 2 and "there is no notebook nbs/trian.ipynb; did you mean train.ipynb?" in done.out


def test_code_in_a_name_is_not_run(toy, run):
    "papermill writes `name = value` into a cell; without the entry point the same attempt does run"
    attempt = "lr = 1e-5; open('gone', 'w').close(); x"
    for option in ("-p", "-r"):
        done = run("papermill", "nbs/train.ipynb", option, attempt, "1", cwd=toy)
        assert done.returncode == 2 and "has no parameter" in done.out and not (toy / "gone").exists()
    run("papermill", "nbs/train.ipynb", "out.ipynb", "-p", attempt, "1", cwd=toy, env={"C2LIP_PAPERMILL": "plain"})
    assert (toy / "gone").exists()


def test_a_text_stays_a_text(toy, run, monkeypatch):
    value = '007"; open("gone", "w"); "'
    done = run("papermill", "nbs/train.ipynb", "out.ipynb", "-p", "run_dir", ".", "-p", "fail", "no", cwd=toy)
    assert done.returncode == 0, done.out
    monkeypatch.chdir(toy)
    assert add_output(["papermill", "nbs/train.ipynb", "-p", "run_dir", value])[1:4] == [
        "-r",
        "run_dir",
        value,
    ]
    assert (toy / "params.json").exists() and not (toy / "runs").exists()


@pytest.mark.parametrize(
    "how, said",
    [
        ("user", "c2lip: there is no model ViT-B-61; did you mean ViT-B-16?\n"),
        ("bug", "c2lip: ZeroDivisionError: division by zero\n"),
    ],
)
def test_a_failing_notebook(toy, run, how, said):
    done = run("papermill", "nbs/train.ipynb", "-p", "fail", how, cwd=toy)
    (folder,) = (toy / "runs").iterdir()
    assert done.returncode == 1 and said in done.out and "Traceback" not in done.out, done.out
    assert f"the executed notebook: runs/{folder.name}/train.ipynb" in done.out
    assert any(
        o["output_type"] == "error"
        for c in json.loads((folder / "train.ipynb").read_text())["cells"]
        for o in c.get("outputs", [])
    )
    if how == "bug":
        assert (
            "Traceback" in run("papermill", "nbs/train.ipynb", "-p", "fail", how, "--log-level", "DEBUG", cwd=toy).out
        )


def test_checked_inside_when_nobody_stood_at_the_door(toy, monkeypatch):
    "papermill called from Python, where no command line is read"
    import papermill
    from papermill.exceptions import PapermillExecutionError

    monkeypatch.chdir(toy)
    with pytest.raises(PapermillExecutionError, match="did you mean lambda_xac"):
        papermill.execute_notebook("nbs/train.ipynb", "out.ipynb", parameters={"lamda_xac": 1}, progress_bar=False)


def test_other_notebooks_are_left_alone(toy, run, tmp_path):
    other = tmp_path / "other.ipynb"
    other.write_bytes((toy / "nbs" / "train.ipynb").read_bytes())
    for words in (
        ["papermill", other, "-p", "whatever", "1"],
        ["other", toy / "nbs" / "train.ipynb"],
        ["papermill", "-", "out.ipynb"],
        ["papermill", toy / "nbs" / "train.ipynb", "--help-notebook", "-p", "whatever", "1"],
    ):
        words = [str(w) for w in words]
        if words[0] == "papermill":
            assert add_output(words) == words
    assert (
        not is_papermill(["pytest"], [])
        and is_papermill(["/x/bin/papermill"], [])
        and is_papermill(["-m"], ["python", "-m", "papermill"])
    )


def test_two_runs_of_one_second_do_not_share_a_folder(toy, monkeypatch):
    monkeypatch.chdir(toy)
    for name in ("", "-2", "-3"):
        line = ["papermill", "nbs/train.ipynb"]
        monkeypatch.setattr(
            "c2lip.workshop.launch.datetime",
            type("fixed", (), {"now": staticmethod(lambda: __import__("datetime").datetime(2026, 1, 2))}),
        )
        monkeypatch.setattr(sys, "argv", line)
        monkeypatch.setattr(os, "environ", os.environ.copy())
        hook = sys.excepthook
        enter()
        monkeypatch.setattr(sys, "excepthook", hook)
        assert line[-1] == f"runs/train-20260102-000000{name}/train.ipynb" and Path(line[-1]).parent.is_dir()


@pytest.mark.parametrize("launcher, words", [("train", "-p method macc"), ("compare", "-p methods clic,macc")])
def test_an_unknown_method_is_refused_before_anything_starts(launcher, words):
    "No folder is made, and neither torch nor the notebook is loaded"
    root = Path(__file__).parents[1]
    with pytest.raises(UserError, match="there is no method 'macc'; did you mean macco?"):
        add_output(f"papermill {root}/nbs/{launcher}.ipynb {words}".split())
    assert add_output(f"papermill {root}/nbs/{launcher}.ipynb {words}o".split())[-1].endswith(f"{launcher}.ipynb")
