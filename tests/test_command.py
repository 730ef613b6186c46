"""The command as a terminal shows it: exit codes, one line for each mistake, no traceback; light until work begins."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from PIL import Image

from c2lip.core.files import project_root
from c2lip.lab.data.sources import open_data
from c2lip.lab.dev.command import main


@pytest.fixture
def table(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    captions = ["A red couch by the wall.", "Un perro y una mesa en la calle", "Two dogs."]
    rows = "".join(f"{i},a.png,{caption}\n" for i, caption in enumerate(captions))
    (tmp_path / "captions.csv").write_text(f"key,image,caption\n{rows}")
    return tmp_path


def test_prepare(table, run, monkeypatch, capsys):
    "Relative paths start in the current folder, wherever the project lies"
    monkeypatch.chdir(table)
    words = ["prepare", "captions.csv", "out", "--rule", "strip_determiners=true"]
    done = run("c2lip", *words, "--workers", "2", cwd=table)
    assert done.returncode == 0 and "3 captions, 3 phrases (1.0 a caption) in out\n" in done.out, done.out
    records = open_data(table / "out", index_folder=table / "index")
    assert [[p.text for p in r.phrases] for r in records] == [["red couch", "wall"], [], ["Two dogs"]]
    assert json.loads((table / "out" / "manifest.json").read_text())["rules"]["strip_determiners"] is True
    assert main([*words, "-q"]) == 0 and capsys.readouterr().out == "", "nothing is left to do"


def test_nothing_heavy_is_imported_for_help():
    code = """
import sys, c2lip.lab.dev.command
try:
    c2lip.lab.dev.command.main(['prepare', '--help'])
except SystemExit as e:
    assert e.code == 0
import c2lip.lab.training.runs, c2lip.lab.training.launch
c2lip.lab.training.launch.check_run('nbs/train.ipynb', {'method': 'clic', 'plain_every': 3, 'concepts': 'pool'})
assert c2lip.lab.dev.command.main(['list', 'suites']) == 0
assert not {'torch', 'spacy', 'ray', 'open_clip'} & set(sys.modules), sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=project_root())


@pytest.mark.parametrize(
    "words,message",
    [
        (["captions.csv"], "the following arguments are required: TARGET"),
        (["captions.csv", "out", "--rule", "merge_off=all"], "did you mean merge_of?"),
        (["captions.csv", "out", "--rule", "max_words"], "expected NAME=VALUE"),
        (["captions.csv", "out", "--pipeline", "en_core_web_smm"], "python -m spacy download en_core_web_sm"),
        (["captions.csv", "out", "--caption-column", "captoin"], "give it as caption_column"),
        (["captions.csv", "."], "choose another folder"),
        (["captions.csv", "a.png/x"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(table, words, message, monkeypatch, capsys):
    monkeypatch.chdir(table)
    try:
        code = main(["prepare", *words])
    except SystemExit as e:
        code = e.code
    shown = capsys.readouterr().err
    assert code == 2
    assert message in shown
    assert "Traceback" not in shown
    assert shown.strip().splitlines()[-1].startswith("c2lip prepare: error: ")


def test_runs_elsewhere(tmp_path, monkeypatch, capsys):
    "In a folder that is no clone, relative folders start there"
    (tmp_path / "mine" / "empty").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for word, code, message in (("mine", 0, "empty"), ("mine/empty", 0, "no runs yet"), ("minne", 2, "is no folder")):
        assert main(["runs", word]) == code
        shown = capsys.readouterr()
        assert message in shown.out + shown.err


def test_ctrl_c(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [dict(key=str(i), image="a.png", caption=f"A dog and {i % 500} cats") for i in range(30_000)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["c2lip", "prepare", "t.jsonl", "out", "--workers", "2"]
    with subprocess.Popen(words, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        until = time.time() + 120
        while not list(tmp_path.glob("out/part-*.json")) and time.time() < until:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all
        shown = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "goes on from there" in shown and "Traceback" not in shown, shown


def test_explore_writes_the_figure(tmp_path, monkeypatch, capsys):
    "Relative paths start in the current folder, as everywhere in a terminal"
    Image.new("RGB", (64, 48), "red").save(tmp_path / "mine.png")
    monkeypatch.chdir(tmp_path)
    words = ["explore", "--model", "base", "--image", "mine.png", "--phrase", "a mug"]
    assert main([*words, "--phrase", "a red wall", "--kind", "softmax", "--output", "maps"]) == 0

    shown = capsys.readouterr().out
    assert "mine.png: “a mug”, “a red wall”" in shown
    assert "never saw such an image" in shown

    written = sorted(path.name for path in (tmp_path / "maps").iterdir())
    assert written == ["maps.json", "maps.pdf", "maps.png", "maps.svg"]

    record = json.loads((tmp_path / "maps" / "maps.json").read_text())
    assert record["phrase"] == ["a mug", "a red wall"]
    assert record["kind"] == "softmax"
    assert main([*words, "--scale", "20", "--output", "two"]) == 0
    record = json.loads((tmp_path / "two" / "maps.json").read_text())
    assert (record["scale"], record["kind"]) == (20, "softmax")

    for wrong, message in (
        ([*words, "--scale", "20", "--kind", "head"], "--scale is of the kind softmax, not of head"),
        (["explore", "--model", "bass"], "there is no model 'bass'"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err
