"""The launchers under papermill with tiny settings, as a user would type them; each run in a folder of its own."""

import json
from pathlib import Path

import pytest

from c2lip.core.files import read_json, read_yaml
from c2lip.training.config import launcher_settings
from c2lip.training.log import read_log

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "nbs" / "train.ipynb"


def tiny(path):
    "-p words that make a launcher small: those of data/smoke.yaml, which nbdev_test takes too"
    small = read_yaml(ROOT / "data" / "smoke.yaml")[path.stem]
    return [word for name, value in small.items() for word in ("-p", name, str(value))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "One tiny run of train.ipynb, shared by the tests that look at it"
    import subprocess

    folder = tmp_path_factory.mktemp("train") / "run"
    done = subprocess.run(
        ["papermill", "nbs/train.ipynb", *tiny(TRAIN), "-p", "lambda_xac", "0.01", "-p", "run_dir", str(folder)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return folder, done.stdout


def test_what_a_run_leaves(trained):
    folder, shown = trained
    names = {p.name for p in folder.iterdir()}
    assert {"train.ipynb", "params.json", "metrics.jsonl", "table.csv", "model", "tensorboard"} <= names
    assert any(n.endswith(".png") for n in names)
    params = json.loads((folder / "params.json").read_text())
    assert params["lambda_xac"] == 0.01 and set(params) <= set(launcher_settings(TRAIN))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps
    assert str(folder) in shown and "Traceback" not in shown


def test_stock_open_clip_reads_the_model(trained):
    import open_clip

    folder, _ = trained
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder / 'model'}")
    assert sum(p.numel() for p in model.parameters()) > 0 and preprocess is not None


def losses(folder):
    "The losses of every logged step"
    terms = ("contrastive", "npc", "xac", "total")
    return [{k: row[k] for k in terms if k in row} for row in read_log(folder)]


def test_the_record_repeats_the_run(trained, run, tmp_path):
    "params.json with -f: the same settings and the same losses"
    folder, _ = trained
    done = run(
        "papermill", "nbs/train.ipynb", "-f", folder / "params.json", "-p", "run_dir", tmp_path / "again", timeout=500
    )
    assert done.returncode == 0, done.out[-6000:]
    assert read_json(tmp_path / "again" / "params.json") == read_json(folder / "params.json")
    assert losses(tmp_path / "again") == losses(folder)


@pytest.mark.parametrize(
    "words, status, message",
    [
        ("-p lambda_xac -1", 2, "lambda_xac must be a number from 0 to 1000, not -1"),
        ("-p model ViT-B-61-SigLIP", 1, "ViT-B-16-SigLIP"),
    ],
)
def test_bad_input_is_one_clear_line(run, tmp_path, words, status, message):
    done = run("papermill", "nbs/train.ipynb", *tiny(TRAIN), "-p", "run_dir", tmp_path / "run", *words.split())
    lines = [line for line in done.out.splitlines() if line.startswith("c2lip: ") and "go to" not in line]
    assert done.returncode == status and "Traceback" not in done.out, done.out[-3000:]
    assert len(lines) == 1 and message in lines[0]
