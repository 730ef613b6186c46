"""Preparing shards: any number of processes writes the same bytes, a kill costs only unfinished parts, nothing is lost without a count."""
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time

import pytest
from PIL import Image

from c2lip import data, treebank
from c2lip.core import UserError
from c2lip.prepare import prepare, prepare_part


def shard(path, captions, start=0):
    picture = io.BytesIO(); Image.new("RGB", (4, 4)).save(picture, "png")
    with tarfile.open(path, "w") as tar:
        for i, caption in enumerate(captions, start):
            for kind, content in (("png", picture.getvalue()), ("txt", caption.encode()), ("json", json.dumps({"url": f"u{i}"}).encode())):
                info = tarfile.TarInfo(f"{i:06d}.{kind}"); info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder, rules, rng = tmp_path_factory.mktemp("shards"), treebank.read_grammar(), random.Random(3)
    for n in range(4): shard(folder/f"{n:05d}.tar", [treebank.sentence_text(treebank.template_caption(rules, rng)) for _ in range(60)] + ["Le chat est sur la table", "very " * 600])
    return folder


def out(folder, name):
    (folder/name).mkdir()
    return folder/name


def test_any_number_of_workers_writes_the_same_bytes(shards, tmp_path):
    one, two = out(tmp_path, "one"), out(tmp_path, "two")
    a = prepare(str(shards/"{00000..00003}.tar"), one, 1, progress=False)
    b = prepare(str(shards/"*.tar"), two, 2, progress=False)
    assert a == b and a["captions"] == 4 * 62 and a["not_english"] == 4 and a["cut"] == 4 and a["none"] >= 8 and a["parts"] == 4
    for part in [*one.glob("part-*.parquet"), one/"captions.parquet"]: assert part.read_bytes() == (two/part.name).read_bytes()
    records = data.read(one/"captions.parquet")
    assert len(records) == 4 * 62 and all(r.caption[p.start:p.end] == p.text for r in records for p in r.phrases)
    assert records[0].image().startswith(b"\x89PNG")  # the picture is still in its shard


def test_a_kill_costs_only_what_was_unfinished(shards, tmp_path):
    whole, folder = out(tmp_path, "whole"), out(tmp_path, "killed")
    expected = prepare(str(shards/"*.tar"), whole, progress=False)
    code = f"from c2lip.prepare import prepare; prepare({str(shards/'*.tar')!r}, {str(folder)!r}, progress=False)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    until = time.time() + 120
    while not (folder/"part-00000.json").exists() and time.time() < until: time.sleep(.01)
    os.killpg(process.pid, signal.SIGKILL); process.wait()
    kept = {p.name: p.stat().st_mtime_ns for p in folder.glob("part-*.parquet") if p.with_suffix(".json").exists()}
    assert kept
    assert prepare(str(shards/"*.tar"), folder, progress=False) == expected
    assert all((folder/name).stat().st_mtime_ns == when for name, when in kept.items())
    assert (folder/"captions.parquet").read_bytes() == (whole/"captions.parquet").read_bytes()


def test_changed_rules_or_sources_are_done_again(shards, tmp_path):
    folder, source = out(tmp_path, "again"), tmp_path/"a.tar"
    source.write_bytes((shards/"00000.tar").read_bytes())
    first = prepare(str(source), folder, progress=False)
    second = prepare(str(source), folder, rules=dict(max_phrases=1), progress=False)
    assert second["phrases"] < first["phrases"] and second["rules"]["max_phrases"] == 1
    shard(source, ["a red dog"])
    assert prepare(str(source), folder, progress=False)["captions"] == 1


def test_reference_layout_and_csv(tmp_path):
    # the public reference's keys, with phrases given or not; DreamLIP's csv has the captions in a column of the same name
    Image.new("RGB", (4, 4)).save(tmp_path/"a.png"); Image.new("RGB", (4, 4)).save(tmp_path/"b.png")
    (tmp_path/"ref.json").write_text(json.dumps([dict(image="a.png", shortLLA_captions=["A red couch by the wall."], nounphrases=["red couch"]), dict(image="b.png", shortLLA_captions="A dog on a bench.", nounphrases=None)]))
    (tmp_path/"dream.csv").write_text('image,raw_caption,shortLLA_captions\na.png,x,"A red couch, by the wall."\nb.png,y,A dog on a bench.\n')
    counts = prepare_part(tmp_path/"ref.json", tmp_path/"ref.jsonl")
    assert (counts["given"], counts["phrases"]) == (1, 3)
    prepare_part(tmp_path/"dream.csv", tmp_path/"dream.jsonl")
    assert [[p.text for p in r.phrases] for r in data.read(tmp_path/"dream.jsonl")] == [["A red couch", "the wall"], ["A dog", "a bench"]]


def test_losses_are_counted_and_too_many_stop(tmp_path):
    shard(tmp_path/"a.tar", ["a dog"] * 30 + [""])
    folder = out(tmp_path, "o")
    assert prepare(str(tmp_path/"a.tar"), folder, progress=False)["skipped"] == {"empty caption": 1}
    shard(tmp_path/"b.tar", ["a dog"] * 3 + [""] * 9)
    with pytest.raises(UserError, match="empty caption"): prepare(str(tmp_path/"b.tar"), folder, progress=False)
