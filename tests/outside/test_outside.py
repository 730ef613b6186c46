"""Our numbers against clip-benchmark's and the public SugarCrepe script's rule; see README.md beside this file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from writing import write_tar

PYTHON = Path(sys.prefix) / "outside" / "bin" / "python"
WITHOUT = "there is no environment for other people's code; make outside makes it"
pytestmark = [pytest.mark.skipif(not PYTHON.exists(), reason=WITHOUT), pytest.mark.timeout(1500)]


def link(file, target):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to(target)


def write_class_sets(folder, sets):
    "Drawn images as three sets, each as the tool and we both read it: class folders, numbered class folders, shards"
    task = json.loads((folder / "zeroshot" / "object.json").read_text())
    names = task["classnames"]
    items = task["items"]
    jpegs = []
    for n, item in enumerate(items):
        jpegs.append(sets.parent / "jpegs" / f"{n}.jpg")
        jpegs[-1].parent.mkdir(exist_ok=True)
        Image.open(folder / "images" / item["filename"]).convert("RGB").save(jpegs[-1], quality=95)

    theirs = sets / "caltech101" / "caltech101" / "101_ObjectCategories"
    for n in range(204):  # two images a class, whose names are the protocol's
        link(theirs / f"{n % 102:03}" / f"image_{n // 102 + 1:04}.jpg", jpegs[n])
    link(sets / "caltech101" / "test", theirs)
    for n in range(140):
        link(sets / "fer2013" / "test" / f"{n % 7}" / f"{n}.jpg", jpegs[n])
    shards = sets / "shards"
    (shards / "test").mkdir(parents=True)
    (shards / "test" / "nshards.txt").write_text("1")
    (shards / "classnames.txt").write_text("\n".join(names))
    (shards / "zeroshot_classification_templates.txt").write_text("a {c} in a scene.\nthe {c}")
    members = []
    for n, item in enumerate(items):
        members += [(f"{n:05}.jpg", jpegs[n].read_bytes()), (f"{n:05}.cls", str(item["label"]).encode())]
    write_tar(shards / "test" / "0.tar", members)
    return sorted(at.name for at in sets.iterdir())


def our_zero_shot(towers, sets, names):
    "Rows of ours; a set without a reader goes through `READERS`, as any user's would"
    from c2lip.lab.evaluation.readers.classes import read_class_set
    from c2lip.lab.evaluation.suites import READERS, evaluate

    added = {name: read_class_set for name in names if name not in READERS}
    READERS.update(added)
    try:
        return evaluate(towers, sets, names, progress=False)
    finally:
        for name in added:
            del READERS[name]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    "(rows of ours by (suite, name), what outside.py found)"
    from c2lip.lab.evaluation.suites import benchmark_folder, evaluate
    from c2lip.towers import load
    from c2lip.towers.folders import base_folder

    folder = benchmark_folder("world", "test", items=10, images=60, single=204)
    ours = evaluate(load("base"), folder, ["world_sugarcrepe_2", "retrieval"], ks=(1, 5, 10), progress=False)
    sets = tmp_path_factory.mktemp("classes") / "sets"
    zero_shot = our_zero_shot(load("base"), sets, write_class_sets(folder, sets))
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # the workbook's packages are not theirs
    words = [PYTHON, str(Path(__file__).with_name("outside.py")), str(base_folder()), str(folder), str(sets)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {(row["suite"], row["name"]): row for table in (ours, zero_shot) for row in table.to_dict("records")}
    return rows, json.loads(done.stdout)


def within_ties(mine, theirs):
    "Is their percentage ours, or above it by no more than our ties?"
    return mine["value"] - 1e-3 <= theirs <= mine["value"] + 100 * mine["ties"] / mine["n"] + 1e-3


def row_of(ours, task):
    return ours["world_sugarcrepe_2", "swap_obj_nouns" if task == "swap_obj" else task]


def test_sugarcrepe_rule(both):
    ours, theirs = both
    for task, share in theirs["sugarcrepe_rule"].items():
        assert row_of(ours, task)["value"] == pytest.approx(100 * share), task


def test_clip_benchmark_sugarcrepe(both):
    ours, theirs = both
    for task in theirs["sugarcrepe_rule"]:
        value = 100 * theirs["clip_benchmark"][f"sugar_crepe/{task}"]["text_acc"]
        assert within_ties(row_of(ours, task), value), task


def test_clip_benchmark_retrieval(both):
    ours, theirs = both
    found = theirs["clip_benchmark"]["mscoco_captions"]
    for name, key in (("t2i", "image_retrieval"), ("i2t", "text_retrieval")):
        for k in (1, 5, 10):
            value = 100 * found[f"{key}_recall@{k}"]
            assert within_ties(ours["retrieval", f"{name} R@{k}"], value), (name, k)


def test_clip_benchmark_zero_shot(both):
    ours, theirs = both
    assert len(theirs["zero_shot"]) == 3
    for name, found in theirs["zero_shot"].items():
        mine = ours[name, "top-1"]
        print(name, mine, found)
        assert within_ties(mine, 100 * found["acc1"]), name
        if mine["ties"] == 0:
            mean = ours[name, "top-1 mean of classes"]["value"]
            assert mean == pytest.approx(100 * found["mean_per_class_recall"], abs=1e-3), name


def test_protocol(both):
    from c2lip.lab.evaluation.readers.classes import protocol_names, protocol_templates

    theirs = both[1]["protocol"]
    names = {"fgvc_aircraft": "aircraft"}
    for name, templates in theirs["templates"].items():
        if name != "dummy":
            mine = protocol_templates(names.get(name, name))
            assert [template.replace("{}", "{c}") for template in mine] == templates, name
    for name, classes in theirs["classnames"].items():
        assert protocol_names(name, len(classes)) == classes, name
