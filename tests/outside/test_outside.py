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
    from c2lip.evaluation.folders import benchmark_folder
    from c2lip.evaluation.suites import evaluate
    from c2lip.towers import load
    from c2lip.towers.folders import base_folder

    folder = benchmark_folder("world", "test", items=300, images=1000)
    ours = evaluate(load("base"), folder, ["sugarcrepe", "retrieval"], ks=(1, 5, 10), progress=False, cache=None)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # the workbook's packages are not theirs
    done = subprocess.run(
        [PYTHON, str(Path(__file__).with_name("outside.py")), str(base_folder()), str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {(row["suite"], row["name"]): row for row in ours.to_dict("records")}
    return rows, json.loads(done.stdout)


def within_ties(mine, theirs):
    "Is their percentage ours, or above it by no more than our ties?"
    return mine["value"] - 1e-3 <= theirs <= mine["value"] + 100 * mine["ties"] / mine["n"] + 1e-3


def test_sugarcrepe_rule(both):
    ours, theirs = both
    for task, share in theirs["sugarcrepe_rule"].items():
        assert ours["sugarcrepe", task]["value"] == pytest.approx(100 * share), task


def test_clip_benchmark_sugarcrepe(both):
    ours, theirs = both
    for task in theirs["sugarcrepe_rule"]:
        value = 100 * theirs["clip_benchmark"][f"sugar_crepe/{task}"]["text_acc"]
        assert within_ties(ours["sugarcrepe", task], value), task


def test_clip_benchmark_retrieval(both):
    ours, theirs = both
    found = theirs["clip_benchmark"]["mscoco_captions"]
    for name, key in (("t2i", "image_retrieval"), ("i2t", "text_retrieval")):
        for k in (1, 5, 10):
            value = 100 * found[f"{key}_recall@{k}"]
            assert within_ties(ours["retrieval", f"{name} R@{k}"], value), (name, k)
