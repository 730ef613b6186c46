"""The checks of a call, and the train notebook under papermill with tiny settings, as a user would type it."""

import json
import re

import pandas as pd
import pytest
from conftest import ROOT
from fresh import assert_fresh

from c2lip.core import UserError
from c2lip.core.files import read_json, read_yaml, shipped
from c2lip.lab.training.launchers import CHECKS, launcher_settings
from c2lip.lab.training.log import read_log
from c2lip.lab.training.run import train


def small(launcher):
    "Words of the settings of data/smoke.yaml, which nbdev_test takes too"
    settings = read_yaml(shipped("smoke.yaml"))[launcher]
    return [word for name, value in settings.items() for word in ("-p", name, str(value))]


TINY = small("train")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, run):
    "One tiny run, shared by the tests that look at it"
    folder = tmp_path_factory.mktemp("train") / "run"
    words = [*TINY, "-p", "lambda_xac", "0.01", "-p", "run_dir", folder]
    done = run("papermill", "nbs/train.ipynb", *words, timeout=500)
    assert done.returncode == 0, done.out[-6000:]
    return folder, done.out


def test_what_a_run_leaves(trained):
    folder, shown = trained
    names = {p.name for p in folder.iterdir()}
    assert {"train.ipynb", "params.json", "metrics.jsonl", "table.csv", "model", "tensorboard"} <= names
    assert any(n.endswith(".png") for n in names)
    rows = pd.read_csv(folder / "table.csv").drop_duplicates(["suite", "name"])
    assert set(rows.name[rows.suite == "phrases/binding"]) == set(
        rows.name[rows.suite == "binding"]
    )  # none is left out
    assert len(re.findall(r"^ +(?:parts|phrases|vector|v·t) ", shown[shown.index("Binding") :], re.M)) <= 12
    assert "vector/retrieval" in set(rows.suite)
    assert (folder / "model" / "vector_head.safetensors").is_file()
    params = json.loads((folder / "params.json").read_text())
    assert params["lambda_xac"] == 0.01
    assert set(params) <= set(launcher_settings("nbs/train.ipynb"))
    assert str(folder) in shown
    assert "Traceback" not in shown
    assert_fresh(folder / "train.ipynb", ROOT / "nbs" / "train.ipynb", small=True)


def losses(folder):
    "The losses of every logged step"
    terms = ("contrastive", "npc", "xac", "total")
    return [{k: row[k] for k in terms if k in row} for row in read_log(folder)]


def test_the_record_repeats_the_run(trained, tmp_path):
    "The settings in params.json, in another process, give the same losses"
    train({**read_json(trained[0] / "params.json"), "run_dir": ""}, tmp_path)
    assert losses(trained[0])
    assert losses(tmp_path) == losses(trained[0])


def test_a_comparison_shows_binding_by_both_scores(run, tmp_path):
    "The default plan: every method, its average with the base, and a figure"
    words = ["-p", "run_dir", tmp_path / "run"]
    done = run("papermill", "nbs/compare.ipynb", *small("compare"), *words, timeout=500)
    assert done.returncode == 0, done.out[-6000:]
    assert (tmp_path / "run" / "methods.png").is_file()
    assert_fresh(tmp_path / "run" / "compare.ipynb", ROOT / "nbs" / "compare.ipynb", small=True)


OURS = {"params.json": '{"seed": 0}', "checkpoint.pt": ""}
HERE = "the folder"
WRONG = {  # check → files of the run folder, settings, words of the refusal
    "method": ({}, {"method": "c2lipp"}, "did you mean c2lip?"),
    "model": ({}, {"model": "ViT-B-61-SigLIP"}, "ViT-B-16-SigLIP"),
    "data": ({}, {"data": HERE + "s"}, "there is no data at "),
    "resume": ({}, {"resume": True, "run_dir": ""}, "needs the run_dir of a run"),
    "averages": ({}, {"models": ["base"], "alphas": [0.5]}, "give at least two models"),
    "check_folder": (OURS, {"seed": 0, "resume": False}, "holds a run (checkpoint.pt)"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check, tmp_path):
    "Each refuses what it is for, in one line, and lets an empty folder with the defaults pass"
    files, given, words = WRONG[check.__name__.removeprefix("_check_")]
    defaults = {name: setting.default for name, setting in launcher_settings("nbs/train.ipynb").items()}
    check("train", tmp_path, defaults | {"run_dir": str(tmp_path)})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    settings = {"run_dir": HERE} | given
    settings = {k: v.replace(HERE, str(tmp_path)) if isinstance(v, str) else v for k, v in settings.items()}
    with pytest.raises(UserError) as e:
        check("train", tmp_path, settings)

    assert words in str(e.value)
    assert "\n" not in str(e.value)


def test_a_refused_call_leaves_a_finished_run_as_it_was(trained, run):
    def state():
        return {path: path.read_bytes() for path in trained[0].rglob("*") if path.is_file()}

    before = state()
    given = [*TINY, "-p", "lambda_xac", "0.01", "-p", "run_dir", trained[0]]
    for words, message in ((["-p", "resume", "True", "-p", "epochs", 9], "train on from its end"), ([], "holds a run")):
        done = run("papermill", "nbs/train.ipynb", *given, *words)
        assert done.returncode == 2 and message in done.out and state() == before, done.out[-3000:]
    (trained[0] / "checkpoint.pt").write_bytes(b"damaged")
    done = run("papermill", "nbs/train.ipynb", *given, "-p", "resume", "True")  # seen in the kernel
    assert done.returncode == 2 and "cannot go on" in done.out, done.out[-3000:]
    assert state() == before | {trained[0] / "checkpoint.pt": b"damaged"}
