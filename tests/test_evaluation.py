"""Evaluation: slow twins of the scores, the kept embeddings, bad files, the published files' counts."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from c2lip.core import UserError
from c2lip.core.files import write_json
from c2lip.evaluation import embeddings
from c2lip.evaluation.base import Scorer
from c2lip.evaluation.embeddings import Crop, embed_images, embed_texts, evaluating, keep_rows, read_rows
from c2lip.evaluation.retrieval import read_captions, retrieval_task, search_hits
from c2lip.evaluation.scores import Hits, recall_hits, score
from c2lip.evaluation.suites import benchmark_folder, evaluate
from c2lip.evaluation.world_benchmark import SUGARCREPE, SUGARCREPE_PP
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


def put(folder, images=6, items=8):
    "A whole benchmark folder with coloured images and made-up captions"
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    names = [f"{i}.png" for i in range(images)]
    for n in names:
        Image.fromarray(rng.integers(0, 255, (12, 12, 3), np.uint8)).save(folder / "images" / n)

    def text():
        return " ".join(f"w{rng.integers(40)}" for _ in range(5))

    for home in (folder, folder / "heldout"):
        for kind, tasks in (("sugarcrepe", SUGARCREPE), ("sugarcrepe_pp", SUGARCREPE_PP)):
            (home / kind).mkdir(parents=True)
            for task in tasks:
                rows = []
                for i in range(items):
                    row = dict(id=i, filename=names[i % images], caption=text(), caption2=text())
                    rows.append(row | dict(negative_caption=text()))
                made = {str(2 * i): r for i, r in enumerate(rows)} if kind == "sugarcrepe" else rows
                write_json(home / kind / f"{task}.json", made)
    captions = [dict(filename=n, sentences=[dict(raw=text()) for _ in range(3)]) for n in names]
    write_json(folder / "retrieval.json", {"images": captions})
    (folder / "zeroshot").mkdir()
    for k, name in ((3, "object"), (12, "object_colour")):
        rows = [dict(filename=n, label=i % k, heldout=i > 3) for i, n in enumerate(names)]
        made = dict(classnames=[f"w{i}" for i in range(k)], templates=["a photo of {}.", "{}"], items=rows)
        write_json(folder / "zeroshot" / f"{name}.json", made)
    return folder


@pytest.fixture
def folder(tmp_path):
    return put(tmp_path / "bench")


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


@pytest.mark.parametrize("value", [1.0, float("nan"), 0.0, float("inf")])
def test_collapsed_models_score_nothing(folder, value):
    t = towers()
    t.model.visual = lambda x: torch.full((len(x), 4), value)
    t.model.encode_text = lambda ids: torch.full((len(ids), 4), value)
    table = evaluate(t, folder, progress=False)
    measured = table[table.value.notna()]
    assert (measured.value == 0).all() and ((measured.ties + measured.nan) == measured.n).all()
    assert len(measured) > 40


# --- embedding


def test_embedded_once_and_in_order(folder):
    t = towers()
    texts = ["a b c", "c d", "A b c.", "a b c", "c d"]
    e = embed_texts(t, texts, batch_size=1, progress=False)
    assert t.model.seen == 2 and torch.equal(e[0], e[2]) and torch.equal(e[0], e[3]) and torch.equal(e[1], e[4])
    t.model.seen = 0
    files = sorted((folder / "images").iterdir())
    v = embed_images(t, [*files, files[0], Image.open(files[1])], batch_size=4, progress=False)
    assert t.model.seen == 7 and torch.equal(v[0], v[6]) and torch.allclose(v[1], v[7])
    assert v.dtype == torch.float32 and torch.allclose(v.norm(dim=-1), torch.ones(8))
    alone = torch.cat([embed_images(t, [f], progress=False) for f in files])
    assert torch.allclose(alone, v[:6], atol=1e-6)


def test_mode_and_gradients_are_given_back():
    t = towers()
    t.model.train()
    t.model.dropout.eval()  # a part that was frozen stays frozen
    e = embed_texts(t, ["a"], progress=False)
    assert not e.requires_grad and t.model.training and not t.model.dropout.training
    with pytest.raises(RuntimeError), evaluating(t.model):
        raise RuntimeError
    assert t.model.training


def test_batch_size_changes_nothing(folder):
    a, b = (evaluate(towers(), folder, batch_size=n, progress=False) for n in (1, 100))
    pd.testing.assert_frame_equal(a, b)


def test_images_are_read_as_colour(tmp_path):
    for mode, kind in (("L", "png"), ("RGBA", "png"), ("P", "png"), ("1", "png"), ("CMYK", "jpg")):
        file = tmp_path / f"{mode}.{kind}"
        Image.new("RGB", (9, 7), (200, 30, 60)).convert(mode).save(file)
        assert embed_images(towers(), [file], progress=False).isfinite().all()


# --- kept embeddings


@pytest.fixture(scope="module")
def base():
    return load("base")


@pytest.fixture(scope="module")
def world():
    return benchmark_folder("world", "validation", items=20, images=60, single=96)


def counted(base, monkeypatch):
    "What goes through the towers from now on"
    seen = dict(image=0, text=0)
    for part, name in (("image", "encode_images"), ("text", "encode_texts")):
        real = getattr(embeddings, name)

        def counting(model, x, part=part, real=real, **how):
            seen[part] += len(x)
            return real(model, x, **how)

        monkeypatch.setattr(embeddings, name, counting)
    return seen


def test_second_run_encodes_nothing(base, world, tmp_path, monkeypatch):
    seen, suites = counted(base, monkeypatch), ["sugarcrepe", "sugarcrepe_pp", "retrieval", "zeroshot"]
    first = evaluate(base, world, suites, progress=False, cache=tmp_path)
    assert min(seen.values()) > 50
    seen.update(image=0, text=0)
    again = evaluate(base, world, suites, progress=False, cache=tmp_path)
    part = evaluate(base, world, "sugarcrepe", progress=False, cache=tmp_path)
    assert seen == dict(image=0, text=0)
    pd.testing.assert_frame_equal(first, again)
    pd.testing.assert_frame_equal(part, first[first.suite == "sugarcrepe"])
    pd.testing.assert_frame_equal(first, evaluate(base, world, suites, progress=False, cache=None))


def test_what_makes_a_row_is_in_its_name(base, world, tmp_path, monkeypatch):
    "Other weights, preprocessing or precision: nothing is taken over; a changed text tower leaves the images"
    from dataclasses import replace

    evaluate(base, world, "zeroshot", progress=False, cache=tmp_path)
    seen = counted(base, monkeypatch)

    def run(t, **how):
        seen.update(image=0, text=0)
        evaluate(t, world, "zeroshot", progress=False, cache=tmp_path, **how)
        return dict(seen)

    assert run(base) == dict(image=0, text=0)
    assert min(run(base, precision="bf16").values()) > 0
    other = run(replace(base, preprocess_cfg=base.preprocess_cfg | {"interpolation": "bilinear"}))
    assert other["image"] and not other["text"]
    tuned = load("base")
    with torch.no_grad():
        next(tuned.model.text.parameters()).add_(0.1)
    other = run(tuned)
    assert other["text"] and not other["image"]


def test_damaged_files(base, world, tmp_path, monkeypatch, capsys):
    first = evaluate(base, world, "zeroshot", progress=False, cache=tmp_path)
    files = list(tmp_path.rglob("*.safetensors"))
    assert files
    for f in files:
        f.write_bytes(f.read_bytes()[: f.stat().st_size // 2])
    seen = counted(base, monkeypatch)
    pd.testing.assert_frame_equal(evaluate(base, world, "zeroshot", progress=False, cache=tmp_path), first)
    assert min(seen.values()) > 0 and capsys.readouterr().out.count("are damaged;") >= len(files)


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


def test_images_are_known_by_content(base, world, tmp_path, monkeypatch):
    import shutil

    file = sorted((world / "images").iterdir())[0]
    shutil.copy(file, tmp_path / "copy.png")
    seen = counted(base, monkeypatch)
    crop = Crop(file, (0, 0, 48, 48))
    v = embed_images(base, [file, tmp_path / "copy.png", crop, crop(), file.read_bytes()], progress=False)
    assert (
        seen["image"] == 3
        and torch.equal(v[0], v[1])
        and torch.equal(v[0], v[4])
        and not torch.equal(v[0], v[2])
        and torch.allclose(v[2], v[3])
    )
    shutil.copy(sorted((world / "images").iterdir())[1], tmp_path / "copy.png")  # the same name, another image
    w = embed_images(base, [file, tmp_path / "copy.png"], progress=False)
    assert not torch.equal(w[0], w[1])


def test_a_missing_image_is_named(folder):
    for i in (1, 2):
        (folder / "images" / f"{i}.png").unlink()
    with pytest.raises(
        UserError,
        match="1.png is missing; it is asked for by sugarcrepe replace_obj, item 2",
    ):
        evaluate(towers(), folder, progress=False)


# --- the table


def test_table_of_a_folder(folder):
    hits = {}
    t = evaluate(towers(), folder, progress=False, hits=hits)
    assert t.columns.tolist() == ["suite", "name", "value", "se", "n", "ties", "nan"]
    assert t[t.suite == "sugarcrepe"].name.tolist() == [*SUGARCREPE, "average"]
    pp = t[t.suite == "sugarcrepe_pp"].set_index("name").value
    tasks = [f"replace_{x} {k}" for k in ("ITT", "TOT") for x in ("obj", "att", "rel")]
    assert pp.index.tolist()[:6] == tasks and pp.index.tolist()[-3:] == ["average ITT", "average TOT", "average"]
    assert pp.iloc[-1] == pytest.approx(pp[~pp.index.str.startswith("average")].mean())
    assert pp.iloc[-3] == pytest.approx(pp[:-3][pp.index[:-3].str.endswith("ITT")].mean())
    held = [f"heldout/{name}" for name in ("sugarcrepe", "sugarcrepe_pp", "zeroshot")]
    assert t.suite.unique().tolist() == ["sugarcrepe", "sugarcrepe_pp", "retrieval", "zeroshot", *held]
    for (s, n), h in hits.items():
        row = t[(t.suite == s) & (t.name == n)].iloc[0]
        if isinstance(h, Hits):
            assert row.value == pytest.approx(100 * h.correct.float().mean().item()) and row.n == len(h.correct)


def test_equal_sentences_belong_to_their_own_image(folder):
    "As in the public harnesses; the copy under another image ties, and a tie is wrong"
    data = json.loads((folder / "retrieval.json").read_text())
    for i in (0, 1):
        data["images"][i]["sentences"] = [{"raw": "the same words"}]
    (folder / "retrieval.json").write_text(json.dumps(data))
    items = read_captions(folder / "retrieval.json", "karpathy", folder / "images", split=None)
    texts = list(dict.fromkeys(t for i in items for t in i.right))
    e = unit(len(texts), 16)
    v = unit(6, 16, seed=5)
    v[0] = v[1] = e[texts.index("the same words")]
    got = dict(retrieval_task(items, Scorer(lambda n: v, lambda t: e[[texts.index(x) for x in t]]), ks=(1,)))
    assert got["i2t R@1"].tie[:2].all() and got["t2i R@1"].tie[:2].all() and len(got["t2i R@1"].correct) == 2 + 4 * 3
    assert not got["i2t R@1"].correct[:2].any() and not got["t2i R@1"].correct[:2].any()


def test_chunked_retrieval_equals_whole():
    v, t = unit(70, 8), unit(210, 8, seed=2)
    positive = torch.arange(210)[None] // 3 == torch.arange(70)[:, None]
    whole, parts = (search_hits(v, t, positive, (1, 5), at_once) for at_once in (10**6, 1500))
    for k in (1, 5):
        assert all(torch.equal(a, b) for a, b in zip(whole[k], parts[k]))


def test_weights_of_another_type(folder):
    t = towers()
    t.model.bfloat16()
    assert embed_images(t, sorted((folder / "images").iterdir()), progress=False).dtype == torch.float32


def without(key):
    return lambda d: [{k: v for k, v in d[0].items() if k != key}]


def with_item(**changes):
    return lambda d: d | {"4": d["4"] | changes}


def one_image(*sentences):
    return lambda d: {"images": [dict(filename="0.png", sentences=list(sentences))]}


BROKEN = [
    ("zeroshot/object.json", lambda d: d | {"classnames": ["w1"]}, "at least two classnames"),
    ("zeroshot/object.json", lambda d: d | {"templates": ["no place"]}, "templates texts with {}"),
    ("zeroshot/object.json", lambda d: d | {"items": [dict(filename="0.png", label=3)]}, "must be 0 to 2, got 3"),
    ("zeroshot/object.json", lambda d: d | {"items": [dict(filename="0.png", label=True)]}, "got True"),
    ("sugarcrepe/add_att.json", lambda d: 7, "add_att.json holds no items"),
    ("sugarcrepe/add_att.json", lambda d: d | {"4": 7}, "add_att.json, item 4: the key 'filename' is missing"),
    ("sugarcrepe/add_att.json", with_item(caption=" "), "item 4: 'caption' must be a text"),
    ("sugarcrepe/add_att.json", with_item(filename="no.png"), "no.png is missing; it is asked for by sug"),
    ("sugarcrepe_pp/swap_att.json", without("caption2"), "item 0: the key 'caption2' is missing"),
    ("sugarcrepe_pp/swap_att.json", lambda d: [], "swap_att.json holds no items"),
    ("retrieval.json", lambda d: d["images"], "holds no items in a list 'images'"),
    ("retrieval.json", one_image(), "item 0: 'sentences' must be a text"),
    ("retrieval.json", one_image(dict(text="a")), "item 0: 'sentences' must be a text"),
]


@pytest.mark.parametrize("file, edit, says", BROKEN)
def test_bad_files(folder, file, edit, says):
    data = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(edit(data)))
    with pytest.raises(UserError) as e:
        evaluate(towers(), folder, progress=False)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_bad_folders(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for at, suites, says in (
        (tmp_path / "empty", None, "holds none of the suites"),
        (tmp_path / "no", None, "no benchmark folder"),
        (folder, ["zeroshots"], "did you mean zeroshot"),
    ):
        with pytest.raises(UserError, match=says):
            evaluate(towers(), at, suites)
    (folder / "sugarcrepe" / "swap_at.json").write_text("{}")
    with pytest.raises(UserError, match="swap_at.json is no subtask of sugarcrepe; did you mean swap_att"):
        evaluate(towers(), folder)
    (folder / "sugarcrepe" / "swap_at.json").unlink()
    (folder / "images" / "2.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match="2.png cannot be read .* asked for by sugarcrepe replace_obj, item 4"):
        evaluate(towers(), folder, progress=False)
