"""All tests run offline, on one thread each; nbdev_test runs beside them and is the last to be asked."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OFFLINE = ROOT / "tests" / "offline"
sys.path.insert(0, str(OFFLINE))
os.environ["C2LIP_REFUSED"] = tempfile.mkstemp(prefix="c2lip-refused-")[1]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OFFLINE), os.environ.get("PYTHONPATH")]))
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "agg",
    "TOKENIZERS_PARALLELISM": "false",
}
import sitecustomize  # noqa: E402  (this process too)

assert Path(sitecustomize.__file__).parent == OFFLINE or not hasattr(sitecustomize, "_guard")


@pytest.fixture(autouse=True)
def offline():
    "No test reaches another machine: the guard stands in this process and its children"
    import socket

    assert socket.getaddrinfo.__name__ == "_lookup", "the offline guard is gone"


@pytest.fixture
def run():
    "run(words…, cwd=…): a command's result, its text in .out"

    def call(*words, cwd=ROOT, timeout=300, **kw):
        kw.setdefault("stdin", subprocess.DEVNULL)
        env = os.environ | kw.pop("env", {})
        done = subprocess.run(
            [str(w) for w in words],
            cwd=cwd,
            env=env,
            timeout=timeout,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **kw,
        )
        done.out = done.stdout
        return done

    return call


def pytest_collection_modifyitems(items):
    "What waits for the notebooks comes last"
    items.sort(key=lambda item: item.path.name == "test_notebooks.py")


def pytest_collection_finish(session):
    "Start nbdev_test when the whole collection asks for it: the tests run on one core, the notebooks on the other"
    if session.config.option.collectonly or not any(i.name == "test_every_notebook_runs" for i in session.items):
        return
    log = tempfile.TemporaryFile("w+", encoding="utf8")
    workers = "2" if len(session.items) < 20 else "1"
    session.config.notebooks = (
        subprocess.Popen(
            ["nbdev_test", "--n_workers", workers, "--do_print"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        ),
        log,
    )


def pytest_sessionfinish(session):
    child, _ = getattr(session.config, "notebooks", (None, None))
    if child and child.poll() is None:
        child.terminate()
    Path(os.environ["C2LIP_REFUSED"]).unlink(missing_ok=True)
