"""What an attack on an older version found: each ends in one clear line, and nothing is lost."""

import itertools
import json
import os
import resource
import shutil
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from filelock import FileLock
from PIL import Image

from c2lip.core import UserError
from c2lip.core.files import check_free, run_folder
from c2lip.data.images import BadImage, open_image
from c2lip.data.prepare import prepare
from c2lip.data.records import Skips
from c2lip.data.sources import Tables, find_source, open_data
from c2lip.dev.launch import check_run
from c2lip.evaluation import folders
from c2lip.evaluation.base import read_entries
from c2lip.release import save
from c2lip.towers import load
from c2lip.towers.folders import base_folder
from c2lip.training.config import Config, read_parameters, save_parameters
from c2lip.training.log import read_log
from c2lip.training.run import train

ROOT = Path(__file__).resolve().parent.parent

SMALL = dict(images=32, batch_size=8, epochs=1, warmup=1, log_every=1, save_every=2, threads=1, batches="random")


@pytest.fixture(autouse=True)
def time_limit():
    "No case may wait for ever: after 60 seconds the alarm ends it"
    import signal

    def stop(*_):
        raise TimeoutError("the case hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(function, *words):
    "The message of a `UserError`: one line, printable, with these words"
    with pytest.raises(UserError) as caught:
        function()
    message = str(caught.value)
    assert message.isprintable() and len(message) <= 2000, message
    for word in words:
        assert word in message, message
    return message


def pairs(folder, n=40):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        Image.new("RGB", (16, 16), (6 * i, 0, 99)).save(folder / f"i{i}.png")
        (folder / f"i{i}.txt").write_text(f"a red mug number {i} and a blue box")
    return folder


def table(folder, n=12, name="captions.csv"):
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["image,caption"]
    for i in range(n):
        Image.new("RGB", (16, 16), (6 * i, 0, 99)).save(folder / f"i{i}.png")
        lines.append(f"i{i}.png,a red mug number {i} and a blue box")
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def read(source, folder, limit=0.9):
    "The records of a source and what was left out, by cause"
    skips = Skips(limit)
    return open_data(source, skips=skips, index_folder=folder / "cache"), skips.counts


# What a run can lose


@contextmanager
def largest_file(size):
    "No file of this process grows beyond so many bytes, as on a disk that is full"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(tmp_path, capfd):
    "In the settings, the log, the first checkpoint or a later one: one line each, which says what stands"
    for size, said in ((20, "there is no checkpoint yet"), (300, "there is no checkpoint yet")):
        folder = tmp_path / str(size)
        with largest_file(size):
            refused(lambda: train(SMALL, folder), str(folder), "File too large", said)  # noqa: B023
    with largest_file(1_000_000):
        refused(lambda: train(SMALL, tmp_path / "run"), "step 2: the checkpoint", "there is no checkpoint yet")
        assert not list((tmp_path / "run").glob("checkpoint*"))
    with largest_file(1_000_000):
        refused(lambda: save(load("base"), tmp_path / "model"), "the release folder", "cannot be written")
        assert not list((tmp_path / "model").glob("*.tmp"))
    shutil.rmtree(tmp_path / "run")
    train({**SMALL, "keep_checkpoint": True}, tmp_path / "run")
    with largest_file(1_000_000):
        again = {**SMALL, "resume": True, "epochs": 1}
        (tmp_path / "run" / "checkpoint.pt").unlink()  # a kill between two: the one before is whole
        refused(lambda: train(again, tmp_path / "run"), "step 4: the checkpoint", "from its last checkpoint")
    assert train({**SMALL, "resume": True}, tmp_path / "run")
    assert "Traceback" not in capfd.readouterr().err


def test_a_clock_that_jumps(tmp_path, monkeypatch):
    "A clock that is set back and forth changes neither the weights nor the times that are logged"
    straight = train(SMALL, tmp_path / "a").model.state_dict()
    jumps = itertools.cycle([0.0, 4e9, -7e8, 1.7e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    jumped = train(SMALL, tmp_path / "b").model.state_dict()
    assert all(torch.equal(weight, jumped[name]) for name, weight in straight.items())
    assert [0 < row["seconds"] < 60 for row in read_log(tmp_path / "b")] == [True] * 4


def test_a_run_is_not_written_over(tmp_path):
    train(SMALL, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.glob("*.*")}
    refused(lambda: train({**SMALL, "seed": 3}, tmp_path), "another run_dir", "resume True")
    refused(lambda: check_free(tmp_path), "another run_dir", "resume True")
    refused(lambda: check_free(tmp_path, resumable=False), "another run_dir", "delete it")
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.*")} == before
    (tmp_path / "metrics.jsonl").write_text("null\n7\n{}\n" + (tmp_path / "metrics.jsonl").read_text())
    train({**SMALL, "resume": True}, tmp_path)
    assert len(read_log(tmp_path)) == 4

    for name in ("checkpoint.pt", "checkpoint.previous.pt"):
        (tmp_path / name).write_bytes(b"damaged")
    log = (tmp_path / "metrics.jsonl").read_bytes()
    refused(
        lambda: train({**SMALL, "resume": True}, tmp_path), "checkpoint.previous.pt", "no other checkpoint is whole"
    )
    assert (tmp_path / "metrics.jsonl").read_bytes() == log


@pytest.mark.parametrize("kind", ["pairs", "table"])
def test_a_resumed_run_has_the_data_it_began_with(tmp_path, kind):
    folder = (pairs if kind == "pairs" else table)(tmp_path / "data", 40)
    settings = {**SMALL, "data": str(folder), "hold_back": 0.0}
    train(settings, tmp_path / "run")
    settings["resume"] = True
    train(settings, tmp_path / "run")
    text = folder / ("i5.txt" if kind == "pairs" else "captions.csv")
    text.write_text(text.read_text().replace("mug number 5", "cup number 5"))
    refused(lambda: train(settings, tmp_path / "run"), "captions")


@pytest.mark.parametrize("launcher", ["compare", "ablation", "prepare"])
@pytest.mark.parametrize("left", ["checkpoint.pt", "checkpoint.previous.pt", "metrics.jsonl"])
def test_a_folder_of_checkpoints_is_no_place_for_trials(tmp_path, launcher, left):
    (tmp_path / left).write_text("")
    launcher, given = ROOT / "nbs" / f"{launcher}.ipynb", {"run_dir": str(tmp_path)}
    refused(lambda: check_run(launcher, given), f"holds a run ({left})", "another run_dir")
    assert [p.name for p in tmp_path.iterdir()] == [left]


@pytest.mark.parametrize("launcher, owner", [("compare", "train"), ("ablation", "train"), ("ablation", "compare")])
def test_a_run_of_another_launcher_is_not_written_over(tmp_path, launcher, owner):
    names = {name: read_parameters(ROOT / "nbs" / f"{name}.ipynb") for name in (launcher, owner)}
    for mine, other in ((launcher, owner), (owner, launcher)):
        folder = tmp_path / other
        save_parameters({name: p.default for name, p in names[other].items()}, run_folder(str(folder), "explore"))
        before = {path: path.read_bytes() for path in folder.iterdir()}
        given = {"run_dir": str(folder)}
        for way in [{}, {"resume": True}] if "resume" in names[mine] else [{}]:
            call = partial(check_run, ROOT / "nbs" / f"{mine}.ipynb", given | way)
            refused(call, "another launcher", "another run_dir", "delete that folder")
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
        assert check_run(ROOT / "nbs" / "explore.ipynb", given) == folder
    if launcher == "compare":
        given = {"run_dir": str(tmp_path / "compare"), "images": 64}
        assert check_run(ROOT / "nbs" / "compare.ipynb", given) == tmp_path / "compare"


def test_prepare_replaces_its_own_files_only(tmp_path):
    table(tmp_path / "data")
    for name in ("part-00000.parquet", "captions.parquet", "manifest.json", "join.arrow"):
        out = tmp_path / name.split(".")[0]
        out.mkdir()
        (out / name).write_text("mine")
        refused(lambda out=out: prepare(str(tmp_path / "data"), out, progress=False), name, "not made by prepare")
        assert [(p.name, p.read_text()) for p in out.iterdir()] == [(name, "mine")]
    out = tmp_path / "out"
    first = prepare(str(tmp_path / "data"), out, progress=False)
    assert prepare(str(tmp_path / "data"), out, progress=False) == first
    refused(lambda: prepare(str(tmp_path / "data"), "nbs/prepared", progress=False), "belongs to the workbook")


# Releases


@pytest.fixture
def release(tmp_path):
    "release(change of weights, change of model_cfg): the folder of a changed copy of the base model"

    def make(weights=None, config=None):
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base_folder(), folder)
        if weights:
            file = folder / "open_clip_model.safetensors"
            held = safetensors.torch.load_file(file)
            weights(held)
            safetensors.torch.save_file(held, file)
        if config:
            file = folder / "open_clip_config.json"
            cfg = json.loads(file.read_text())
            config(cfg)
            file.write_text(json.dumps(cfg))
        return str(folder)

    return make


def test_a_release_is_compared_before_it_is_built(release):
    def shorter(held):
        held["text.positional_embedding"] = held["text.positional_embedding"][:-1].contiguous()

    for change, words in (
        (lambda held: held.pop("logit_bias"), ("Missing key", "logit_bias")),
        (lambda held: held.update(extra=torch.zeros(2)), ("Unexpected key", "extra")),
        (shorter, ("size mismatch", "text.positional_embedding")),
    ):
        refused(lambda change=change: load(release(change)), *words)
    half = release(lambda held: held.update({name: w.half() for name, w in held.items()}))
    assert load(half).model.logit_bias.dtype == torch.float32
    for change, words in (
        (lambda cfg: cfg["model_cfg"]["text_cfg"].update(layers=1_000_000), ("more layers",)),
        (lambda cfg: cfg["model_cfg"]["text_cfg"].update(vocab_size=10**12), ("size mismatch", "token_embedding")),
        (lambda cfg: cfg["preprocess_cfg"].update(std=[0, 0, 0]), ("std", "above 0")),
        (lambda cfg: cfg["preprocess_cfg"].update(mean=["a"] * 3), ("mean",)),
    ):
        refused(lambda change=change: load(release(config=change)), *words)


def test_a_damaged_release_folder(release):
    folder = Path(release())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last] += 1000
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(lambda: load(str(folder)), "the tokenizer has ids up to")
    for name in ("open_clip_config.json", "open_clip_model.safetensors", "tokenizer.json"):
        folder = Path(release())
        (folder / name).unlink()
        os.mkfifo(folder / name)
        refused(lambda folder=folder: load(str(folder)), name, "is no regular file")
    folder = Path(release())
    (folder / "open_clip_config.json").write_text("[" * 100_000)
    refused(lambda: load(str(folder)), "not valid JSON")


# What hangs


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(BadImage):
        open_image(tmp_path / "pipe.jpg")
    os.mkfifo(tmp_path / "pipe.tar")
    refused(lambda: read(tmp_path / "pipe.tar", tmp_path), "is no regular file")
    os.mkfifo(tmp_path / "pipe.csv")
    refused(lambda: read(tmp_path / "pipe.csv", tmp_path))
    folder = pairs(tmp_path / "pairs", 12)
    for name in ("i3.txt", "i4.txt"):
        (folder / name).unlink()
    os.mkfifo(folder / "i3.txt")
    (folder / "i4.txt").mkdir()
    records, counts = read(folder, tmp_path)
    assert (len(records), counts) == (10, {"bad text file": 2})


@pytest.mark.parametrize(
    "setting",
    [dict(images="1e18"), dict(threads=1000), dict(threads=99999999999), dict(seed=2**64), dict(epochs=1e308)]
    + [dict(batch_size=10**18), dict(workers=10**6), dict(items=10**18), dict(warmup=10**30), dict(gpus=10**6)],
)
def test_numbers_that_would_not_end(setting):
    refused(lambda: Config.of(setting), *setting)
    assert Config.of(dict(seed=2**32 - 1)).seed == 2**32 - 1


def test_a_value_is_not_written_out(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join(9 * [f'*a{i - 1}'])}]" for i in range(1, 12)]
    bomb = "{" + ", ".join(lines) + "}"
    refused(lambda: Config.of(dict(method_options=bomb)), "method_options", "must be a mapping")


# What is said in one line


def test_names_that_are_no_text(tmp_path):
    folder = pairs(tmp_path / "pairs", 12)
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


def test_control_characters_are_shown_as_text(tmp_path):
    skips = Skips()
    skips.add("a\x1b[31m\nb.png", "broken image")
    assert str(skips).isprintable() and r"\x1b[31m" in str(skips)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    folder = table(tmp_path / "data")
    (tmp_path / "cache").write_text("a file in the way")
    records = open_data(folder, index_folder=tmp_path / "cache")
    assert len(records) == 12 and "nothing is kept" in capsys.readouterr().out
    (tmp_path / "data" / "cache").write_text("a file in the way")
    monkeypatch.setattr(folders, "project_root", lambda: tmp_path)
    assert (folders.benchmark_folder("world", "test", items=20, images=60) / "retrieval.json").is_file()


def test_names_that_look_like_patterns(tmp_path, monkeypatch):
    for name in ("br{a,b}ce", "photos:2024", "what?", "star*"):
        folder = table(tmp_path / name)
        file = folder / "captions.csv"
        for source in map(find_source, (folder, file, [str(file)])):
            assert isinstance(source, Tables) and source.places == [str(file)]


def test_nested_json_and_many_phrases(tmp_path):
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    refused(lambda: read_entries(tmp_path / "deep.jsonl"), "line 1", "not valid JSON")
    folder = table(tmp_path / "data")
    (folder / "captions.csv").unlink()
    rows = [dict(image=f"i{i}.png", caption="a red mug", phrases=["a red mug"] * (i or 100_000)) for i in range(2)]
    rows.append(dict(image="i2.png", caption="a red mug", phrases="[" * 100_000))
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records, counts = read(folder, tmp_path)
    assert (len(records), records.phrase_count, counts) == (2, 100_001, {"bad phrases": 1})


def test_two_prepares_in_one_folder(tmp_path, monkeypatch):
    "The second says so, and leaves what the first writes alone; when the first has ended, it does its work"
    table(tmp_path / "data")
    monkeypatch.setattr("c2lip.data.prepare.PATIENCE", 0.1)
    out = tmp_path / "out"
    out.mkdir()
    with FileLock(out / "prepare.lock"):
        refused(
            lambda: prepare(str(tmp_path / "data"), out, progress=False), "another prepare writes to", "wait for it"
        )
        assert not list(out.glob("p*.parquet"))
    assert prepare(str(tmp_path / "data"), out, progress=False)["captions"] == 12
