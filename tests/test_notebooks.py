"""Every notebook runs from top to bottom: chapters, and launchers with the small settings of data/smoke.yaml."""

import pytest
from conftest import ROOT

# Other tests run these under papermill, as small
ELSEWHERE = {"train", "evaluate", "compare"}
NOTEBOOKS = sorted(p.relative_to(ROOT) for p in (ROOT / "nbs").rglob("[0-9a-z]*.ipynb") if p.stem not in ELSEWHERE)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_notebook(path, run):
    done = run("nbdev-test", path, timeout=600)
    assert done.returncode == 0 and "Success." in done.out, done.out[-8000:]


def test_the_offline_guard_works():
    import socket

    with pytest.raises(OSError):
        socket.create_connection(("example.org", 80), timeout=1)
