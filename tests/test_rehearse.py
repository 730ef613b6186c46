"""A run is rehearsed: each planted fault is one line that names it, and a right folder passes."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT
from PIL import Image

from c2lip.lab.dev.command import main
from c2lip.lab.training import rehearse as room
from c2lip.lab.training.config import read_settings
from c2lip.towers import load, save


def read(home):
    text = (ROOT / "tests" / "data" / "faults.yaml").read_text(encoding="utf8")
    return yaml.safe_load(text.replace("{home}", str(home)).replace("{python}", sys.executable))


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    "A small model, shards, suites"
    home = tmp_path_factory.mktemp("right")
    save(load("base"), home / "small", {"kind": "pretrained"})
    Image.new("RGB", (96, 96)).save(home / "96.jpg")
    subprocess.run(["bash", "-ec", read(home)["right"]], cwd=home, check=True)
    return home


def test_a_right_folder_passes(right, capsys):
    words = [word for pair in read(right)["settings"].items() for word in ("-p", *map(str, pair))]
    code = main(["rehearse", "c2lip_paper", *words, "--benchmarks", str(right / "benchmarks"), "--json"])
    shown = capsys.readouterr().out
    assert code == 0, shown
    texts = str([json.loads(line)["text"] for line in shown.splitlines()])
    assert re.search("sugarcrepe 79.5.*about 100 images.*30 steps.*5 shards are whole.*hours", texts), texts


def nothing(patch):
    "This machine as it is"


def old_driver(patch):
    patch.setattr("torch.cuda.device_count", lambda: 8)
    patch.setattr("torch.cuda.is_available", lambda: False)


def gpu(patch, free, major):
    "A GPU of 80 GiB"
    patch.setattr(room, "check_gpus", lambda gpus, device: 1)
    patch.setattr(room, "pick_device", lambda name: torch.device("cuda"))
    patch.setattr("torch.cuda.get_device_properties", lambda number: SimpleNamespace(name="A GPU", major=major))
    patch.setattr("torch.cuda.mem_get_info", lambda number: (free << 30, 80 << 30))


def small_gpu(patch):
    "A GPU that holds a quarter of the batch"
    train = room.train

    def fits(settings, folder, setup):
        if setup.cfg.accumulate < 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(settings, folder, setup)

    patch.setattr(room, "train", fits)


def small_disk(patch, free):
    patch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))


@pytest.mark.parametrize("name", read("")["faults"])
def test_a_fault_is_one_line(name, right, tmp_path, monkeypatch):
    home = tmp_path / "home"
    all_of = read(home)
    fault = {"do": [], "stand_in": ["nothing"], "settings": {}, "goes_on": ""} | all_of["faults"][name]
    script = "\n".join([f"cp -rl {right} {home}", f"cd {home}", *fault["do"]])
    subprocess.run(["bash", "-ec", script], check=True)
    stand_in, *how = fault["stand_in"]
    globals()[stand_in](monkeypatch, *how)

    recipe = read_settings(ROOT / "data" / "recipes" / "c2lip_paper.yaml")
    lines = room.rehearse(recipe | all_of["settings"] | fault["settings"], home / "benchmarks")
    found, *later = [line.text for line in lines if line.state == "WRONG"]
    assert re.search(fault["says"], found), found
    assert re.search(fault["goes_on"], str(later)), later
