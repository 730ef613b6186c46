"""Every notebook runs from top to bottom: chapters, and launchers with the small settings of data/smoke.yaml."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted(p.name for p in (ROOT / "nbs").iterdir() if p.is_dir() and p.name[0].isdigit())
LAUNCHERS = sorted(p.name for p in (ROOT / "nbs").glob("[a-z]*.ipynb"))


def passes(run, *words):
    done = run("nbdev_test", "--n_workers", "1", "--do_print", *words, timeout=900)
    assert done.returncode == 0 and "Success." in done.out, "nbdev_test failed:\n" + done.out[-8000:]


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_chapter(run, chapter):
    passes(run, "--path", f"nbs/{chapter}")


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("part", range(3))
def test_launchers(run, part):
    names = "|".join(name.removesuffix(".ipynb") for name in LAUNCHERS[part::3])
    passes(run, "--path", "nbs", "--file_re", rf"^({names})\.ipynb$", "--skip_folder_re", r"^[_.\d]")


def test_the_offline_guard_works():
    import socket

    with pytest.raises(OSError):
        socket.create_connection(("example.org", 80), timeout=1)
