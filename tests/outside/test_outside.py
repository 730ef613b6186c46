"""Our numbers against clip-benchmark's and the public SugarCrepe script's rule; see README.md beside this file."""

import json
import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("C2LIP_OUTSIDE", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="set C2LIP_OUTSIDE to the python of an environment made from tests/outside/requirements.txt"
)


@pytest.fixture(scope="module")
def both():
    "(rows of ours by (suite, name), what outside.py found)"
    from c2lip import evaluation, towers

    folder = evaluation.benchmark_folder("world", "test", items=300, images=1000)
    ours = evaluation.evaluate(
        towers.load("base"), folder, ["sugarcrepe", "retrieval"], ks=(1, 5, 10), progress=False, cache=None
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # the workbook's packages are not theirs
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("outside.py")), str(towers.base_folder()), str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {(r.suite, r.name_): r for r in ours.rename(columns={"name": "name_"}).itertuples()}, json.loads(done.stdout)


def test_sugarcrepe_rule(both):
    ours, theirs = both
    assert {t: ours["sugarcrepe", t].value for t in theirs["sugarcrepe_rule"]} == pytest.approx(
        {t: 100 * v for t, v in theirs["sugarcrepe_rule"].items()}
    )


def test_clip_benchmark_sugarcrepe(both):
    ours, theirs = both
    for task in theirs["sugarcrepe_rule"]:
        mine, value = ours["sugarcrepe", task], 100 * theirs["clip_benchmark"][f"sugar_crepe/{task}"]["text_acc"]
        assert mine.value - 1e-3 <= value <= mine.value + 100 * mine.ties / mine.n + 1e-3, task


def test_clip_benchmark_retrieval(both):
    ours, theirs = both
    found = theirs["clip_benchmark"]["mscoco_captions"]
    for name, key in (("t2i", "image_retrieval"), ("i2t", "text_retrieval")):
        for k in (1, 5, 10):
            mine, value = ours["retrieval", f"{name} R@{k}"], 100 * found[f"{key}_recall@{k}"]
            assert mine.value - 1e-3 <= value <= mine.value + 100 * mine.ties / mine.n + 1e-3, (name, k)
