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
from c2lip.workshop.command import main

C2LIP = (
    [Path(sys.executable).with_name("c2lip")]
    if Path(sys.executable).with_name("c2lip").exists()
    else [sys.executable, "-c", "import sys; from c2lip.workshop.command import main; sys.exit(main())"]
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


def test_help(run):
    done = run(*C2LIP, "prepare", "--help")
    assert done.returncode == 0 and "examples:" in done.out and "--captions TABLE" in done.out
    assert run(*C2LIP).returncode == 2


def test_nothing_heavy_is_imported_for_help():
    code = """
import sys, c2lip.workshop.command
try:
    c2lip.workshop.command.main(['prepare', '--help'])
except SystemExit:
    pass
assert not {'torch', 'spacy', 'numpy', 'ray'} & set(sys.modules), sys.modules.keys()
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


def test_lists_fit_and_are_plain(run):
    done = run(*C2LIP, "list", "suites", env={"COLUMNS": "80"})
    assert done.returncode == 0 and "facebook/winoground" in done.out
    assert max(map(len, done.out.splitlines())) <= 80 and all(c.isprintable() or c == "\n" for c in done.out)


@pytest.mark.parametrize("what", ["recipes", "models"])
def test_lists_are_light(what):
    "What needs no torch does not wait for it"
    code = f"import sys; from c2lip.workshop.command import main; assert main(['list', '{what}']) == 0"
    code += "; assert 'torch' not in sys.modules and 'open_clip' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=project_root())


def test_runs_elsewhere(tmp_path, run):
    "In a folder that is no clone: relative folders start there, and nothing is removed without an answer"
    (tmp_path / "mine" / "empty").mkdir(parents=True)
    os.utime(tmp_path / "mine" / "empty", (0, 0))
    done = run(*C2LIP, "runs", "mine", cwd=tmp_path)
    assert done.returncode == 0 and "empty*" in done.out and "--clean removes" in done.out
    done = run(*C2LIP, "runs", "mine", "--clean", cwd=tmp_path)
    assert done.returncode == 2 and "add --yes" in done.out and (tmp_path / "mine" / "empty").is_dir()
    assert run(*C2LIP, "runs", "mine", "--clean", "--yes", cwd=tmp_path).returncode == 0
    assert not (tmp_path / "mine" / "empty").exists()
    assert "no runs" in run(*C2LIP, "runs", "mine", cwd=tmp_path).out
    for words in (["runs"], ["runs", "--clean"]):  # where nothing has been run yet, which is no error
        fresh = run(*C2LIP, *words, cwd=tmp_path / "mine")
        assert fresh.returncode == 0 and "error" not in fresh.out, fresh.out
    done = run(*C2LIP, "runs", "minne", cwd=tmp_path)
    assert done.returncode == 2 and "c2lip runs: error: there is no folder" in done.out


def test_runs_is_light():
    code = "import sys, c2lip.training.runs; assert not {'torch', 'open_clip', 'spacy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=project_root())


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
    words = ["--model", "base", "--image", "mine.png", "--beside", "mine.png", "--phrase", "a mug", "--head", "1"]
    done = run(*C2LIP, "explore", *words, "--output", "two", cwd=tmp_path)
    record = json.loads((tmp_path / "two" / "maps.json").read_text())
    assert done.returncode == 0 and record["head"] == 1 and record["kind"] == "head", done.out
    assert record["beside"]["image"] == "mine.png"
    monkeypatch.chdir(tmp_path)
    assert main(["explore", *words, "--kind", "softmax"]) == 2
    assert "--head is of the kind head, not of softmax" in capfd.readouterr().err
    assert main(["explore", "--model", "bass"]) == 2
    said = capfd.readouterr().err
    assert "there is no model 'bass'" in said and "Traceback" not in said
