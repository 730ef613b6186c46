"""What is asked last: did every notebook run, and did anything ask for another machine."""

import os
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
def test_every_notebook_runs(request):
    child, log = request.config.notebooks
    status = child.wait()
    log.seek(0)
    text = log.read()
    assert status == 0, "nbdev_test failed:\n" + text[-8000:]
    assert "Success." in text


def test_nothing_asked_for_another_machine():
    import socket

    with pytest.raises(OSError):
        socket.create_connection(("example.org", 80), timeout=1)  # the guard works
    clouds = {"169.254.169.254", "metadata.google.internal"}  # where Ray asks at its start whether it runs in one
    asked = [host for host in Path(os.environ["C2LIP_REFUSED"]).read_text().split() if host not in clouds]
    assert asked == ["example.org"], f"connections were refused to {sorted(set(asked))}"
