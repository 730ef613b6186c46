"""Evaluation: slow twins of the scores, the kept embeddings, bad files."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from c2lip.core import UserError
from c2lip.evaluation import embeddings
from c2lip.evaluation.embeddings import embed_images, embed_texts, keep_rows, read_rows
from c2lip.evaluation.retrieval import search_hits
from c2lip.evaluation.scores import recall_hits, score
from c2lip.evaluation.suites import benchmark_folder, evaluate
from c2lip.towers import load


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


class Words(torch.nn.Module):
    "A sum of random word vectors; an image is its mean colour's projection"

    def __init__(self, width=32):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.table = torch.nn.Parameter(torch.randn(5000, width, generator=g))
        self.dropout, self.seen = torch.nn.Dropout(0.5), 0

    def visual(self, x):
        self.seen += len(x)
        return self.dropout(x.mean((2, 3)) @ self.table[:3])

    def encode_text(self, ids):
        self.seen += len(ids)
        return self.table[ids].sum(1)


def tokenize(texts):
    import zlib

    rows = [[zlib.crc32(w.encode()) % 4990 + 1 for w in t.lower().replace(".", "").split()][:20] for t in texts]
    return torch.tensor([r + [0] * (20 - len(r)) for r in rows])


def towers():
    return SimpleNamespace(
        model=Words(),
        tokenizer=tokenize,
        preprocess=lambda p: torch.from_numpy(np.array(p.resize((8, 8)))).permute(2, 0, 1) / 255,
    )


# --- metrics against slow twins


def among_best(scores, positive, k, wrong_first):
    "Queries with a right candidate among the k best, by the order among ties"
    count = 0
    for own, right in zip(scores.tolist(), positive.tolist()):
        order = sorted(range(len(own)), key=lambda i: (-own[i], right[i] == wrong_first))
        count += any(right[i] for i in order[:k])
    return count


@pytest.mark.parametrize("levels", [0, 4])  # few levels: many ties
def test_recall_equals_sorting(levels):
    g = torch.Generator().manual_seed(3)
    scores = torch.randint(0, levels, (20, 30), generator=g).float() if levels else torch.randn(20, 30, generator=g)
    positive = torch.rand(20, 30, generator=g) < 0.15
    positive[torch.arange(20), torch.arange(20)] = True
    for k, hits in recall_hits(scores, positive, (1, 3, 7)).items():
        strict, lenient = (among_best(scores, positive, k, wrong_first) for wrong_first in (True, False))
        found = score(f"R@{k}", hits)
        assert found.value == pytest.approx(100 * strict / 20) and found.ties == lenient - strict


# --- embedding


def test_embedded_once_and_in_order(tmp_path):
    t = towers()
    e = embed_texts(t, ["a b c", "c d", "A b c.", "a b c", "c d"], batch_size=1, progress=False)
    assert t.model.seen == 2 and torch.equal(e[0], e[2]) and torch.equal(e[0], e[3]) and torch.equal(e[1], e[4])
    t.model.seen, files = 0, [tmp_path / f"{n}.png" for n in range(6)]
    for n, file in enumerate(files):
        Image.new("RGB", (12, 12), (40 * n, 200 - 30 * n, 7)).save(file)
    v = embed_images(t, [*files, files[0], Image.open(files[1])], batch_size=4, progress=False)
    assert t.model.seen == 7 and torch.equal(v[0], v[6]) and torch.allclose(v[1], v[7])
    assert v.dtype == torch.float32 and torch.allclose(v.norm(dim=-1), torch.ones(8))
    alone = torch.cat([embed_images(t, [f], progress=False) for f in files])
    assert torch.allclose(alone, v[:6], atol=1e-6)
    t.model.bfloat16()
    assert embed_images(t, files, progress=False).dtype == torch.float32


# --- kept embeddings


def counted(monkeypatch):
    "What goes through the towers from now on"
    seen = dict(image=0, text=0)
    for part, name in (("image", "encode_images"), ("text", "encode_texts")):
        real = getattr(embeddings, name)

        def counting(model, x, part=part, real=real, **how):
            seen[part] += len(x)
            return real(model, x, **how)

        monkeypatch.setattr(embeddings, name, counting)
    return seen


def test_second_run_encodes_nothing(tmp_path, monkeypatch):
    base, world = load("base"), benchmark_folder("world", "validation", items=20, images=60, single=96)
    seen, suites = counted(monkeypatch), ["sugarcrepe", "sugarcrepe_pp", "retrieval", "zeroshot"]
    first = evaluate(base, world, suites, progress=False, cache=tmp_path)
    assert min(seen.values()) > 50
    seen.update(image=0, text=0)
    again = evaluate(base, world, suites, progress=False, cache=tmp_path)
    part = evaluate(base, world, "sugarcrepe", progress=False, cache=tmp_path)
    assert seen == dict(image=0, text=0)
    pd.testing.assert_frame_equal(first, again)
    pd.testing.assert_frame_equal(part, first[first.suite == "sugarcrepe"])
    pd.testing.assert_frame_equal(first, evaluate(base, world, suites, progress=False, cache=None))


def test_writers_at_once_leave_a_whole_file(tmp_path):
    "Eight writers at once, each a few rows and some of them the same: what is there is whole and right"
    import hashlib
    from concurrent.futures import ThreadPoolExecutor

    def name(i):
        return hashlib.sha256(str(i).encode()).digest()

    def write(w):
        for i in range(w, w + 12):
            keep_rows(tmp_path / "rows", {name(i): torch.full((3,), float(i))})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    rows = read_rows(tmp_path / "rows")
    found = {i: rows[name(i)] for i in range(19) if name(i) in rows}
    assert found and all(row.eq(i).all() for i, row in found.items()) and len(list(tmp_path.iterdir())) == 1


def test_chunked_retrieval_equals_whole():
    v, t = unit(70, 8), unit(210, 8, seed=2)
    positive = torch.arange(210)[None] // 3 == torch.arange(70)[:, None]
    whole, parts = (search_hits(v, t, positive, (1, 5), at_once) for at_once in (10**6, 1500))
    for k in (1, 5):
        assert all(torch.equal(a, b) for a, b in zip(whole[k], parts[k]))


# --- files of the workbook's own layout

CREPE = dict(filename="0.png", caption="a b", negative_caption="b a")
OWN = {
    "sugarcrepe/add_att.json": {"4": CREPE},
    "sugarcrepe_pp/swap_att.json": [CREPE | dict(id=0, caption2="a, b")],
    "retrieval.json": {"images": [dict(filename="0.png", sentences=[dict(raw="a b")])]},
    "zeroshot/object.json": dict(
        classnames=["a", "b"], templates=["a photo of {}.", "{}"], items=[dict(filename="0.png", label=0)]
    ),
}
BROKEN = [
    ("zeroshot/object.json", dict(classnames=["w1"]), "at least two classnames"),
    ("zeroshot/object.json", dict(templates=["no place"]), "templates texts with {}"),
    ("zeroshot/object.json", dict(items=[dict(filename="0.png", label=2)]), "item 0: the label must be 0 to 1, got 2"),
    ("zeroshot/object.json", dict(items=[dict(filename="0.png", label=True)]), "got True"),
    ("sugarcrepe/add_att.json", 7, "add_att.json holds no items"),
    ("sugarcrepe/add_att.json", {"4": 7}, "add_att.json, item 4: the key 'filename' is missing"),
    ("sugarcrepe/add_att.json", {"4": CREPE | dict(caption=" ")}, "item 4: 'caption' must be a text"),
    ("sugarcrepe/add_att.json", {"4": CREPE | dict(filename="no.png")}, "no.png is missing; it is asked for by sug"),
    ("sugarcrepe_pp/swap_att.json", [CREPE], "item 0: the key 'caption2' is missing"),
    ("sugarcrepe_pp/swap_att.json", [], "swap_att.json holds no items"),
    ("retrieval.json", [7], "holds no items in a list 'images'"),
    ("retrieval.json", dict(images=[dict(filename="0.png", sentences=[])]), "item 0: 'sentences' must be a text"),
    (
        "retrieval.json",
        dict(images=[dict(filename="0.png", sentences=[dict(text="a")])]),
        "item 0: 'sentences' must be",
    ),
]


@pytest.mark.parametrize("file, content, says", BROKEN)
def test_bad_files(tmp_path, file, content, says):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "0.png")
    for name, whole in OWN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        bad = whole | content if name.startswith("zeroshot") and name == file else content
        (tmp_path / name).write_text(json.dumps(bad if name == file else whole))
    with pytest.raises(UserError) as e:
        evaluate(towers(), tmp_path, progress=False)
    assert says in str(e.value) and "\n" not in str(e.value)
