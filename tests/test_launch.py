"""The papermill entry point on a toy project: what a terminal shows and what a run leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from c2lip.core import UserError
from c2lip.training.runs import run_state
from c2lip.workshop.launch import OPTION_WORDS, add_output, enter, is_papermill
from c2lip.workshop.upkeep import KERNEL

CELL = """lambda_xac: float = 0.01  # weight, from 0 to 100
lr: float = 1e-5  # peak learning rate, above 0
run_dir: str = ""  # folder of the results
fail: str = "no"  # how to fail, one of: no, user, bug, kill, full"""
RUN = """if fail == "user":
    raise UserError("there is no model ViT-B-61; did you mean ViT-B-16?")
if fail == "bug":
    1 / 0
save_parameters(settings, project_root() / run_dir)
if fail == "kill":
    os.kill(os.getpid(), 9)
if fail == "full":
    print("x" * 200_000)
line = "/9 \N{FULL BLOCK} 00:01 left · contrastive 0.983  npc 3.319  xac 7.971 · 492 img/s · data 3% · 1.5 GB · total 4"
for i in range(1, 10):
    print(f"\\r{i}{line}", end="", flush=True)
    time.sleep(0.01)
print(flush=True)
print("step 9, validation: " + " · ".join(f"suite {i} 98.5 (-0.4)" for i in range(6)))
print("step 1 loss 0.5", flush=True)"""
IMPORTS = """import os, time
from c2lip.core import UserError; from c2lip.core.files import project_root
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


def on_terminal(words, folder, columns):
    "A command on a pseudo-terminal: exit code, and the lines that then stand there"
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    sides = dict(stdin=theirs, stdout=theirs, stderr=theirs)
    with subprocess.Popen(words, cwd=folder, env=env, start_new_session=True, **sides) as job:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:
                break  # how Linux says that the other end has closed
    os.close(ours)
    text = shown.decode().replace("\r\n", "\n")
    return job.returncode, text, [line.rstrip() for line in re.sub(r"[^\n]*\r", "", text).split("\n")]


@pytest.mark.parametrize("columns", [80, 140])
def test_in_a_terminal(toy, columns):
    "Exactly the card's line, on a pseudo-terminal, from the root"
    code, text, lines = on_terminal("papermill nbs/train.ipynb -p lambda_xac 0.01".split(), toy, columns)
    assert code == 0, text
    folder, executed, params = results(toy)
    assert f"runs/{folder.name}" in text and "step 1 loss 0.5" in lines and "Executing" in text
    for word in ("encryption", "object at 0x", "Executing Cell", "Executing: 100%"):
        assert word not in text
    assert params == {"lambda_xac": 0.01, "lr": 1e-5, "fail": "no"}
    assert any("injected-parameters" in c["metadata"].get("tags", []) for c in executed["cells"])
    drawn = re.findall(r"\r(\d)/9 [^\r\n]*", text)
    assert len(set(drawn)) > 3, "the line is drawn again and again"
    assert [line[:3] for line in lines if "/9 " in line] == ["9/9"], "and stays once"
    assert all(len(row) <= columns for row in re.split(r"[\r\n]", text) if str(toy) not in row)
    (first, *rest) = [line for line in lines if "suite" in line]
    assert first.startswith("step 9") and len(rest) == (2 if columns == 80 else 1)
    assert all(line.startswith("  suite") for line in rest)


def test_with_pipes_from_the_notebooks_folder_and_again_from_its_record(toy, run):
    source = (toy / "nbs" / "train.ipynb").read_bytes()
    done = run("papermill", "train.ipynb", "-plr", "1e-5", cwd=toy / "nbs", stdin=None, input="not a notebook")
    assert done.returncode == 0 and "step 1 loss 0.5\n" in done.out and "Executing" not in done.out, done.out
    assert done.out.count("9/9 ") == 1 and done.out.count("/9 ") <= 3, "progress now and then, the last line once"
    assert all(letter.isprintable() or letter == "\n" for letter in done.out) and "\n\n" not in done.out
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


@pytest.mark.parametrize("damage, said", [("bytes", "it is not UTF-8"), ("folder", "Is a directory")])
def test_settings_that_cannot_be_read(toy, run, damage, said):
    "One line, whichever command reads them; --help does not need them"
    (toy / "c2lip" / "core").mkdir(parents=True)
    (toy / "settings.ini").unlink()
    if damage == "folder":
        (toy / "settings.ini").mkdir()
    else:
        (toy / "settings.ini").write_bytes(b"lib_name = c2lip\n\xff\xfe")
    done = run("papermill", "nbs/train.ipynb", cwd=toy)
    line = f"{toy / 'settings.ini'} cannot be read ({said}); restore it from git\n"
    assert (done.returncode, done.out) == (2, f"c2lip: {line}")
    done = run("c2lip", "runs", cwd=toy)
    assert (done.returncode, done.out) == (2, f"c2lip runs: error: {line}")
    assert run("c2lip", "--help", cwd=toy).returncode == 0


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


@pytest.mark.parametrize(
    "how, said",
    [("kill", "the kernel died: it was killed from outside"), ("full", "File too large: ")],
)
def test_what_no_cell_can_catch(toy, run, how, said):
    "A kernel that is killed, and a disk with no room for the executed notebook: one line, and what stands"
    import resource

    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = run("papermill", "nbs/train.ipynb", "-p", "fail", how, "-p", "run_dir", "x", cwd=toy, preexec_fn=little_room)
    assert done.returncode != 0 and "Traceback" not in done.out, done.out
    (line,) = [line for line in done.out.splitlines() if line.startswith("c2lip: ") and "go to" not in line]
    assert how == "full" or run_state(toy / "x") == "failed"
    assert said in line and "x holds no checkpoint yet, so start again" in done.out.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal(toy, number):
    "The run says what stands, its kernel ends, and the exit code is the usual one"
    cell = json.loads((toy / "nbs" / "train.ipynb").read_text())
    cell["cells"][-1]["source"] = 'print("kernel", os.getpid(), flush=True)\ntime.sleep(60)'
    (toy / "nbs" / "train.ipynb").write_text(json.dumps(cell))
    words = ["papermill", "nbs/train.ipynb", "-p", "run_dir", "x"]
    with subprocess.Popen(words, cwd=toy, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as job:
        kernel = next(int(line.split()[1]) for line in job.stderr if line.startswith("kernel "))
        job.send_signal(number)
        said = job.stderr.read()
    assert job.returncode == 128 + number and "Traceback" not in said and "Aborted" not in said, said
    assert "c2lip: stopped by " in said and "start again" in said
    assert run_state(toy / "x") == "failed"
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)


def test_no_way_to_the_kernel(toy, monkeypatch, capsys):
    "A loopback that is down is found out before a folder is made"
    monkeypatch.chdir(toy)
    monkeypatch.setattr(sys, "argv", ["papermill", "nbs/train.ipynb"])
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: (_ for _ in ()).throw(OSError(101, "is down")))
    with pytest.raises(SystemExit) as ended:
        enter()
    assert ended.value.code == 2 and "does not reach itself over 127.0.0.1 (is down)" in capsys.readouterr().err
    assert not (toy / "runs").exists()


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
