"""Readers, counts, orders and the loader: hostile files, twins of fast paths, and what only a maintainer needs."""

import base64
import gzip
import io
import json
import os
import pickle
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from PIL import Image
from torchvision import transforms
from writing import Canary, encoded, read, write_tar

from c2lip.core import Phrase, UserError
from c2lip.lab.data import sources
from c2lip.lab.data.images import open_image
from c2lip.lab.data.loading import Samples, batches, loader
from c2lip.lab.data.records import Record, Skips, with_phrases
from c2lip.lab.data.sources import Index, find_source, open_data
from c2lip.lab.data.tables import write_table

LAYOUTS = yaml.safe_load((Path(__file__).parent / "data" / "layouts.yaml").read_text())


def content(of):
    "The bytes of a text or of an image (None), or bytes"
    return of.encode() if isinstance(of, str) else of or encoded(image(), "jpeg")


SMALL = transforms.Compose([transforms.Resize(16), transforms.CenterCrop(16), transforms.ToTensor()])
CROPPED = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])


def image(i=0, size=(24, 20)):
    return Image.fromarray(np.random.default_rng(i).integers(0, 255, (*size[::-1], 3), dtype=np.uint8))


def shard(path, n=8, extra=lambda i: {}, **facts):
    members = []
    for i in range(n):
        caption = f"A red mug beside a blue boat number {i}."
        row = json.dumps({"caption": caption, "phrases": ["a red mug"], **facts})
        kinds = {"png": encoded(image(i)), "json": row.encode(), **extra(i)}
        members += [(f"{i:05d}.{kind}", content) for kind, content in kinds.items()]
    write_tar(path, members)
    return path


def table_of_bytes(path):
    "As the datasets library writes images"
    rows = [{"image": {"bytes": encoded(image(i)), "path": None}, "text": f"Mug {i}."} for i in range(3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def opened(records):
    "Records with the bytes of their images"
    return [record._replace(image=record.image()) for record in records]


def records(n=12):
    return [Record(f"r{i}", image(i), f"Image {i}.", []) for i in range(n)]


def given(source, skips=None):
    "The records of a source as it gives them, phrases not searched"
    return find_source(source).records(Skips() if skips is None else skips)


def train_on(source, tmp_path, **kw):
    "Keys that training would see in one epoch, batch by batch"
    skips = Skips(1)
    records = open_data(source, skips=skips, index_folder=tmp_path / "cache")
    samples = Samples(records, kw.pop("transform", SMALL), skips=skips)
    return [[s.key for s in b] for b in loader(samples, batches(samples, kw.pop("batch", 1), **kw))]


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_replaced_and_counted(workers):
    rows = records(20)
    order = [[2, 3, 5], [4, 3, 0], [19, 1, 2]]
    rows[3], rows[4] = rows[3]._replace(image=b"no"), rows[4]._replace(image="/nowhere.png")
    samples = Samples(rows, SMALL)
    got = [[s.key for s in b] for b in loader(samples, order, workers=workers)]

    assert all(len(set(b)) == 3 and not {"r3", "r4"} & set(b) for b in got)
    assert got[2] == ["r19", "r1", "r2"]
    assert got[0][::2] == ["r2", "r5"]
    assert got == [[s.key for s in b] for b in loader(Samples(rows, SMALL), order)], "the same for any workers"
    assert samples.skips.counts == {"broken image": 1, "missing file": 1}
    assert (samples.skips.tried, samples.skips.failed) == (9, 3)
    assert len(Samples(rows, SMALL, cache=True)) == 18


def test_a_png_in_16_bit_grey_with_alpha_opens():
    "Pillow has it as RGBA, so its bands are not those of the file"
    png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAQAAADljNBBAAAADUlEQVR42mNwYPj/HwAEAgI/MxkxnAAAAABJRU5ErkJggg=="
    assert open_image(base64.b64decode(png)).size == (1, 1)


def test_many_batches_from_workers_cost_few_file_handles():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    samples = Samples(records(), SMALL, cache=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        kept = list(loader(samples, [list(range(12)) * 10] * 12, workers=2))  # all batches are held on to
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(kept) == 12
    assert len(kept[0]) == 120


def test_tables_agree(tmp_path):
    rows = []
    for i in range(6):
        (tmp_path / f"{i}.png").write_bytes(encoded(image(i)))
        text = f'A red mug, "number {i}", beside a blue boat.'
        rows.append({"File": f"{i}.png", "Text": text, "phrases": [["A red mug", 0, 9], "a blue boat"]})

    (tmp_path / "captions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8-sig")
    (tmp_path / "t.json").write_text(json.dumps(rows))
    flat = pd.DataFrame([{**r, "phrases": json.dumps(r["phrases"])} for r in rows])
    flat.to_csv(tmp_path / "t.csv", index=False)
    flat.to_csv(tmp_path / "t.tsv", index=False, sep="\t")
    flat.to_parquet(tmp_path / "t.parquet")
    wanted = read(tmp_path)
    assert wanted[0].phrases[1].start == wanted[0].caption.index("a blue boat")
    assert len(wanted) == 6

    for name in ("captions.jsonl", "t.json", "t.csv", "t.tsv", "t.parquet"):
        assert read(tmp_path / name) == wanted, name
    table_of_bytes(tmp_path / "bytes.parquet")
    assert open_image(read(tmp_path / "bytes.parquet")[2].image).tobytes() == image(2).tobytes()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_file_of_a_layout_is_read_or_counted(tmp_path, name):
    layout = {"source": ".", "how": {}, "captions": [], "left out": {}, "also": {}, "says": ""} | LAYOUTS[name]
    for file, of in layout["files"].items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(of, dict):
            write_tar(tmp_path / file, [(member, content(data)) for member, data in of.items()])
        else:
            (tmp_path / file).write_bytes(content(of))
    skips = Skips(1)
    source = str(tmp_path / layout["source"])
    if layout["says"]:
        with pytest.raises(UserError, match=layout["says"]):
            read(source, skips, **layout["how"])
        return
    assert [r.caption for r in read(source, skips, **layout["how"])] == layout["captions"]
    assert (skips.counts, dict(skips.unread)) == (layout["left out"], layout["also"])
    assert skips.seen == len(layout["captions"]) + len(skips.rows)


def test_shards_in_every_spelling(tmp_path):
    for i in range(3):
        shard(tmp_path / f"a-{i}.tar")
    wanted = read(tmp_path / "a-{0..2}.tar")
    assert len(wanted) == 24
    assert wanted[9].key == "a-1/00001"
    assert wanted[0].phrases == [Phrase("A red mug", 0, 9)]

    for source in (tmp_path, tmp_path / "a-?.tar", [tmp_path / f"a-{i}.tar" for i in range(3)]):
        assert read(source) == wanted
    assert read(tmp_path / "a-0.tar")[0].image() == encoded(image(0))

    write_table(wanted, tmp_path / "t.parquet")
    write_table([r._replace(phrases=None) for r in wanted], tmp_path / "n.parquet")
    assert read(tmp_path / "t.parquet") == wanted
    assert given(tmp_path / "n.parquet")[0].phrases is None
    assert not list(tmp_path.glob("*.tmp"))


def test_hostile_members_are_not_read(tmp_path):
    evil = pickle.dumps(Canary(tmp_path / "owned"))
    kinds = ("pyd", "pickle", "pkl", "pth", "ten", "npy", "cls", "txt")
    shard(tmp_path / "a.tar", extra=lambda i: dict.fromkeys(kinds, evil))
    samples = Samples(read(tmp_path / "a.tar"), SMALL)
    assert len(list(loader(samples, [[0, 1, 2]]))) == 1
    assert len(train_on(tmp_path / "a.tar", tmp_path, batch=4)) == 2

    pipe = f"pipe:touch {tmp_path}/owned"
    for address in (pipe, pipe.title(), [pipe], "-", "ftp://x/a.tar", "hf://x/a.tar", "s3://a::file:///b.tar"):
        with pytest.raises(UserError):
            read(address)
    assert not (tmp_path / "owned").exists()
    with pytest.raises(UserError, match="exceeded the limit of 1000000"):
        read(str(tmp_path / "{0..9999999999}.tar"))


def test_links_sparse_and_oversized_members(tmp_path, monkeypatch):
    monkeypatch.setattr("c2lip.lab.data.shards.MAX_MEMBER", 5000)
    shard(tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar", "a") as tar:
        kinds = {"9.png": (tarfile.SYMTYPE, 0), "7.json": (tarfile.GNUTYPE_SPARSE, 0), "8.png": (tarfile.REGTYPE, 6000)}
        for name, (kind, size) in kinds.items():
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, size, "/etc/passwd"
            tar.addfile(member, io.BytesIO(bytes(size)))
    skips = Skips(1)
    assert len(read(tmp_path / "a.tar", skips)) == 8
    assert skips.counts.get("member too large", 0) >= 1


def test_compressed_bombs(tmp_path):
    header = tarfile.TarInfo("x")
    header.type = tarfile.XHDTYPE
    header.size = 2**32  # an extended header of 4 GB

    with gzip.open(tmp_path / "a.tar", "wb") as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT))
        file.write(bytes(2**20))
    huge = tarfile.TarInfo("x.bin")
    huge.size = 2**55
    (tmp_path / "b.tar").write_bytes(huge.tobuf(tarfile.GNU_FORMAT) + bytes(2**16))
    for name, cause in (("a.tar", "compressed shard"), ("b.tar", "damaged shard")):
        with pytest.raises(UserError, match=cause):
            read(tmp_path / name)


def test_duplicates_and_damage(tmp_path):
    whole = shard(tmp_path / "a.tar").read_bytes()
    png = encoded(image())
    text = b'{"caption": "A mug."}'
    write_tar(tmp_path / "d.tar", [("1.json", text), ("1.png", png), ("2.png", png), ("2.txt", b"A cup.")] * 2)
    skips = Skips(1)
    assert [r.caption for r in read(tmp_path / "d.tar", skips)] == ["A mug.", "A cup."]
    assert skips.counts == {"duplicate key": 2}

    end = whole.rstrip(b"\0")  # without the end mark
    (tmp_path / "e.tar").write_bytes(end + bytes(-len(end) % 512))
    skips = Skips(1)
    assert len(read(tmp_path / "e.tar", skips)) == 8
    assert skips.counts == {"damaged shard": 1}


def test_index_is_what_the_source_gives(tmp_path):
    for i in range(3):
        facts = json.dumps({"caption": f"A red mug {i} by a boat."}).encode()
        shard(tmp_path / f"a-{i}.tar", extra=lambda i, facts=facts: {"txt": b"x"} if i % 2 else {"json": facts})
    write_table(given(tmp_path / "a-*.tar"), tmp_path / "t.parquet")
    table_of_bytes(tmp_path / "bytes.parquet")
    for source in ("a-*.tar", "t.parquet", "bytes.parquet"):
        source = tmp_path / source
        wanted = with_phrases(given(source))
        for workers in (0, 2):
            found = open_data(source, index_folder=tmp_path / f"cache{workers}", workers=workers)
            assert list(found) == wanted
            assert found.phrase_count == sum(len(r.phrases) for r in wanted)
            assert found.numbers("holdout_fraction").tolist() == [r.holdout_fraction for r in wanted]

    kept = [[p.read_bytes() for p in sorted((tmp_path / f"cache{n}").glob("*.arrow"))] for n in (0, 2)]
    assert kept[0] == kept[1], "the same bytes for any number of workers"

    part = found[1:3]
    assert list(part) == wanted[1:3]
    assert isinstance(part, Index)
    assert found[-1] == wanted[-1]


def test_index_is_made_anew_when_the_source_changes(tmp_path):
    def make():
        return open_data(tmp_path / "a.tar", index_folder=tmp_path / "cache")

    shard(tmp_path / "a.tar", 4)
    assert len(make()) == len(make()) == 4
    assert len(list((tmp_path / "cache").glob("*.arrow"))) == 1
    shard(tmp_path / "a.tar", 5)
    assert len(make()) == 5
    stat = (tmp_path / "a.tar").stat()
    changed = (tmp_path / "a.tar").read_bytes().replace(b"blue", b"pink")
    (tmp_path / "a.tar").write_bytes(changed)
    os.utime(tmp_path / "a.tar", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert "pink" in make()[0].caption, "size and time are as they were"
    (tmp_path / "a.tar").write_bytes(b"no tar")
    with pytest.raises(UserError, match="damaged shard"):
        make()
    assert not list((tmp_path / "cache").glob("*.part"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file cannot be written .*C2LIP_CACHE may name another"):
        open_data(shard(tmp_path / "b.tar"), index_folder=tmp_path / "file")


def test_index_keeps_the_count_of_what_was_left_out(tmp_path):
    for i in range(12):
        shard(tmp_path / f"a-{i:02d}.tar")
    (tmp_path / "a-05.tar").unlink()
    source = tmp_path / "a-{00..11}.tar"
    skips = [Skips(), Skips(), Skips()]
    for n, s in enumerate(skips):
        open_data(source, skips=s, index_folder=tmp_path / "cache", workers=n)

    assert skips[0].rows == skips[1].rows == skips[2].rows
    assert skips[1].seen == 88
    assert skips[0].counts == {"missing shard": 1}
    with pytest.raises(UserError, match="left out"):
        open_data(source, skips=Skips(0), index_folder=tmp_path / "cache")


def test_one_of_several_makes_the_index(tmp_path, monkeypatch):
    "Three want it at once; the lock lets one of them make it"
    made = []
    write = sources._write_index

    def slowly(*args):
        made.append(time.sleep(0.3))
        return write(*args)

    shard(tmp_path / "a.tar")
    monkeypatch.setattr(sources, "_write_index", slowly)
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda _: len(open_data(tmp_path / "a.tar", index_folder=tmp_path / "cache")), range(3))
        assert list(found) == [8, 8, 8]
        assert len(made) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_start_stops_a_large_run(tmp_path, workers, monkeypatch):
    "A tenth of the images tried, not of all there are"
    monkeypatch.setattr("c2lip.lab.data.records.TRIED_AT_LEAST", 40)
    rows = [r._replace(image=b"no") if i % 4 == 0 else r for i, r in enumerate(records(400))]
    samples = Samples(rows, SMALL, skips=Skips(0.2, tmp_path / "skipped.jsonl"))
    with pytest.raises(UserError, match="images could not be opened"):
        for _ in loader(samples, batches(rows, 8), workers=workers):
            pass
    assert samples.skips.tried < 100
    assert len((tmp_path / "skipped.jsonl").read_text().splitlines()) == len(samples.skips.rows) > 5

    again = Skips(0.2, tmp_path / "skipped.jsonl")
    assert again.rows == samples.skips.rows, "a resumed run goes on counting"

    again.add(next(iter(again.rows)), "broken image")
    assert len((tmp_path / "skipped.jsonl").read_text().splitlines()) == len(again.rows)


def test_a_batch_that_loses_most_of_its_images_stops(tmp_path):
    rows = [r._replace(image="/gone.png") if i < 40 else r for i, r in enumerate(records(4000))]
    with pytest.raises(UserError, match="for one batch of 40: .*missing file"):
        list(loader(Samples(rows, SMALL), [list(range(40))]))


def test_substitutes_scatter():
    rows = [r._replace(image=b"no") if i < 50 else r for i, r in enumerate(records(1000))]
    seen = [s.key for i in range(50) for s in Samples(rows, SMALL, skips=Skips(0.5)).__getitems__([i])]
    assert len(set(seen)) > 40


def test_orders():
    assert batches(range(12), 4, seed=5, epoch=2) == [[2, 3, 0, 9], [8, 1, 7, 4], [10, 5, 11, 6]]
