"""The command as a terminal shows it: exit codes, one line for each mistake, no traceback; light until work begins."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from PIL import Image

from c2lip.core.files import project_root
from c2lip.data.sources import open_data
from c2lip.dev.command import main

C2LIP = (
    [Path(sys.executable).with_name("c2lip")]
    if Path(sys.executable).with_name("c2lip").exists()
    else [sys.executable, "-c", "import sys; from c2lip.dev.command import main; sys.exit(main())"]
)


def read(source):
    "The records of a data set as a list; the index is not kept"
    with tempfile.TemporaryDirectory() as folder:
        return list(open_data(source, index_folder=folder))


@pytest.fixture
def table(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [
        dict(key=str(i), image="a.png", caption=c)
        for i, c in enumerate(["A red couch by the wall.", "Un perro y una mesa en la calle", "Two dogs."])
    ]
    (tmp_path / "captions.csv").write_text(
        "key,image,caption\n" + "".join(f"{r['key']},{r['image']},{r['caption']}\n" for r in rows)
    )
    return tmp_path


def test_prepare_in_a_terminal(table, run):
    # relative paths start in the current folder, wherever the project lies
    done = run(
        *C2LIP, "prepare", "captions.csv", "out", "--workers", "2", "--rule", "strip_determiners=true", cwd=table
    )
    assert done.returncode == 0, done.out
    assert (
        "3 captions, 3 phrases (1.0 a caption) in out" in done.out
        and "1 without a phrase, 1 not English" in done.out
        and "digest" in done.out
    )
    assert [[p.text for p in r.phrases] for r in read(table / "out")] == [["red couch", "wall"], [], ["Two dogs"]]
    assert json.loads((table / "out" / "manifest.json").read_text())["rules"]["strip_determiners"] is True
    assert (
        run(*C2LIP, "prepare", "captions.csv", "out", "-q", "--rule", "strip_determiners=true", cwd=table).out.strip()
        == ""
    )  # nothing is left to do, and nothing is said


def test_nothing_heavy_is_imported_for_help():
    code = """
import sys, c2lip.dev.command
try:
    c2lip.dev.command.main(['prepare', '--help'])
except SystemExit as e:
    assert e.code == 0
import c2lip.training.runs, c2lip.training.config, c2lip.dev.launch
assert not {'torch', 'spacy', 'ray', 'open_clip'} & set(sys.modules), sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=project_root())


@pytest.mark.parametrize(
    "words,message",
    [
        (["captions.csv"], "the following arguments are required: TARGET"),
        (["caption.csv", "out"], "did you mean captions.csv?"),
        (["captions.csv", "out", "--rule", "of_merg=all"], "did you mean of_merge?"),
        (["captions.csv", "out", "--rule", "max_words=many"], "is no int"),
        (["captions.csv", "out", "--rule", "max_words"], "expected NAME=VALUE"),
        (["captions.csv", "out", "--pipeline", "en_core_web_smm"], "python -m spacy download en_core_web_sm"),
        (["captions.csv", "out", "--caption-column", "captoin"], "give it as --caption-column"),
        (["captions.csv", "out", "--captions", "captions.csv"], "joined to tar shards"),
        (["captions.csv", "out", "--workers", "0"], "at least one process"),
        (["captions.csv", "."], "choose another folder"),
        (["captions.csv", "a.png/x"], "cannot be written"),
        (["a.png", "out"], "neither a table"),
    ],
)
def test_mistakes_are_one_line(table, words, message, monkeypatch, capsys):
    monkeypatch.chdir(table)
    try:
        code = main(["prepare", *words])
    except SystemExit as e:
        code = e.code
    said = capsys.readouterr().err
    assert code == 2 and message in said and "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("c2lip prepare: error: ")


def test_runs_elsewhere(tmp_path, monkeypatch, capsys):
    "In a folder that is no clone, relative folders start there"
    (tmp_path / "mine" / "empty").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for words, code, message in ((["mine"], 0, "empty"), ([], 0, "no runs yet"), (["minne"], 2, "there is no folder")):
        assert main(["runs", *words]) == code
        shown = capsys.readouterr()
        assert message in shown.out + shown.err


def test_ctrl_c(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "t.jsonl").write_text(
        "\n".join(json.dumps(dict(key=str(i), image="a.png", caption=f"A dog and {i} cats")) for i in range(60_000))
    )
    process = subprocess.Popen(
        [*map(str, C2LIP), "prepare", "t.jsonl", "out", "--workers", "2"],
        cwd=tmp_path,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.time() + 120
    while not list(tmp_path.glob("out/part-*.json")) and time.time() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "goes on from there" in said and "Traceback" not in said, said


def test_explore_writes_the_figure(tmp_path, run, capfd, monkeypatch):
    "Relative paths start in the current folder, as everywhere in a terminal"
    Image.new("RGB", (64, 48), "red").save(tmp_path / "mine.png")
    words = [
        "--model",
        "base",
        "--image",
        "mine.png",
        "--phrase",
        "a red wall",
        "--phrase",
        "a mug",
        "--kind",
        "softmax",
    ]
    done = run(*C2LIP, "explore", *words, "--output", "maps", cwd=tmp_path)
    assert done.returncode == 0 and "mine.png: “a red wall”, “a mug”" in done.out, done.out
    assert "has no reason to know this image" in done.out
    written = sorted(path.name for path in (tmp_path / "maps").iterdir())
    assert written == ["maps.json", "maps.pdf", "maps.png", "maps.svg"]
    record = json.loads((tmp_path / "maps" / "maps.json").read_text())
    assert record["phrases"] == ["a red wall", "a mug"] and record["kind"] == "softmax"
    words = ["--model", "base", "--image", "mine.png", "--phrase", "a mug", "--head", "1"]
    done = run(*C2LIP, "explore", *words, "--output", "two", cwd=tmp_path)
    record = json.loads((tmp_path / "two" / "maps.json").read_text())
    assert done.returncode == 0 and record["head"] == 1 and record["kind"] == "head", done.out
    monkeypatch.chdir(tmp_path)
    assert main(["explore", *words, "--kind", "softmax"]) == 2
    assert "--head is of the kind head, not of softmax" in capfd.readouterr().err
    assert main(["explore", "--model", "bass"]) == 2
    said = capfd.readouterr().err
    assert "there is no model 'bass'" in said and "Traceback" not in said
