"""Notebooks run, launchers with the small settings of data/smoke.yaml; study and launchers show what they store."""

import sys

import pytest
from conftest import ROOT
from fresh import assert_fresh

ELSEWHERE = {"train", "compare"}
"Other tests run these under papermill, as small"
NOTEBOOKS = sorted(p.relative_to(ROOT) for p in (ROOT / "nbs").rglob("[0-9a-z]*.ipynb") if p.stem not in ELSEWHERE)
SMALL = {"evaluate", "explore", "pretrain", "tour", "walkthrough"}
"Of these the heads of tables are compared"


@pytest.mark.timeout(700)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_notebook(path, run, tmp_path):
    done = run(sys.executable, "-m", "shown", path, tmp_path / "made.ipynb", timeout=600)
    assert done.returncode == 0 and "Success." in done.out, done.out[-8000:]
    if path.parent.name in ("nbs", "9_study"):
        assert_fresh(tmp_path / "made.ipynb", ROOT / path, small=path.stem in SMALL)


def test_the_offline_guard_works():
    import socket

    with pytest.raises(OSError):
        socket.create_connection(("example.org", 80), timeout=1)
