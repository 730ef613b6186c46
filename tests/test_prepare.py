"""Any number of processes writes the same bytes, a kill costs only unfinished parts, nothing is lost uncounted."""

import csv
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from grammar import read_grammar, sentence_text, template_caption
from PIL import Image
from tqdm import tqdm
from writing import encoded, read, write_tar

from c2lip.concepts import load_pipeline, noun_phrases_many, phrases_of
from c2lip.core import UserError
from c2lip.lab.data import sources
from c2lip.lab.data.prepare import prepare
from c2lip.lab.data.sources import open_data


@pytest.fixture(autouse=True)
def no_threads(monkeypatch):
    "tqdm's thread ends, and those that other tests left wait: so workers are forked, which takes no time"
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    if tqdm.monitor:
        tqdm.monitor.exit()
        tqdm.monitor = None


def tar(path, samples):
    "A shard of samples (key, {extension: bytes})"
    write_tar(path, [(f"{key}.{kind}", content) for key, members in samples for kind, content in members.items()])


def image(kind="png"):
    return encoded(Image.new("RGB", (4, 4)), kind)


def shard(path, captions):
    tar(path, [(f"{i:06d}", dict(png=image(), txt=caption.encode())) for i, caption in enumerate(captions)])


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    rules = read_grammar()
    rng = random.Random(3)
    for n in range(4):
        captions = [sentence_text(template_caption(rules, rng)) for _ in range(60)]
        shard(folder / f"{n:05d}.tar", [*captions, "Le chat est sur la table", "very " * 600])
    return folder


def test_any_number_of_workers_writes_the_same_bytes(shards, tmp_path):
    one = tmp_path / "one"
    two = tmp_path / "two"
    a = prepare(str(shards / "{00000..00003}.tar"), one, 1, progress=False)
    b = prepare(str(shards / "*.tar"), two, 2, progress=False)
    assert a == b
    assert a["none"] >= 8
    assert [a[name] for name in ("captions", "not_english", "truncated", "parts")] == [4 * 62, 4, 4, 4]

    for part in [*one.glob("part-*.parquet"), one / "captions.parquet"]:
        assert part.read_bytes() == (two / part.name).read_bytes()
    records = read(one / "captions.parquet")
    assert all(p.is_in(r.caption) for r in records for p in r.phrases)
    assert len(records) == 4 * 62 and records[0].image().startswith(b"\x89PNG")  # the image is still in its shard


def test_a_kill_ends_the_workers_and_costs_only_what_was_unfinished(shards, tmp_path):
    whole = tmp_path / "whole"
    folder = tmp_path / "killed"
    expected = prepare(str(shards / "*.tar"), whole, progress=False)
    words = f"{str(shards / '*.tar')!r}, {str(folder)!r}, 2, progress=False"
    code = f"import sys; from c2lip.lab.data.prepare import prepare; assert 'ray' not in sys.modules; prepare({words})"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

    def children():
        return [p for p in os.listdir("/proc") if p.isdigit() and _session(p) == process.pid]

    until = time.time() + 120
    while not list(folder.glob("part-*.json")) and time.time() < until:
        time.sleep(0.01)
    process.kill()
    process.wait()
    while children() and time.time() < until:
        time.sleep(0.05)
    assert not children()
    kept = {p.name: p.stat().st_mtime_ns for p in folder.glob("part-*.parquet") if p.with_suffix(".json").exists()}
    assert kept
    assert prepare(str(shards / "*.tar"), folder, progress=False) == expected
    assert all((folder / name).stat().st_mtime_ns == when for name, when in kept.items())
    assert (folder / "captions.parquet").read_bytes() == (whole / "captions.parquet").read_bytes()


def _session(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return int(fields[3]) if fields[0] != "Z" else None


def test_changed_rules_or_sources_are_done_again(shards, tmp_path):
    folder = tmp_path / "again"
    source = tmp_path / "a.tar"
    source.write_bytes((shards / "00000.tar").read_bytes())
    first = prepare(str(source), folder, progress=False)
    second = prepare(str(source), folder, rules=dict(max_phrases=1), progress=False)
    assert second["phrases"] < first["phrases"]
    assert second["rules"]["max_phrases"] == 1
    shard(source, ["a red dog"])
    assert prepare(str(source), folder, progress=False)["captions"] == 1


@pytest.fixture
def cc3m(tmp_path):
    "Two shards of pixparse/cc3m-wds and DreamLIP's csv; one image has no row, two rows have no image, one is double"
    for n in range(2):
        samples = []
        for i in range(2):
            key = f"{n}{i:08d}"
            url = f"http://images.example/{2 * n + i}.jpg?a=1&b=2"
            facts = json.dumps(dict(caption="raw words", status="success", url=url, key=key))
            samples.append((key, dict(jpg=image("jpeg"), txt=b"raw words", json=facts.encode())))
        tar(tmp_path / f"cc3m-train-{n:04d}.tar", samples)

    names = ["Image Path", "raw_caption", "shortIB_captions", "longIB_captions", "shortSV_captions", "longSV_captions"]
    captions = [(0, "A red couch,\nby the wall."), (1, "A dog on a bench."), (2, "Two men ride “brown” horses.")]
    captions += [(2, "a second caption"), (7, "no image"), (8, "none either")]
    with (tmp_path / "cc3m_3long_3short_1raw_captions_url.csv").open("w", newline="", encoding="utf8") as file:
        table = csv.writer(file)
        table.writerow([*names, "shortLLA_captions", "longLLA_captions"])
        for i, caption in captions:
            url = f"http://images.example/{i}.jpg?a=1&b=2"
            table.writerow([url, "raw", "a", "b", "c", "d", caption, "A long one. " * 20])
    return tmp_path


def test_dreamlip_joined_by_url(cc3m):
    table = cc3m / "cc3m_3long_3short_1raw_captions_url.csv"
    manifest = prepare(str(cc3m / "cc3m-train-{0000..0001}.tar"), cc3m / "out", captions=table, progress=False)
    joined = manifest["joined"]
    assert (joined["table"], joined["rows"], joined["skipped"]) == (table.name, 5, {"repeated": 1})
    assert joined["images_without_row"] == 1

    records = read(cc3m / "out")
    keys = ["cc3m-train-0000/000000000", "cc3m-train-0000/000000001", "cc3m-train-0001/100000000"]
    texts = ["A red couch, by the wall.", "A dog on a bench.", 'Two men ride "brown" horses.']
    assert [(r.key, r.caption) for r in records] == list(zip(keys, texts))
    assert [p.text for p in records[1].phrases] == ["A dog", "a bench"]
    assert records[0].image()[:2] == b"\xff\xd8"

    how = dict(captions=table, caption_column="longSV_captions", progress=False)
    other = prepare(str(cc3m / "*.tar"), cc3m / "out", **how)  # another column: done again
    assert other["captions"] == 3
    assert {r.caption for r in read(cc3m / "out")} == {"d"}


def test_dreamlip_s_short_captions_are_a_set(cc3m):
    "Three columns make the captions of an image, each with its phrases"
    table = cc3m / "cc3m_3long_3short_1raw_captions_url.csv"
    short = "shortLLA_captions,shortIB_captions, shortSV_captions"
    settings = dict(captions=table, caption_column=short, rules=dict(none="caption"), progress=False)
    manifest = prepare(str(cc3m / "cc3m-train-{0000..0001}.tar"), cc3m / "out", **settings)
    assert (manifest["captions"], manifest["further"]) == (3, 6)

    records = open_data(cc3m / "out", index_folder=cc3m / "index")
    for r in records:
        assert [(c.text, [p.text for p in c.phrases]) for c in r.further] == [("a", ["a"]), ("c", ["c"])]
    assert [p.text for p in records[1].phrases] == ["A dog", "a bench"]
    assert manifest["phrases"] == records.phrase_count == sum(len(c.phrases) for r in records for c in r.captions)
    assert [r.further for r in records.subset(np.array([2, 0]))] == [records[2].further, records[0].further]


def test_phrases_of_a_joined_table(cc3m):
    rows = [dict(url=f"http://images.example/{i}.jpg?a=1&b=2", caption="A dog.", phrases=["dog"]) for i in (0, 3, 9)]
    (cc3m / "joined.jsonl").write_text("\n".join(map(json.dumps, rows)))
    manifest = prepare(str(cc3m / "*.tar"), cc3m / "out", captions=cc3m / "joined.jsonl", progress=False)
    assert manifest["captions"] == manifest["given"] == manifest["joined"]["images_without_row"] == 2
    (cc3m / "other.jsonl").write_text(json.dumps(dict(url="x", caption="A dog.")))
    with pytest.raises(UserError, match="2 images have no row"):
        prepare(str(cc3m / "cc3m-train-0001.tar"), cc3m / "none", captions=cc3m / "other.jsonl", progress=False)


def test_a_table_in_pieces(tmp_path, monkeypatch):
    # keys are told apart over all pieces; a source's image may come again, with another caption or with the same
    monkeypatch.setattr(sources, "PIECE", piece := 500)
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(image())
    rows = [dict(image=f"{i % 3}.png", caption=f"dog {i // 2}") for i in range(piece + 50)]
    rows += [rows[0], dict(image="gone.png", caption="x")]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one = prepare(str(tmp_path / "t.jsonl"), tmp_path / "one", progress=False)
    assert (one["parts"], one["captions"]) == (2, piece + 50)
    assert one["skipped"] == {"duplicate key": 1, "missing file": 1}
    assert len({r.key for r in read(tmp_path / "one")}) == piece + 50

    kept = (tmp_path / "one" / "part-00000.parquet").stat().st_mtime_ns
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, [*rows, dict(image="0.png", caption="a new row")])))
    assert prepare(str(tmp_path / "t.jsonl"), tmp_path / "one", progress=False)["captions"] == piece + 51

    again = (tmp_path / "one" / "part-00000.parquet").stat().st_mtime_ns
    assert again == kept, "rows at the end cost no more than themselves"


def test_same_bytes_under_ray(shards, tmp_path, monkeypatch):
    # Ray's word for: stay on the loopback address, which the offline guard lets pass
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray", reason="Ray is not installed here (pip install 'c2lip[ray]')")
    quiet = dict(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        ray.init(num_cpus=1, object_store_memory=80_000_000, **quiet)
    except Exception as e:  # it gives its own processes 15 seconds to start
        if "timed out" not in str(e):
            raise
        pytest.skip(f"this machine is too busy for Ray to start: {e}")
    try:
        under = prepare(str(shards / "*.tar"), tmp_path / "ray", 2, ray="local", progress=False)
        shard(tmp_path / "b.tar", ["a dog"] * 3 + [""] * 9)
        with pytest.raises(UserError, match="empty caption"):
            prepare(str(tmp_path / "b.tar"), tmp_path / "broken", 2, ray="local", progress=False)
    finally:
        ray.shutdown()
    assert under == prepare(str(shards / "*.tar"), tmp_path / "plain", progress=False)

    for part in (tmp_path / "plain").glob("*.parquet"):
        assert part.read_bytes() == (tmp_path / "ray" / part.name).read_bytes()


def test_losses_are_counted_and_too_many_stop(tmp_path):
    shard(tmp_path / "a.tar", ["a dog"] * 30 + [""])
    folder = tmp_path / "o"
    assert prepare(str(tmp_path / "a.tar"), folder, progress=False)["skipped"] == {"empty caption": 1}

    shard(tmp_path / "b.tar", ["a dog"] * 3 + [""] * 9)
    with pytest.raises(UserError, match="empty caption"):
        prepare(str(tmp_path / "b.tar"), folder, progress=False)

    prepare(str(tmp_path / "b.tar"), tmp_path / "loose", progress=False, max_skipped=0.8)
    # one shard in two is damaged: what it still holds is kept, but it is too much
    (tmp_path / "c.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:4300])
    two = [str(tmp_path / "a.tar"), str(tmp_path / "c.tar")]
    with pytest.raises(UserError, match="1 of 2 shards are missing or damaged: .*c.tar; at most 10%"):
        prepare(two, tmp_path / "p", progress=False)

    again = prepare(two, tmp_path / "p", progress=False, max_skipped=0.5)
    assert again["skipped"] == {"empty caption": 1, "damaged shard": 1}


def test_spellings_are_forgotten(tmp_path):
    # a caption's words leave nothing behind in spaCy's vocabulary, which would otherwise grow for good
    nlp = load_pipeline()
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=9)) for _ in range(1000)]
    before = len(nlp.vocab.strings)
    found = noun_phrases_many([f"A {w} dog" for w in words])
    assert len(nlp.vocab.strings) <= before + 50
    assert found == [phrases_of(doc) for doc in nlp.pipe(f"A {w} dog" for w in words)]
    with nlp.memory_zone():
        assert noun_phrases_many(["A red dog"])[0][0].text == "A red dog"  # a zone of the caller's own is respected
