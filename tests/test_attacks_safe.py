"""What an attack on an older version found: each ends in one clear line, and nothing is lost."""

import json
import os
import pickle
import re
import resource
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from conftest import ROOT, without_library
from PIL import Image
from writing import Canary, encoded, write_tar

from c2lip.concepts import canonical_caption, load_pipeline
from c2lip.core import UserError, in_workers
from c2lip.core.files import parse_yaml, read_json, shipped, whole, write_json
from c2lip.lab.attention.explorer import Explorer
from c2lip.lab.data.images import BadImage, open_image
from c2lip.lab.data.prepare import prepare
from c2lip.lab.data.records import Skips
from c2lip.lab.data.sources import Tables, find_source, open_data
from c2lip.lab.evaluation.readers.classes import read_classes
from c2lip.lab.evaluation.results import keep_record
from c2lip.lab.evaluation.suites import read_folder
from c2lip.lab.serve.search import index_images
from c2lip.lab.training.config import Config, complete
from c2lip.lab.training.launch import check_run, complete_line
from c2lip.lab.training.launchers import save_parameters
from c2lip.lab.training.log import read_log
from c2lip.lab.training.run import train
from c2lip.lab.world.base_model import new_towers
from c2lip.score import scores_of, to_sentence_transformers
from c2lip.towers import convert, load, save
from c2lip.towers.folders import base_folder, keep_fitted
from c2lip.towers.onnx import export_onnx
from c2lip.towers.transformers import to_hugging_face

pytestmark = pytest.mark.timeout(90)  # no case may wait for ever
WEIGHTS = "open_clip_model.safetensors"
CONFIG = "open_clip_config.json"
SMALL = dict(images=32, batch_size=8, epochs=1, warmup=1, log_every=1, save_every=2, threads=1, batches="random")


def refused(function, *words):
    "The message of a `UserError`: one line, printable, with these words"
    with pytest.raises(UserError) as caught:
        function()
    message = str(caught.value)
    assert message.isprintable() and len(message) <= 2000, message
    for word in words:
        assert word in message, message
    return message


def table(folder, n=12, form="csv"):
    "A folder of images with their captions: in a table, or each beside its image (txt)"
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["image,caption"]
    for i in range(n):
        Image.new("RGB", (16, 16), (6 * i, 0, 99)).save(folder / f"i{i}.png")
        lines.append(f"i{i}.png,a red mug number {i} and a blue box")
        if form == "txt":
            (folder / f"i{i}.txt").write_text(lines[-1].partition(",")[2])
    if form == "csv":
        (folder / "captions.csv").write_text("\n".join(lines) + "\n")
    return folder


def read(source, folder, limit=0.9):
    "The records of a source and what was left out, by cause"
    skips = Skips(limit)
    return open_data(source, skips=skips, index_folder=folder / "cache"), skips.counts


# What a run can lose


@contextmanager
def largest_file(size=1_000_000):
    "No file of this process grows beyond so many bytes, as on a disk that is full"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would keep half a .pyc
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes


def test_a_full_disk(tmp_path, capfd):
    "In the settings, the log, the first checkpoint or a later one: one line each, with the way on"
    for size, words in ((20, "File too large"), (300, "File too large"), (1_000_000, "step 2: the checkpoint")):
        folder = tmp_path / str(size)
        with largest_file(size):
            refused(lambda: train(SMALL, folder), str(folder), words, "there is no checkpoint yet")  # noqa: B023
        assert not list(folder.glob("checkpoint*"))
    with largest_file():
        refused(lambda: save(load("base"), tmp_path / "model"), "model cannot be written (File too large)")
    assert not list((tmp_path / "model").glob("*.tmp"))

    train({**SMALL, "keep_checkpoint": True}, tmp_path / "run")
    (tmp_path / "run" / "checkpoint.pt").unlink()  # a kill between two: the one before is whole
    with largest_file():
        again = {**SMALL, "resume": True}
        refused(lambda: train(again, tmp_path / "run"), "step 4: the checkpoint", "from its last checkpoint")
    assert train({**SMALL, "resume": True}, tmp_path / "run")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("moment", range(9))
def test_a_release_is_the_old_one_or_the_new_one(tmp_path, monkeypatch, moment):
    "A kill while it is written, or before one of its files is moved: nothing is loaded but what is whole"
    older = load("base")
    save(older, tmp_path / "model")
    newer = load("base")
    with torch.no_grad():
        newer.model.logit_bias += 1
    moved = []
    move = Path.replace

    def killed(file, place):
        if len(moved) == moment:
            raise KeyboardInterrupt
        moved.append(Path(place).parent)
        return move(file, place)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save(newer, tmp_path / "model")
    monkeypatch.undo()
    begun = tmp_path / "model" in moved
    assert begun == (moment > 3)
    if begun and moment < 7:  # the weights are of the older one
        refused(lambda: load(str(tmp_path / "model")), "as a killed process leaves it: save it anew")
    elif not begun:
        assert torch.equal(load(str(tmp_path / "model")).model.logit_bias, older.model.logit_bias)
    save(newer, tmp_path / "model")
    assert torch.equal(load(str(tmp_path / "model")).model.logit_bias, newer.model.logit_bias)
    assert not list((tmp_path / "model").glob(".*"))


def contents(home):
    "Everything below a folder, as it lies there: what it is, where it leads, when it was changed, what it holds"
    listed = {}
    for path in sorted(home.rglob("*")):
        about = path.lstat()
        held = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        listed[path] = (about.st_mode, about.st_mtime_ns, about.st_ino, held)
    return listed


def photographs(folder):
    "Three images, each with its caption"
    return str(table(folder, 12, "txt"))


DOORS = {
    "load": lambda model, _: load(model),
    "scores_of": lambda model, _: scores_of(replace(load("base"), name=model)),
    "save": lambda model, _: save(load("base"), model),
    "keep_fitted": lambda model, _: keep_fitted(model, {"presence": {"slope": 20.0, "offset": 1.0}}),
    "convert": lambda _, home: convert(base_folder() / WEIGHTS, home / "transformers", "base"),
    "to_hugging_face": lambda model, home: to_hugging_face(load("base_clip"), home / "transformers"),
    "sentence-transformers": lambda model, _: to_sentence_transformers(load("base"), model),
    "onnx": lambda model, home: export_onnx(load("base"), home / "onnx"),
    "index": lambda model, home: index_images(photographs(home / "photos"), home / "index", model),
    "prepare": lambda model, home: prepare(photographs(home / "photos"), home / "prepared", progress=False),
    "open_data": lambda model, home: open_data(photographs(home / "photos"), index_folder=home / "cache"),
    "keep_record": lambda model, home: keep_record("record", {}, "a line", folder=home),
}
TRAPS = [".whole", ".x.tmp", ".lock", "record.json.tmp", "score.json.tmp", f"{WEIGHTS}.tmp", "c2lip-index.json.tmp"]
TRAPS += ["index.csv.tmp", "mine.images.npy", "0123456789abcdef.npy", "config.json.tmp", "preprocess.json.tmp"]


@pytest.mark.parametrize("turn, door", enumerate(DOORS))
def test_what_is_not_ours_stays_as_it_lies(tmp_path, turn, door):
    "Something of others beside each file that is ever written: every door reads and writes past it"
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / CONFIG).write_text("of the user")
    theirs = [documents / CONFIG]
    save(load("base"), tmp_path / "model")
    for place in ("model", "transformers", "onnx", "index", "prepared", "record", "cache", "."):
        (tmp_path / place).mkdir(exist_ok=True)
        for number, path in enumerate(tmp_path / place / name for name in TRAPS):
            match (number + turn) % 4:
                case 0:
                    path.symlink_to(documents)
                case 1:
                    shutil.copytree(documents, path)
                    theirs.append(path / CONFIG)
                case 2:
                    path.write_text("of the user")
                case _:
                    os.mkfifo(path)
            theirs.append(path)

    before = contents(tmp_path)
    DOORS[door](str(tmp_path / "model"), tmp_path)
    after = contents(tmp_path)
    kept = list(before) if door in ("load", "scores_of") else theirs
    assert {path: after.get(path) for path in kept} == {path: before[path] for path in kept}


def test_what_is_written_on_a_full_disk_is_not_begun(tmp_path, monkeypatch):
    "One line each, and an empty folder: a model for transformers, the explorer's figures, a record, a table"
    explorer = Explorer(["base"])
    clip = load("base_clip")
    rows = pd.DataFrame({"value": range(10**5)})
    writers = [lambda: to_hugging_face(clip, tmp_path / "a"), lambda: explorer.save(f"{tmp_path}/a")]
    writers += [lambda: keep_record("a", {"trials": rows}, "a line", folder=tmp_path)]
    for write in writers:
        with largest_file(200_000):
            refused(write, str(tmp_path / "a"), "cannot be written (File too large); make room")
        assert not list((tmp_path / "a").iterdir())


def test_a_run_is_not_written_over(tmp_path):
    train(SMALL, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.glob("*.*")}
    refused(lambda: train({**SMALL, "seed": 3}, tmp_path), "another run_dir", "resume True")
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.*")} == before

    for name in ("params.json", "metrics.jsonl", "checkpoint.pt"):
        os.mkfifo(tmp_path / f"{name}.tmp")
    (tmp_path / "metrics.jsonl").write_text("null\n7\n{}\n" + (tmp_path / "metrics.jsonl").read_text())
    train({**SMALL, "resume": True}, tmp_path)
    assert len(read_log(tmp_path)) == 4

    for name in ("skipped.jsonl", "metrics.jsonl", "tensorboard"):
        os.rename(tmp_path / name, tmp_path / "aside")
        os.mkfifo(tmp_path / name)
        refused(lambda: train({**SMALL, "resume": True}, tmp_path), name, "cannot be written")  # noqa: B023
        os.replace(tmp_path / "aside", tmp_path / name) if name[-1] == "l" else (tmp_path / name).unlink()


def test_a_resumed_run_has_what_it_began_with(tmp_path):
    "The captions, the images that lie in the table itself, the weights of the start; neighbours only of a checkpoint"
    data = tmp_path / "data" / "t.parquet"
    run = tmp_path / "run"
    start = changed_release(tmp_path / "start", "record.json", lambda held: held.pop("sha256"))
    folder = table(tmp_path / "data", 40)
    rows = [{"image": (folder / f"i{i}.png").read_bytes(), "caption": f"a red mug {i} and a box"} for i in range(40)]
    settings = {**SMALL, "data": str(data), "hold_back": 0.0, "model": start, "batches": "neighbours", "resume": True}
    run.mkdir()
    save_parameters(complete(settings), run)
    np.save(run / "neighbours.npy", np.zeros((40, 3), np.int32))  # of a run that died

    for change in ("", "captions", "image", "weights"):
        changed = [row | {"caption": row["caption"].replace("mug 5", "cup 5")} for row in rows]
        if change == "image":
            changed = [row | {"image": other["image"]} for row, other in zip(rows, rows[::-1])]
        pd.DataFrame(changed if change in ("captions", "image") else rows).to_parquet(data)
        if change == "weights":
            held = safetensors.torch.load_file(Path(start) / WEIGHTS)
            safetensors.torch.save_file(held | {"logit_bias": held["logit_bias"] + 1}, Path(start) / WEIGHTS)
        if change:
            refused(lambda: train(settings, run), {"image": "captions", "weights": "first_weights"}.get(change, change))
        else:
            train(settings, run)
            assert np.load(run / "neighbours.npy").any()


def test_a_folder_of_the_users_own_is_no_run_dir(tmp_path):
    for name in ("train.ipynb", "table.csv", "model/open_clip_config.json", "t.parquet"):
        place = tmp_path / name.replace("/", "-")
        (place / name).parent.mkdir(parents=True)
        (place / name).write_text("{}")
        for given in ({}, {"resume": True})[: 1 + (place / name).parent.samefile(place)]:
            call = partial(check_run, ROOT / "nbs" / "train.ipynb", {"run_dir": str(place), **given})
            refused(call, "holds", name.split("/")[0], "another run_dir")

    for name in ("README.md", "settings.ini"):
        line = ["papermill", str(ROOT / "nbs" / "train.ipynb"), name]
        refused(partial(complete_line, line), f"{name} is no place for the executed notebook")
    call = partial(check_run, ROOT / "nbs" / "train.ipynb", {"run_dir": str(tmp_path), "data": str(tmp_path)})
    refused(call, "holds", "another run_dir")
    for left in ("checkpoint.pt", "checkpoint.previous.pt", "metrics.jsonl"):
        (tmp_path / left).write_text("")
        call = partial(check_run, ROOT / "nbs" / "compare.ipynb", {"run_dir": str(tmp_path)})
        refused(call, f"holds {left}, which is of no run of compare", "another run_dir")
        (tmp_path / left).unlink()


# Releases


def changed_release(folder, name, change):
    "A copy of the base model, one of whose files is changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base_folder(), folder)
    if name.endswith("safetensors"):
        held = safetensors.torch.load_file(folder / name)
        change(held)
        safetensors.torch.save_file(held, folder / name)
    else:
        held = json.loads((folder / name).read_text())
        change(held)
        (folder / name).write_text(json.dumps(held))

    return str(folder)


def far_id(tokenizer):
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] += 1000


def twice(tokenizer):
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [rule] * 40}


PLACES = "text.positional_embedding"


@pytest.mark.parametrize(
    "name, change, words",
    [
        (WEIGHTS, lambda held: held.pop("logit_bias"), ("Missing key", "logit_bias")),
        (WEIGHTS, lambda held: held.update(extra=torch.zeros(2)), ("Unexpected key", "extra")),
        (WEIGHTS, lambda held: held.update({PLACES: held[PLACES][1:].contiguous()}), ("size mismatch", PLACES)),
        (
            CONFIG,
            lambda cfg: cfg["model_cfg"]["text_cfg"].update(layers=1_000_000),
            ("layers must be from 1 to 999",),
        ),
        (CONFIG, lambda cfg: cfg["model_cfg"].update(embed_dim=65), ("size mismatch",)),
        (CONFIG, lambda cfg: cfg.pop("model_cfg"), ("lacks 'model_cfg'",)),
        (CONFIG, lambda cfg: cfg.pop("preprocess_cfg"), ("lacks 'preprocess_cfg'",)),
        (CONFIG, lambda cfg: cfg.update(preprocess_cfg=["mean", "std"]), ("a value that does not fit",)),
        (CONFIG, lambda cfg: cfg["preprocess_cfg"].pop("std"), ("lacks 'std'", "would take OpenAI's")),
        (CONFIG, lambda cfg: cfg["model_cfg"]["text_cfg"].update(eos_id=7), ("at another token (pool_type eos)",)),
        (CONFIG, lambda cfg: cfg["model_cfg"]["text_cfg"].update(pool_type="argmax"), ("at another token",)),
        (CONFIG, lambda cfg: cfg["model_cfg"]["text_cfg"].update(heads=4), ("SHA-256 differs",)),
        (CONFIG, lambda cfg: cfg["model_cfg"].update(quick_gelu="no"), ("quick_gelu must be True or False",)),
        (WEIGHTS, lambda held: held.update(logit_bias=held["logit_bias"] > 0), ("is of torch.bool",)),
        (CONFIG, lambda cfg: cfg["preprocess_cfg"].update(size=48), ("48 pixels (size), the model has 96",)),
        (CONFIG, lambda cfg: cfg["preprocess_cfg"].update(std=[0, 0, 0]), ("std must be from 0.001",)),
        (WEIGHTS, lambda held: held["logit_scale"].fill_(1e4), ("not finite, in logit_scale",)),
        (WEIGHTS, lambda held: held["text.ln_final.bias"].add_(1), ("SHA-256 differs", "check_release False")),
        ("tokenizer.json", far_id, ("the tokenizer has ids up to",)),
        ("tokenizer.json", lambda held: held["model"].update(vocab={}, merges=[]), ("gives no token",)),
        ("tokenizer.json", twice, ("1,000 times longer",)),
        ("tokenizer_config.json", lambda held: held.update(padding_side="left"), ("padding_side must be right",)),
    ],
)
def test_a_release_is_compared_before_it_is_built(tmp_path, name, change, words):
    refused(lambda: load(changed_release(tmp_path / "model", name, change)), *words)


CODE = "from pathlib import Path\nPath('canary').mkdir()\nclass Evil: pass\n"
MAPS = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}


@pytest.mark.parametrize(
    "name, change, key",
    [
        ("tokenizer_config.json", {"auto_map": MAPS}, "auto_map"),
        ("tokenizer_config.json", {"tokenizer_class": "Evil"}, "SHA-256 differs"),
        ("config.json", {"auto_map": MAPS, "model_type": "evil"}, "auto_map"),
        (CONFIG, {"tokenizer_kwargs": {"trust_remote_code": True}}, "trust_remote_code"),
    ],
)
def test_no_code_of_a_model_folder_runs(tmp_path, monkeypatch, name, change, key):
    "By name, from the hub's cache, as the start of a run, in new towers; also where standard input says yes"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    cache = tmp_path / "models--somebody--evil"
    change_text = lambda cfg: cfg["model_cfg"]["text_cfg"].update(change)  # noqa: E731
    folder = Path(changed_release(cache / "snapshots" / "1", CONFIG, change_text))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("1")
    (folder / "evil.py").write_text(CODE)
    if name != CONFIG:
        shutil.copy(base_folder() / CONFIG, folder)
        held = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(held | change))

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    doors = [partial(load, str(folder)), partial(load, "hf-hub:somebody/evil")]
    doors += [partial(train, {**SMALL, "model": str(folder), "resume": True}, tmp_path / "run")]
    doors += [partial(Explorer, [str(folder)])]
    for door in doors:
        refused(door, name, key)
    if name != CONFIG:
        new_towers(folder)  # reads the tokenizer alone, as data
    if "tokenizer_class" in change:
        (folder / "record.json").unlink()
        load(str(folder))  # whatever class it names
    assert not (tmp_path / "canary").exists()

    exec(CODE, {})
    assert (tmp_path / "canary").exists()


def test_no_code_of_a_pipeline_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(shipped("pipeline"), tmp_path / "pipeline")
    config = (folder / "config.cfg").read_text()
    assert "after_creation = null" in config

    changed = config.replace("after_creation = null", 'after_creation = {"@callbacks": "evil"}')
    (folder / "config.cfg").write_text(changed)
    (folder / "evil.py").write_text(CODE)
    words = str(folder / "config.cfg"), "code of its own", "evil"
    table(tmp_path / "data")
    refused(lambda: load_pipeline(str(folder)), *words)
    refused(lambda: prepare(str(tmp_path / "data"), tmp_path / "out", nlp=str(folder), progress=False), *words)
    assert not (tmp_path / "canary").exists()


def test_a_pickled_benchmark_is_not_opened(tmp_path, monkeypatch):
    "CIFAR as torchvision keeps it, a member of a shard of classes, the file of a suite"
    monkeypatch.chdir(tmp_path)
    evil = pickle.dumps(Canary(tmp_path / "canary"))
    for name in ("cifar10/cifar-10-batches-py/data_batch_1", "set/test/a", "own/retrieval.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(evil)
    (tmp_path / "set" / "classnames.txt").write_text("a mug\na fish")
    write_tar(tmp_path / "set" / "test" / "0.tar", [(f"0.{end}", evil) for end in ("jpg", "cls", "pyd", "pickle")])
    refused(lambda: read_classes(tmp_path / "cifar10"), "never opened")
    refused(lambda: read_classes(tmp_path / "set"))
    refused(lambda: read_folder(tmp_path / "own"))

    assert not (tmp_path / "canary").exists()
    assert pickle.loads(evil).close() is None
    assert (tmp_path / "canary").exists()


def test_two_tables_are_two(tmp_path):
    "Of one name, with images of one name, and with a file whose name is a further caption's key"
    files = [table(tmp_path / name) / "captions.csv" for name in "ab"]
    (tmp_path / "a" / "i0.png #2").write_bytes(b"")
    more = 'i0.png,a second mug\ni0.png #2,a dog\ni1.png,\ni2.png,"a mug\non a box"\n'
    for file in files:
        file.write_text(file.read_text() + more)
    skips = Skips(1)
    records = open_data(list(map(str, files)), skips=skips, index_folder=tmp_path / "cache")
    assert len({r.key for r in records}) == len(records) == 29
    assert skips.unread == {"row of several lines": 2}
    assert skips.counts == {"empty caption": 2, "missing file": 1}
    assert skips.seen == 32

    for name in ("c.tar", "c.parquet"):
        (tmp_path / name).write_bytes(b"")
    refused(lambda: find_source(tmp_path), "name those that count")


def test_what_is_small_and_unpacks_without_end(tmp_path):
    "Entities in a caption are cleaned in time, a table whose rows repeat each other is refused"
    assert canonical_caption("&" + "amp;" * 10**6 + "lt;")
    pd.DataFrame({"image": ["i0.png"] * 10**6, "caption": "a red mug"}).to_parquet(tmp_path / "t.parquet")
    refused(lambda: read(tmp_path / "t.parquet", tmp_path), "1,000,000 rows", "repeat each other")
    levels = (f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 9))
    refused(lambda: parse_yaml("\n".join(["a0: &a0 {k: 1}", *levels]), "recipe.yaml"), "more than 100,000 values")


# What hangs


def test_only_regular_files_are_opened(tmp_path):
    for name in ("pipe.jpg", "pipe.tar", "pipe.csv"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(BadImage):
        open_image(tmp_path / "pipe.jpg")

    refused(lambda: read(tmp_path / "pipe.tar", tmp_path), "is no regular file")
    refused(lambda: read(tmp_path / "pipe.csv", tmp_path))
    for name in ("one", "two"):
        (tmp_path / "cifar10" / name).mkdir(parents=True)
        (tmp_path / "cifar10" / name / "1.png").touch()
    os.mkfifo(tmp_path / "cifar10" / "classnames.txt")
    refused(lambda: read_folder(tmp_path), "is no regular file")
    folder = table(tmp_path / "pairs", form="txt")
    for name in ("i3.txt", "i4.txt"):
        (folder / name).unlink()
    os.mkfifo(folder / "i3.txt")
    (folder / "i4.txt").mkdir()
    records, counts = read(folder, tmp_path)
    assert (len(records), counts) == (10, {"bad text file": 1, "no text file": 1})


def test_an_adapter_is_no_model(tmp_path):
    model = changed_release(tmp_path / "model", CONFIG, len)
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    refused(lambda: load(model), "holds an adapter of LoRA", "merge_and_unload")


# What would not end


def test_numbers_that_would_not_end():
    large = dict(images="1e18", threads=99999999999, seed=2**64, epochs=1e308, batch_size=10**18, workers=10**6)
    for name, value in (large | dict(items=10**18, warmup=10**30, gpus=10**6)).items():
        refused(partial(Config.of, {name: value}), name)
    assert Config.of(dict(seed=2**32 - 1)).seed == 2**32 - 1


# What is said in one line


def test_names_that_are_no_text(tmp_path):
    folder = table(tmp_path / "pairs", form="txt")
    for end in ("png", "txt"):
        os.rename(folder / f"i3.{end}", os.fsencode(folder) + b"/\xff." + end.encode())
    assert read(folder, tmp_path)[1] == {"name is not UTF-8": 1}

    folder = table(tmp_path / "table")
    (folder / "captions.csv").unlink()
    rows = [dict(image=f"i{i}.png", caption="a red \ud800 mug", key="\udcff" if i == 4 else f"k{i}") for i in range(12)]
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records, counts = read(folder, tmp_path)
    assert (counts, records[0].caption) == ({"name is not UTF-8": 1}, "a red mug")

    other = table(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
    refused(lambda: read(other, tmp_path), "name is not UTF-8")


def test_names_that_look_like_patterns(tmp_path):
    for name in ("br{a,b}ce", "photos:2024", "what?", "star*"):
        file = table(tmp_path / name) / "captions.csv"
        for source in map(find_source, (file.parent, file, [str(file)])):
            assert isinstance(source, Tables)
            assert source.places == [str(file)]


def counted(shards):
    skips = Skips(1)
    find_source(list(map(str, shards))).records(skips)
    return skips


def test_a_shards_loss_is_counted(tmp_path):
    "Joined by cat, zeroed inside, in another encoding, two images of one key; shards of one name are counted as two"
    png = encoded(Image.new("RGB", (9, 9)))
    members = [(f"s{i}.{end}", png) for i in range(4) for end in ("png", "jpg")]
    members = [m for i in range(4) for m in (*members[2 * i : 2 * i + 2], (f"s{i}.txt", b"a mug"))]
    (tmp_path / "a").mkdir()
    write_tar(tmp_path / "a" / "0.tar", members)
    whole = (tmp_path / "a" / "0.tar").read_bytes()
    assert "4 further image of a sample" in str(counted([tmp_path / "a" / "0.tar"]))

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "0.tar").write_bytes(whole + whole)
    (tmp_path / "a" / "0.tar").write_bytes(whole[:1024] + bytes(1024) + whole[2048:])
    assert counted([tmp_path / "a" / "0.tar", tmp_path / "b" / "0.tar"]).counts["damaged shard"] == 2

    write_tar(tmp_path / "c.tar", [("s.png", png), ("s.txt", "a café".encode("latin1"))])
    assert counted([tmp_path / "c.tar"]).counts == {"bad text file": 1}


def write_whole(folder, name):
    with whole(folder, "mark.json", "by") as stage:
        for file in "abcd":
            (stage / file).write_text(name)
        write_json(stage / "mark.json", {"by": name})


def test_several_writers_at_once(tmp_path):
    "Each writes all files of a folder again and again: none fails, and in the end all are of one"
    assert len([*in_workers(partial(write_whole, tmp_path), [*"xyz"] * 20, 3, "fork")]) == 60
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    by = read_json(tmp_path / "mark.json")["by"]
    assert found.pop("mark.json")
    assert found == dict.fromkeys("abcd", by)


WITHOUT_ASSERTS = """
import sys
from importlib.machinery import SourceFileLoader
plain = SourceFileLoader.get_code
compiled = []
def get_code(loader, name):
    if name.partition(".")[0] != "c2lip":
        return plain(loader, name)
    compiled.append(name)
    return compile(loader.get_data(loader.path), loader.path, "exec", dont_inherit=True, optimize=1)
SourceFileLoader.get_code = get_code
from c2lip.core import UserError
from c2lip.lab.attention.explorer import Explorer
from c2lip.lab.training.run import train
out = sys.argv[1]
run = dict(images=16, batch_size=8, epochs=1, warmup=0, threads=1, device="cpu", evaluate_every=0, log_every=1)
train(run, out + "/run")
shown = Explorer([out + "/run/model"])
shown.save(out + "/maps")
acts = [lambda: train({**run, "lr": -1}, out + "/b"), lambda: train(run, out + "/run"), lambda: shown.save("nbs")]
for act in acts:
    try:
        act()
    except UserError as e:
        print(e)
assert len(compiled) > 50, compiled
"""


def test_no_check_is_an_assert(tmp_path, run):
    "Each tells a type checker that a value is there; compiled as python -O does, c2lip trains and refuses as ever"
    asserts = re.findall(r"^ *assert (.*)$", "\n".join(file.read_text() for file in ROOT.glob("c2lip/**/*.py")), re.M)
    assert asserts and all(re.match(r"(\w[\w.]* is not None( and )?)+( *#|$)", words) for words in asserts), asserts

    done = run(sys.executable, "-c", WITHOUT_ASSERTS, tmp_path, env=without_library())
    assert done.returncode == 0, done.out
    assert all(words in done.out for words in ("lr", "holds a run", "belongs to the workbook")), done.out
    assert (tmp_path / "maps" / "maps.png").exists()
