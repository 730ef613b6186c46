"""Every notebook runs from top to bottom: chapters, and launchers with the small settings of data/smoke.yaml."""

import multiprocessing
import os

import pytest
from conftest import ROOT
from nbdev.test import nbdev_test

# Other tests run these two under papermill, as small
ELSEWHERE = {"train", "evaluate"}
NOTEBOOKS = sorted(p.relative_to(ROOT) for p in (ROOT / "nbs").rglob("[0-9a-z]*.ipynb") if p.stem not in ELSEWHERE)


def _test_notebook(path, log):
    "What `nbdev_test --path …` does, in a process of its own"
    os.chdir(ROOT)
    multiprocessing.set_start_method(None, force=True)  # the platform's own, not that of this process
    with open(log, "wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    nbdev_test(path=str(path), n_workers=0)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_notebook(path, tmp_path):
    "Forked from a process that has imported the library (conftest), so that 130 notebooks need not"
    log = tmp_path / "log.txt"
    process = multiprocessing.get_context("forkserver").Process(target=_test_notebook, args=(path, log))
    process.start()
    process.join(600)
    if process.is_alive():
        process.kill()
        process.join()
    said = log.read_text(errors="replace") if log.exists() else ""
    assert process.exitcode == 0 and "Success." in said, f"nbdev_test --path {path} failed:\n{said[-8000:]}"


def test_nbdev_test_is_a_command(run):
    done = run("nbdev_test", "--path", "nbs/1_method/01_core.ipynb")
    assert done.returncode == 0 and "Success." in done.out, done.out


def test_the_offline_guard_works():
    import socket

    with pytest.raises(OSError):
        socket.create_connection(("example.org", 80), timeout=1)
