"""Every notebook runs from top to bottom: chapters, and launchers with the small settings of data/smoke.yaml."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# test_launchers runs train under papermill, with the same small settings
NOTEBOOKS = sorted({p.stem for p in (ROOT / "nbs").rglob("[0-9a-z]*.ipynb")} - {"train"})
PARTS = 6  # each is a process of its own, which imports everything anew


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("part", range(PARTS))
def test_notebooks(run, part):
    names = "|".join(NOTEBOOKS[part::PARTS])
    words = "nbdev_test", "--n_workers", "1", "--do_print", "--path", "nbs", "--file_re", rf"^({names})\.ipynb$"
    done = run(*words, timeout=900)
    assert done.returncode == 0 and "Success." in done.out, "nbdev_test failed:\n" + done.out[-8000:]


def test_the_offline_guard_works():
    import socket

    with pytest.raises(OSError):
        socket.create_connection(("example.org", 80), timeout=1)
