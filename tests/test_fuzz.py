"""Damaged and mistyped input of every kind: success or one clear line, counts that add up, nothing written elsewhere.

Each case is drawn from its kind and its number alone, so a failure names what repeats it:
C2LIP_FUZZ_ONLY=table/17 runs one case, C2LIP_FUZZ=50 fifty times as many."""

import contextlib
import io
import json
import os
import random
import re
import shutil
import struct
import warnings
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from benchmark_examples import write_examples
from conftest import ROOT
from PIL import Image
from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel
from writing import encoded, write_tar

from c2lip.concepts import load_pipeline, noun_phrases
from c2lip.core import UserError
from c2lip.core.files import shipped
from c2lip.lab.attention.controls import read_selection
from c2lip.lab.attention.explorer import Explorer
from c2lip.lab.data.images import NOT_READ, BadImage, open_image
from c2lip.lab.data.prepare import prepare
from c2lip.lab.data.records import Skips
from c2lip.lab.data.shards import index_captions
from c2lip.lab.data.sources import find_source, open_data
from c2lip.lab.dev.command import main
from c2lip.lab.evaluation.suites import read_folder
from c2lip.lab.serve.search import ImageIndex, index_images
from c2lip.lab.training.checkpoint import disk_errors, load_checkpoint, save_checkpoint
from c2lip.lab.training.config import Config, check, read_settings
from c2lip.lab.training.launch import check_run, failure
from c2lip.lab.training.launchers import read_parameters
from c2lip.lab.training.log import read_log
from c2lip.lab.training.run import likely_mistakes, train, trained_images
from c2lip.lab.training.runs import list_runs
from c2lip.lab.training.step import parameter_groups
from c2lip.methods.c2lip import c2lip
from c2lip.score import Head, Score, presence, scores_of
from c2lip.towers import add_results, load, save
from c2lip.towers.folders import RELEASED, base_folder, keep_fitted
from c2lip.towers.transformers import to_hugging_face

LAUNCHERS = sorted(path for path in (ROOT / "nbs").glob("*.ipynb") if path.stem != "index")
TIMES = int(os.environ.get("C2LIP_FUZZ", 1))  # as many cases as written below
ONLY = os.environ.get("C2LIP_FUZZ_ONLY", "")
pytestmark = pytest.mark.timeout(240 * TIMES)  # no case may wait for ever

TOKENS = [b"\0", b"\x1b[31m", b"\\ud800", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n", b'"', b"'", b",", b"{", b"}", b"["]
TOKENS += [b"]", b":", b"\t", b"null", b"true", b"NaN", b"Infinity", b"1e999", b"-1", b"9" * 400, b"\xe2\x80\xae"]
TOKENS += [b"&a *a", b"!!python/object:os.system", b"..", b"/", b"#", b"\\", b"{}" * 9, b"[" * 2000, b"x" * 3000]
TOKENS += [b"9" * 5000, b"2001-99-99", b"**", b"%s", b"\xf0\x9f\x8d\x89", b"0x7f", b"<<: *a", b"\\u0000", b"-0.0", b"~"]
ODD = [None, True, False, -1, 0, 1, 2**31, 2**64, 1e308, float("nan"), float("inf"), "", " ", "x" * 3000, "\x1b[31m"]
ODD += ["a\nb", "\ud800", "\0", "../../x", "~", [], {}, [[]], [None], {"a": 1}, {"": []}, [1] * 2000, "1e999", "\u202e"]


def hurt(content, dice):
    "The bytes with one to three damages: changed, cut, doubled, moved, or with something odd put in"
    content = bytearray(content)

    for _ in range(dice.choice((1, 1, 2, 3))):
        a, b = sorted(dice.randrange(len(content) + 1) for _ in range(2))
        b = min(b, a + 200)
        how = dice.randrange(6)
        if how == 0:
            content[a:b] = b""
        elif how == 1:
            content[a:a] = dice.choice(TOKENS)
        elif how == 2 and content:
            content[a % len(content)] = dice.randrange(256)
        elif how == 3:
            content[a:a] = content[a:b]
        elif how == 4:
            del content[a if dice.random() < 0.3 else max(a, len(content) - 20) :]
        else:
            content[a:b] = dice.choice(TOKENS)
    return bytes(content)


def places(value, path=()):
    "The path of every value in a JSON tree"
    yield path
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, (*path, key))


def twisted(value, dice):
    "A JSON tree with one to three values changed, dropped, doubled or renamed"
    value = json.loads(json.dumps(value))

    for _ in range(dice.choice((1, 1, 2, 3))):
        if not isinstance(value, (dict, list)) or len(found := list(places(value))) < 2:
            return value
        *way, key = dice.choice(found[1:])
        parent = value
        for step in way:
            parent = parent[step]
        how = dice.randrange(4)
        if how < 2:
            parent[key] = deepcopy(dice.choice(ODD))
        elif how == 2:
            del parent[key]
        elif isinstance(parent, list):
            parent.append(deepcopy(parent[key]))
        else:
            parent[f"{key}_"] = parent.pop(key)
    return value


def odd_text(dice):
    "A word that a user could type or paste, or never would"
    return dice.choice([str(x) for x in ODD] + [t.decode("utf8", "surrogateescape") for t in TOKENS])


# --- the kinds: each writes into an empty folder, and calls what reads it; it may check what it gets


declared = cache(read_parameters)


def papermill_line(dice, folder):
    path = dice.choice(LAUNCHERS)
    names = [*declared(path), "lamda_xac", odd_text(dice)]
    given = {dice.choice(names): dice.choice([*ODD, odd_text(dice)]) for _ in range(2)}
    check_run(path, given)
    assert check(declared(path), given, path).keys() == declared(path).keys()


def settings_of_a_run(dice, folder):
    recipe = dice.choice(sorted((ROOT / "data" / "recipes").glob("*.yaml")))
    if dice.random() < 0.5:
        (folder / "recipe.yaml").write_bytes(hurt(recipe.read_bytes(), dice))
    else:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(twisted(yaml.safe_load(recipe.read_text()), dice)))
    read_settings(folder / "recipe.yaml", [f"{dice.choice(list(Config.__dataclass_fields__))}={odd_text(dice)}"][:1])


PAIR = [("png", encoded(Image.effect_noise((12, 12), 90))), ("json", b'{"caption": "a red mug"}')]
ROWS = [dict(key=f"k{i}", image=f"i{i % 3}.png", caption=f"a red mug {i} on a box", phrases=[]) for i in range(6)]
ROWS += [dict(image="i0.png", caption="a blue fish", phrases=[["a blue fish", 0, 11]])]


def put_small_images(folder):
    for i in range(3):
        Image.new("RGB", (8, 8), (60 * i, 0, 99)).save(folder / f"i{i}.png")


def write_rows(path, rows):
    rows = pd.DataFrame(rows).astype(object)
    if path.suffix == ".jsonl":
        path.write_text(rows.to_json(orient="records", lines=True))
    elif path.suffix == ".json":
        path.write_text(rows.to_json(orient="records"))
    elif path.suffix == ".parquet":
        rows.astype(str).to_parquet(path)
    else:
        rows.drop(columns="phrases").to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")


def add_up(found, skips):
    "Everything that was seen is a record, or counted as left out"
    assert len(found) + len(skips.rows) == skips.seen, (len(found), skips.seen, skips.rows)


def table(dice, folder):
    put_small_images(folder)
    path = folder / f"t.{dice.choice(('csv', 'tsv', 'json', 'jsonl', 'parquet'))}"
    if path.suffix == ".jsonl" and dice.random() < 0.5:
        path.write_text("\n".join(json.dumps(twisted(row, dice)) for row in ROWS))
    else:
        write_rows(path, ROWS)
        path.write_bytes(hurt(path.read_bytes(), dice))
    skips = Skips(1)
    add_up(find_source(path).records(skips), skips)


STEMS = ["a", "b", "c 2.0", "c 2.1", "x.y.z", "IMG_1", "train_1", "test-2", "val", "ünï"]
FOLDERS = ["", "", "", "train/", "val/", "images_train/", "dev set/", "a.b/", "train/inner/"]


def layout(dice, folder):
    "Every image and every text of a folder is read, counted as left out, or counted as of another part"
    files = set()
    for _ in range(dice.randint(2, 24)):
        kind = dice.choice(["jpg", "JPG", "jfif", "png", "md", *NOT_READ, "txt", "txt", "txt", "TXT"])
        path = folder / f"{dice.choice(FOLDERS)}{dice.choice(STEMS)}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"A mug.\nA cup." if kind.lower() == "txt" else PAIR[0][1])
        if kind != "md":
            files.add(path)

    skips = Skips(1)
    (folder / "a.txt").touch()
    found = find_source(folder, part=dice.choice(["train", "all"])).records(skips)
    add_up(found, skips)
    done = {folder.resolve() / name for name in [*(record.key for record in found), *skips.rows]}
    stems = {path.with_suffix("") for path in done}
    missed = {path for path in files | {folder / "a.txt"} if path.resolve() not in done}
    missed -= {path for path in missed if path.suffix.lower() == ".txt" and path.resolve().with_suffix("") in stems}
    assert len(missed) == sum(count for kind, count in skips.unread.items() if kind.startswith("of ")), (missed, skips)


def names_in_shards(dice, folder):
    "An image and a text of one name are one sample, whatever dots the name has"
    ends = ["", "", "", ".mask", ".0", " 2.5"]
    names = {f"{dice.choice(['', 'd.1/'])}{dice.choice(STEMS)}{dice.choice(ends)}" for _ in range(9)}
    members = sorted(f"{name}.{kind}" for name in names for kind in dice.choice([("jpg", "txt"), ("jpg",), ("txt",)]))
    write_tar(folder / "a.tar", [(name, PAIR[0][1] if name.endswith("jpg") else b"A mug.") for name in members])
    skips = Skips(1)
    found = find_source(folder / "a.tar").records(skips)
    add_up(found, skips)
    whole = [name for name in names if {f"{name}.jpg", f"{name}.txt"} <= set(members)]
    assert {f"a/{name}" for name in whole} <= {record.key for record in found}

    images = sum(name.endswith("jpg") for name in members)
    lone = sum(cause == "image without a text" for cause, _ in skips.rows.values())
    assert images == len(found) + lone + skips.unread["jpg"], (members, skips)


def joined_captions(dice, folder):
    rows = [dict(url=f"http://x/{i}.jpg", caption=f"a red mug {i}") for i in range(8)]
    text = "\n".join(map(json.dumps, rows)) if dice.random() < 0.5 else pd.DataFrame(rows).to_csv(index=False)
    path = folder / ("t.jsonl" if text.startswith("{") else "t.csv")
    path.write_bytes(hurt(text.encode(), dice))
    about = index_captions(path, folder / "join.arrow")
    assert about["rows"] + sum(about["skipped"].values()) <= 9 + text.count("\n")


def shards(dice, folder):
    members = []
    for i in range(3):
        facts = twisted({"caption": f"a red mug {i}", "phrases": ["a red mug"], "more": [1, {"a": None}]}, dice)
        members += [(f"s{i}.png", PAIR[0][1]), (f"s{i}.json", json.dumps(facts).encode()), (f"s{i}.txt", b"a fish")]
    if dice.random() < 0.3:
        members.insert(2, (dice.choice(["../s9.png", "/s9.png", "s0.png", "\x1b.png", "s.json.png", ""]), b"x"))
    write_tar(folder / "a.tar", members)
    if dice.random() < 0.6:
        (folder / "a.tar").write_bytes(hurt((folder / "a.tar").read_bytes(), dice))
    read_all(find_source(str(folder / "a.tar")).records(skips := Skips(1)), skips)


def read_all(records, skips):
    assert len(records) <= skips.seen
    for record in records:
        with contextlib.suppress(BadImage):
            open_image(record.image)


def pipeline(dice, folder):
    "A file of a spaCy pipeline is damaged; its folder has another name in each case, since pipelines are kept"
    place = shutil.copytree(shipped("pipeline"), folder / f"{dice.random()}")
    spoil(dice.choice([place / "config.cfg", place / "tokenizer", *sorted(place.glob("*/*"))]), dice)
    noun_phrases("A red couch stands by the tall building.", load_pipeline(str(place)))


def images(dice, folder):
    kind = dice.choice(["png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm", "ico"])
    mode = dice.choice(["RGB", "L", "RGBA", "P", "1", "I;16", "CMYK"])
    try:
        content = encoded(Image.new(mode, (9, 7)), kind)
    except (OSError, ValueError):
        return  # this kind of file has no such mode
    with contextlib.suppress(BadImage):
        assert open_image(hurt(content, dice)).mode == "RGB"


def spoil(path, dice):
    "Damage a file, or put a folder or a pipe in its place"
    path.write_bytes(hurt(path.read_bytes(), dice))
    if dice.random() < 0.2:
        path.unlink()
        dice.choice((os.mkdir, os.mkfifo))(path)


def run_folders(dice, folder):
    "A file of a run folder is damaged: the list of runs, the log, the count of skips and the check before a resume"
    run = folder / "runs" / "a"
    notes = {"metadata": {"papermill": {"end_time": "x"}}, "cells": []}
    run.mkdir(parents=True)
    rows = {"metrics.jsonl": {"step": 3}, "skipped.jsonl": {"where": "a", "cause": "b", "detail": "c"}}
    rows |= {"params.json": {"method": "c2lip"}, "given.json": {"seed": 0}, "train.ipynb": notes, "table.csv": "suite"}
    for name, row in rows.items():
        (run / name).write_text(json.dumps(row) + "\n")
    spoil(run / dice.choice(list(rows)), dice)
    assert len(list_runs(folder / "runs")) == 1

    with disk_errors(run):
        assert len(read_log(run)) < 3
        assert len(Skips(1, run / "skipped.jsonl").rows) < 3
        check_run(ROOT / "nbs" / "train.ipynb", {"run_dir": str(run), "resume": True})


@cache
def transformers_folder(home):
    "A small SiglipModel as transformers saves it, with the base's tokenizer"
    layers = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    words = layers | dict(vocab_size=512, max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=0)
    parts = SiglipConfig(text_config=words, vision_config=layers | dict(image_size=32, patch_size=8))
    for part in (SiglipModel(parts), SiglipImageProcessor(size={"height": 32, "width": 32})):
        part.save_pretrained(home / "siglip")
    for file in base_folder().glob("tokenizer*.json"):
        shutil.copy(file, home / "siglip")
    load(str(home / "siglip"))
    return home / "siglip"


def release(dice, folder):
    "A file of a model's folder is damaged: its configuration, its tokenizer, its record, or the header of its weights"
    target = folder / "model"
    theirs = dice.random() < 0.3
    shutil.copytree(transformers_folder(folder.parent) if theirs else base_folder(), target)
    if dice.random() < 0.3 and not theirs:
        return spoil(target / dice.choice([*RELEASED, "record.json"]), dice) or load(str(target))
    if theirs:
        file = target / dice.choice(["config.json", "preprocessor_config.json", "tokenizer.json", "model.safetensors"])
    else:
        file = target / dice.choice(["open_clip_config.json"] * 2 + ["tokenizer.json", "open_clip_model.safetensors"])

    content = file.read_bytes()
    size = 0
    if file.suffix == ".safetensors":
        (size,) = struct.unpack("<Q", content[:8])
        content = content[8:]
    text, weights = (content[:size], content[size:]) if size else (content, b"")
    text = hurt(text, dice) if dice.random() < 0.5 else json.dumps(twisted(json.loads(text), dice)).encode()
    if size:
        given = len(text) if dice.random() < 0.8 else dice.choice([0, 1, 2**63, 2**64 - 1, size])
        text = struct.pack("<Q", given) + text
    file.write_bytes(text + weights)
    load(str(target))


@cache
def described(home):
    "What is described by a JSON file beside it: the file → what reads it"
    data, out, index, model = (home / f"of_{name}" for name in ("data", "out", "index", "model"))
    data.mkdir()
    put_small_images(data)
    write_rows(data / "captions.csv", ROWS)
    prepare(str(data), out, progress=False)
    index_images(data, index, "base")
    towers = load(save(load("base"), model, {"settings": {"data": str(data)}}))
    Score(head=Head.of_sides(), relations=0.5).keep(model)
    keep_fitted(model, {"presence": {"slope": 20.0, "offset": -3.0}})
    (data / "coco.json").write_text('{"images": [{"id": 1, "file_name": "i0.png"}], "annotations": []}')
    cfg = replace(Config.of({"data": str(out), "lr": 1e-3, "warmup": 1}), phrase_rules={"max_phrases": 16})
    records = open_data(data)
    table = pd.DataFrame({"a": [1.0]})

    return {
        model / "record.json": lambda: (trained_images(str(model), str(data)), add_results(model, table, "y")),
        model / "open_clip_config.json": lambda: add_results(model, table, "y"),
        model / "score.json": lambda: (scores_of(towers), presence(towers, Image.new("RGB", (9, 9)), ["a mug"])),
        out / "part-00000.json": lambda: prepare(str(data), out, progress=False),
        out / "manifest.json": lambda: list(likely_mistakes(cfg, 5, towers, records)),
        index / "c2lip-index.json": lambda: ImageIndex(index).search("a red mug"),
        data / "coco.json": lambda: find_source(data / "coco.json").records(Skips(1)),
    }


def forms(dice, folder):
    file, read = dice.choice([*described(folder.parent).items()])
    held = file.read_bytes()
    file.write_text(json.dumps(twisted(json.loads(held), dice)))
    try:
        read()
    finally:
        file.write_bytes(held)


@cache
def benchmark_files(home):
    folder = write_examples(home / "examples") or home / "examples"
    return folder, [path for path in sorted(folder.rglob("*.json*")) if path.is_file()]


def benchmark(dice, folder):
    source, files = benchmark_files(folder.parent)
    chosen = dice.choice(files)
    suite = chosen.relative_to(source).parts[0]
    shutil.copytree(source / suite, folder / suite, symlinks=True)
    path = folder / chosen.relative_to(source)
    lines = path.read_text().splitlines()
    if dice.random() < 0.5:
        path.write_bytes(hurt(path.read_bytes(), dice))
    else:  # one object a line, or one for the whole file
        path.write_text("\n".join(json.dumps(twisted(json.loads(line), dice)) for line in lines))
    read_folder(folder)


def command_line(dice, folder):
    put_small_images(folder)
    write_rows(folder / "t.csv", ROWS)
    usual = ["prepare", "list", "runs", str(folder / "t.csv"), str(folder / "out"), "recipes", "-j", "0"]
    usual += ["--rule", "max_words=0", "--max-skipped", "2", "--clean", "--captions", "--caption-column"]
    words = [dice.choice([*usual, odd_text(dice)]) for _ in range(dice.randrange(1, 6))]
    if words[0] == "prepare" and str(folder / "t.csv") in words and str(folder / "out") in words:
        words += ["--pipeline", "none"]  # what would be done is refused
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main([word for word in words if "\0" not in word])
        except SystemExit as e:
            code = e.code

    assert code in (0, 2), (code, words)

    last = shown.getvalue().strip().split("\n")[-1]
    assert "Traceback" not in shown.getvalue() and (code == 0 or last.isprintable() and "error: " in last), last


def damaged_checkpoint(dice, folder):
    "A checkpoint that is damaged is not used; the one before it is, and where there is none the run does not go on"
    towers, method, optimizer = trained_by_hand()
    for step in (1, 2)[: dice.choice((1, 2, 2))]:
        save_checkpoint(folder, towers, method, optimizer, step, settings={"lr": 1e-3})
    kept = len(list(folder.glob("checkpoint*.pt")))
    path = folder / "checkpoint.pt"
    path.write_bytes(hurt(path.read_bytes(), dice))
    assert load_checkpoint(folder, towers, method, optimizer) in (1, kept)


@cache
def trained_by_hand():
    towers = load("base")
    method = c2lip(towers)
    return towers, method, torch.optim.SGD(parameter_groups(towers, method, Config(lr=1e-3)))


def selections(dice, folder):
    "The text or link that restores what the explorer shows"
    link = b"image=world/3&phrases=a%20red%20mug|a%20fish&models=base,tuned&kind=centred&layer=2"
    read_selection(hurt(link, dice).decode("utf8", "replace"))


def ends_of_papermill(dice, folder):
    "Whatever error ends papermill, two printable lines say so"
    dead = type("DeadKernelError", (Exception,), {})
    kind = dice.choice([OSError, ValueError, RuntimeError, KeyError, UnicodeError, dead])
    error = kind(dice.choice([28, odd_text(dice), None]), odd_text(dice)) if kind is OSError else kind(odd_text(dice))
    if dice.random() < 0.4:
        error.ename, error.evalue = dice.choice(["UserError", "OSError", "ValueError"]), odd_text(dice)
    lines = failure(error, folder / "train.ipynb").splitlines()
    assert len(lines) == 2 and all(line.isprintable() for line in lines) and len(lines[0]) < 2500, lines


def training(place):
    train(dict(images=8, batch_size=8, epochs=1, warmup=0, threads=1, device="cpu", evaluate_every=0), place)


def releasing(place):
    save(load("base"), place)


def exporting(place):
    to_hugging_face(load("base_clip"), place)


explorer = cache(partial(Explorer, ("base",)))  # one for all cases


def exploring(place):
    explorer().save(place)


def preparing(place):
    prepare(str(Path(place).resolve().parent / "t.csv"), place, progress=False)


WRITTEN = {
    training: [
        "params.json",
        "given.json",
        "metrics.jsonl",
        "model",
        "checkpoint.pt",
        "lock",
        "benchmark",
        "notes.txt",
    ],
    releasing: [*RELEASED, "record.json", "README.md"],
    exporting: ["config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"],
    exploring: ["maps.json", "maps.png", "maps.svg", "maps.pdf"],
    preparing: ["captions.parquet", "manifest.json", "prepare.json", "part-00000.parquet"],
}
"What writes into a folder → names that it writes, or that are of no run"
MINE = [b"mine", b"{}", b'{"state": 1, "made_by": null}', b'{"cells": [], "metadata": {}}']


def everything(folder):
    "What lies in a folder: each file's bytes, each link's target, each folder"
    paths = sorted(folder.rglob("*"))
    return {p: os.readlink(p) if p.is_symlink() else p.is_file() and p.read_bytes() for p in paths}


def output_places(dice, folder):
    "A file, folder or link of the user's where something would be written: a refusal, and every byte is as before"
    write_rows(folder / "t.csv", ROWS)
    put_small_images(folder)
    target = folder / "target"
    target.mkdir()
    (folder / "link").symlink_to(target)
    (folder / "elsewhere").write_bytes(b"linked")
    writer = dice.choice(list(WRITTEN))
    theirs = target / dice.choice(WRITTEN[writer])
    how = dice.randrange(4)
    if how == 0:
        (theirs / "images").mkdir(parents=True)
        (theirs / "images" / "000000.png").write_bytes(b"mine")
    elif how == 1:
        theirs.symlink_to(folder / "elsewhere")
    else:
        theirs.write_bytes(dice.choice(MINE))
    before = everything(folder)

    gone = f"{folder}/gone/../target"
    spelt = dice.choice([f"{target}/", f"{target}/../target", f"{folder}//target", f"{folder}/link", gone])
    with pytest.raises(UserError, match=re.escape(theirs.name)):
        writer(spelt)
    after = everything(folder)
    assert {path: after.get(path) for path in before} == before


KINDS = {
    forms: 50,
    papermill_line: 80,
    settings_of_a_run: 40,
    table: 80,
    shards: 50,
    output_places: 28,
    layout: 60,
    names_in_shards: 60,
    run_folders: 25,
    joined_captions: 10,
    images: 60,
    release: 48,
    benchmark: 40,
    command_line: 30,
}
KINDS |= {damaged_checkpoint: 20, pipeline: 6, selections: 50, ends_of_papermill: 60}  # kind → cases
NOT_WATCHED = (".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache", "runs", "cache")
"Folders in which git, Python and the tools of other tests, which run at the same time, write"


def state():
    "Every file of the project, with size and time; without what Python and git keep"
    kept = {}
    for place, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name not in NOT_WATCHED]
        for path in (os.path.join(place, name) for name in files):
            found = os.lstat(path)
            kept[path] = (found.st_size, found.st_mtime_ns)
    return kept


PYTHON = re.compile(
    r"' object |object is not|has no attribute|not subscriptable|unhashable|unsupported operand|not supported between"
    r"|indices must be|expected str|missing \d+ required|unexpected keyword|not a mapping|cannot unpack|<class '"
)
"What Python says of a value of another type: no words for a user"


def fault(kind, number, folder):
    "What is wrong with a case; empty where nothing is"
    shown = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(shown):
            warnings.simplefilter("ignore")
            kind(random.Random(f"{kind.__name__}/{number}"), folder)
    except UserError as e:
        message = str(e)
        if not message or not message.isprintable() or len(message) > 2000:
            return f"the message {message[:300]!r}"
        if PYTHON.search(message):
            return f"Python's words: {message[:300]!r}"
    except BaseException as e:  # a SystemExit too
        end = e.__traceback__
        while end.tb_next:
            end = end.tb_next
        where = f"{end.tb_frame.f_code.co_filename}:{end.tb_lineno}"
        return f"{type(e).__name__}: {str(e)[:300]!r} at {where}"
    unclear = [line for line in shown.getvalue().splitlines() if not line.isprintable()]

    return f"printed {unclear[0]!r}" if unclear else ""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fuzz(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("C2LIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    numbers = range(KINDS[kind] * TIMES)
    if ONLY:
        name, _, number = ONLY.partition("/")
        numbers = [int(number)] if name == kind.__name__ else []
    before = state()
    faults = {}
    for number in numbers:
        print(kind.__name__, number)  # which case hangs, if one does
        folder = tmp_path / "case"
        folder.mkdir()
        if found := fault(kind, number, folder):
            faults[f"{kind.__name__}/{number}"] = found
        shutil.rmtree(folder)

    after = state()
    assert before == after, {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}

    kept = {path.name for path in tmp_path.iterdir() if not path.name.startswith("of_")}
    assert kept <= {"cache", "examples", "siglip"}
    assert not faults, "\n" + "\n".join(f"{name}: {what}" for name, what in list(faults.items())[:40])
