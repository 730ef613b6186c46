"""The papermill entry point on a toy project: what a terminal shows and what a run leaves behind."""

import fcntl
import json
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import termios

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from c2lip.core import UserError
from c2lip.lab.dev.upkeep import KERNEL
from c2lip.lab.training.launch import check_run, complete_line
from c2lip.lab.training.runs import run_state

CELL = """lambda_xac: float = 0.01  # weight
lr: float = 1e-5  # peak learning rate
run_dir: str = ""  # folder of the results
fail: str = "no"  # how to fail: no, bug, kill, full, wait"""
RUN = """if fail == "bug":
    1 / 0
save_parameters(settings, project_root() / run_dir)
if fail == "kill":
    os.kill(os.getpid(), 9)
if fail == "wait":
    print("kernel", os.getpid(), flush=True)
    time.sleep(600)
if fail == "full":
    print("x\\n" * 100_000)
line = "/9 \N{FULL BLOCK} 00:01 left · contrastive 0.983  npc 3.319  xac 7.971 · 492 img/s · data 3% · 1.5 GB · total 4"
for i in range(1, 10):
    print(f"\\r{i}{line}", end="", flush=True)
    time.sleep(0.01)
print(flush=True)
print("step 9, validation: " + " · ".join(f"suite {i} 98.5 (-0.4)" for i in range(6)))
print("step 1 loss 0.5", flush=True)"""
BOMB = "\n".join(["data: &a0 [1]", *(f"b{i}: &a{i} [{9 * f'*a{i - 1}, '}]" for i in range(1, 19))])
IMPORTS = """import os, time
from c2lip.core.files import project_root
from c2lip.lab.training import launchers
from c2lip.lab.training.launchers import parameters, save_parameters
launchers._check_variables = None  # the engine has checked"""


@pytest.fixture
def toy(tmp_path):
    "A project with one launcher, in a folder whose name is a trap for path templates"
    root = tmp_path / "pro{j}ect"
    (root / "nbs").mkdir(parents=True)
    (root / "settings.ini").write_text("[DEFAULT]\nlib_name = c2lip\n")
    codes = IMPORTS, CELL, 'settings = parameters("train", globals())', RUN, "object()"
    cells = list(map(new_code_cell, codes))
    cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(new_notebook(metadata=KERNEL, cells=cells), root / "nbs" / "train.ipynb")
    return root


def results(root):
    "The only run folder, with its parameters"
    (folder,) = (root / "runs").iterdir()
    assert "injected-parameters" in (folder / "train.ipynb").read_text()
    return folder, json.loads((folder / "params.json").read_text())


def on_terminal(words, folder, columns):
    "A command on a pseudo-terminal: exit code, and the lines that then stand there"
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


def test_in_a_terminal(toy):
    "Exactly the card's line, on a pseudo-terminal, from the root"
    code, text, lines = on_terminal("papermill nbs/train.ipynb -p lambda_xac 0.01".split(), toy, 80)
    assert code == 0, text

    folder, params = results(toy)
    assert f"runs/{folder.name}" in text
    assert "step 1 loss 0.5" in lines

    for word in ("encryption", "object at 0x", "Executing"):
        assert word not in text
    assert (params["lambda_xac"], params["lr"], params["fail"]) == (0.01, 1e-5, "no")

    drawn = [row for row in re.split(r"[\r\n]", text.replace("\x1b[K", "")) if "/9 " in row]
    assert len({row[0] for row in drawn}) > 3 and all(len(row) < 80 for row in drawn[:-1]), "it is drawn again"
    assert [line.removeprefix("\x1b[K")[:3] for line in lines if "/9 " in line] == ["9/9"], "and stays once"


def test_with_pipes_from_the_notebooks_folder_and_again_from_its_record(toy, run):
    source = (toy / "nbs" / "train.ipynb").read_bytes()
    done = run("papermill", "train.ipynb", "-plr", "1e-5", cwd=toy / "nbs", stdin=None, input="not a notebook")
    assert done.returncode == 0 and "step 1 loss 0.5\n" in done.out and "Executing" not in done.out, done.out
    assert done.out.count("9/9 ") == 1 and done.out.count("/9 ") <= 3, "progress now and then, the last line once"
    assert all(letter.isprintable() or letter == "\n" for letter in done.out)
    assert "\n\n" not in done.out
    assert (toy / "nbs" / "train.ipynb").read_bytes() == source

    folder, params = results(toy)
    assert params["lr"] == 1e-5

    words = ["nbs/train.ipynb", "-f", folder / "params.json", "-p", "run_dir", "again"]
    again = run(sys.executable, "-m", "papermill", *words, cwd=toy)
    assert again.returncode == 0, again.out
    assert json.loads((toy / "again" / "params.json").read_text()) == params
    assert (toy / "again" / "train.ipynb").exists()


def test_any_setting_may_be_given(toy):
    "Those that the cell does not show, and options of a method"
    given = {"lambda_xac": 1, "clip_grad": 1, "method": "clic", "plain_every": 3, "run_dir": "x"}
    settings = check_run(toy / "nbs" / "train.ipynb", given)
    assert {name: settings[name] for name in given} == given


@pytest.mark.parametrize(
    "words, code, message",
    [
        ("-p run_dir settings.ini", 2, "settings.ini cannot be written: File exists"),
        ("-p run_dir nbs/x", 2, "belongs to the workbook"),
        ("-f absent.yaml", 2, "absent.yaml"),
        ("-f/dev/zero", 2, "/dev/zero cannot be read"),
        (["-y", BOMB], 2, "-y is not valid YAML: more than 100,000 values"),
        ("-p run_dir " + 300 * "x", 2, "cannot be written: File name too long"),
        (["-r", "lr = 1e-5; open('gone', 'w').close(); x", "1"], 2, "has no setting"),  # it would go into a cell
    ],
)
def test_refused_before_any_work(toy, run, words, code, message):
    "One line, and no file"
    before = set(toy.rglob("*"))
    done = run("papermill", "nbs/train.ipynb", *(words.split() if isinstance(words, str) else words), cwd=toy)
    assert (done.returncode, done.out.count("\n")) == (code, 1) and message in done.out, done.out
    assert done.out.startswith("c2lip: ")
    assert {path for path in toy.rglob("*") if path.name != "runs"} == before


@pytest.mark.parametrize("text", ["007", "2024_01_05", "nan", "None"])
def test_a_text_is_as_typed_and_every_terminal_shows_it(toy, run, text):
    "papermill guesses numbers; this terminal knows ASCII alone"
    ascii = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run("papermill", "nbs/train.ipynb", "-prun_dir", f"{text}/", cwd=toy, env=ascii)
    assert done.returncode == 0 and "total 4" in done.out and "step 9, validation: suite 0 98.5" in done.out, done.out
    assert (toy / text / "train.ipynb").exists()


def test_a_kernel_that_does_not_start(toy, run):
    "Another Python's: one line, and no folder is left"
    spec = toy / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text('{"argv": ["false"], "display_name": "x", "language": "python"}')
    done = run("papermill", "nbs/train.ipynb", "-p", "run_dir", "x", cwd=toy, env={"JUPYTER_PATH": str(toy)})
    assert done.returncode == 2 and "the kernel did not start" in done.out.splitlines()[-1], done.out
    assert not (toy / "x").exists()


def test_two_runs_at_once(toy, run):
    "The second one is refused before it writes, and the first one ends as it would alone"
    words = ["papermill", "nbs/train.ipynb", "-p", "run_dir", "x", "-p", "fail"]
    with subprocess.Popen([*words, "wait"], cwd=toy, stdout=subprocess.PIPE, text=True) as job:
        next(line for line in job.stdout if line.startswith("kernel "))
        before = {path: path.read_bytes() for path in (toy / "x").iterdir()}
        done = run(*words, "no", cwd=toy)
        assert {path: path.read_bytes() for path in (toy / "x").iterdir()} == before
        job.terminate()
    assert done.returncode == 2 and done.out.count("\n") == 1, done.out


def test_a_second_path_is_kept(toy, monkeypatch):
    monkeypatch.chdir(toy)
    for words in (["out.ipynb", "-p", "lr", "1"], ["-p", "lr", "1", "out.ipynb"]):
        line = complete_line(["papermill", "nbs/train.ipynb", *words])
        assert line[-len(words) :] == words
        assert "{run_dir}/train.ipynb" not in line
    (toy / "mine.ipynb").write_text("{}")
    with pytest.raises(UserError, match="papermill has not written"):
        complete_line(["papermill", "-plr", "1", "nbs/train.ipynb", "mine.ipynb"])
    with pytest.raises(UserError, match="belongs to the workbook"):
        complete_line(["papermill", "nbs/train.ipynb", "nbs/train.ipynb"])
    assert not (toy / "runs").exists()


@pytest.mark.parametrize(
    "how, code, message",
    [
        ("bug", 1, "c2lip: ZeroDivisionError: division by zero"),
        ("kill", 138, "c2lip: the kernel died: it was killed from outside"),
        ("full", 1, "File too large"),
    ],
)
def test_a_failing_notebook(toy, run, how, code, message):
    "An error of a cell, a kernel that is killed, a disk without room for the executed notebook: one line, and a way on"

    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    little_room = dict(preexec_fn=limit_files, env={"PYTHONDONTWRITEBYTECODE": "1"})  # Python would keep half a .pyc
    limit = little_room if how == "full" else {}
    done = run("papermill", "nbs/train.ipynb", "-p", "fail", how, "-p", "run_dir", "x", cwd=toy, **limit)
    (line,) = [line for line in done.out.splitlines() if line.startswith("c2lip: ") and "go to" not in line]
    assert (done.returncode, "Traceback" in done.out) == (code, False) and message in line, done.out
    way = "the executed notebook: x/train.ipynb" if how == "bug" else "x holds no checkpoint yet"
    assert way in done.out.splitlines()[-1]
    if how != "full":
        assert run_state(toy / "x") == "failed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal(toy, number):
    "Two lines, the kernel ends, and the exit code is the usual one"
    words = ["papermill", "nbs/train.ipynb", "-p", "fail", "wait", "-p", "run_dir", "x"]
    with subprocess.Popen(words, cwd=toy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        kernel = next(int(line.split()[1]) for line in job.stdout if line.startswith("kernel "))
        job.send_signal(number)
        shown = job.stdout.read()

    assert job.returncode == 128 + number and "Traceback" not in shown and "Aborted" not in shown, shown
    assert "c2lip: stopped by " in shown
    assert "start again" in shown
    assert run_state(toy / "x") == "stopped"
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)


FOREIGN = """import os, signal, sys
sys.argv = ["papermill", "nbs/train.ipynb", "out.ipynb", "-p", "lamda_xac", "1"]

def state():
    return list(sys.argv), sys.excepthook, signal.getsignal(signal.SIGTERM), os.environ.get("TRANSFORMERS_VERBOSITY")

before = state()
from papermill.cli import papermill
from papermill.engines import papermill_engines as held
assert "c2lip.lab.training.launch" in sys.modules and state() == before
engines, get_engine = set(), held.get_engine
held.get_engine = lambda name=None: engines.add(name) or get_engine(name)
papermill(standalone_mode=False)
assert engines == {None} and state() == before
"""


def test_papermill_of_another_project_is_stock(tmp_path, run):
    "With the library installed: its line, its engine, its hook, its signals, and nothing in the kernel"
    (tmp_path / "nbs").mkdir()
    (tmp_path / "settings.ini").write_text("[DEFAULT]\nlib_name = other\n")
    cells = [new_code_cell("lambda_xac = 0"), new_code_cell("import os\nlamda_xac, 'C2LIP_SETTINGS' in os.environ")]
    cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(new_notebook(metadata=KERNEL, cells=cells), tmp_path / "nbs" / "train.ipynb")
    done = run(sys.executable, "-c", FOREIGN, cwd=tmp_path)
    assert done.returncode == 0 and "c2lip: " not in done.out, done.out
    last = nbformat.read(tmp_path / "out.ipynb", 4).cells[-1]
    assert last.outputs[0].data["text/plain"] == "(1, False)"
