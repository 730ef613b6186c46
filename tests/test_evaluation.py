"""What a maintainer needs of c2lip.evaluation: slow twins, the real files' counts, the published averages."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from c2lip import evaluation as ev
from c2lip.core import UserError

# A folder with sugarcrepe/ and sugarcrepe_pp/ as published (their text alone is enough).
REAL = Path(os.environ.get("C2LIP_BENCHMARKS", Path(__file__).parents[2]/"shared"/"benchmarks"))
real = pytest.mark.skipif(not (REAL/"sugarcrepe").is_dir(), reason="the published SugarCrepe files are not here; set C2LIP_BENCHMARKS to their folder")


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


class Words(torch.nn.Module):
    "A sum of random word vectors; a picture is its mean colour's projection"
    def __init__(self, width=32):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.table = torch.nn.Parameter(torch.randn(5000, width, generator=g))
        self.dropout, self.seen = torch.nn.Dropout(.5), 0
    def visual(self, x):
        self.seen += len(x)
        return self.dropout(x.mean((2, 3)) @ self.table[:3])
    def encode_text(self, ids):
        self.seen += len(ids)
        return self.table[ids].sum(1)


def tokenize(texts):
    import zlib
    rows = [[zlib.crc32(w.encode()) % 4990 + 1 for w in t.lower().replace(".", "").split()][:20] for t in texts]
    return torch.tensor([r + [0]*(20 - len(r)) for r in rows])


def towers():
    return SimpleNamespace(model=Words(), tokenizer=tokenize, preprocess=lambda p: torch.from_numpy(np.array(p.resize((8, 8)))).permute(2, 0, 1)/255)


def put(folder, pictures=6, items=8):
    "A whole benchmark folder with coloured pictures and made-up captions"
    rng = np.random.default_rng(0)
    (folder/"images").mkdir(parents=True)
    names = [f"{i}.png" for i in range(pictures)]
    for n in names: Image.fromarray(rng.integers(0, 255, (12, 12, 3), np.uint8)).save(folder/"images"/n)
    text = lambda: " ".join(f"w{rng.integers(40)}" for _ in range(5))
    for home in (folder, folder/"heldout"):
        for kind, tasks in (("sugarcrepe", ev.SUGARCREPE), ("sugarcrepe_pp", ev.SUGARCREPE_PP)):
            (home/kind).mkdir(parents=True)
            for t in tasks:
                rows = [dict(id=i, filename=names[i % pictures], caption=text(), caption2=text(), negative_caption=text()) for i in range(items)]
                (home/kind/f"{t}.json").write_text(json.dumps({str(2*i): r for i, r in enumerate(rows)} if kind == "sugarcrepe" else rows))
    (folder/"retrieval.json").write_text(json.dumps({"images": [dict(filename=n, sentences=[dict(raw=text()) for _ in range(3)]) for n in names]}))
    (folder/"zeroshot").mkdir()
    for k in (3, 12):
        (folder/"zeroshot"/f"{'object' if k == 3 else 'object_colour'}.json").write_text(json.dumps(dict(
            classnames=[f"w{i}" for i in range(k)], templates=["a photo of {}.", "{}"], items=[dict(filename=n, label=i % k, heldout=i > 3) for i, n in enumerate(names)])))
    return folder


@pytest.fixture
def folder(tmp_path): return put(tmp_path/"bench")


# --- metrics against slow twins

def test_recall_equals_sorting():
    g = torch.Generator().manual_seed(3)
    for Q, G, levels in ((20, 30, 0), (20, 30, 4)):              # few levels: many ties
        scores = torch.randn(Q, G, generator=g) if not levels else torch.randint(0, levels, (Q, G), generator=g).float()
        positive = torch.rand(Q, G, generator=g) < .15
        positive[torch.arange(Q), torch.arange(Q)] = True
        for k, s in zip((1, 3, 7), ev.recall_at(scores, positive, (1, 3, 7))):
            right = 0
            for q in range(Q):                                   # the worst order among ties: wrong ones first
                order = sorted(range(G), key=lambda i: (-scores[q, i].item(), positive[q, i].item()))
                right += any(positive[q, i] for i in order[:k])
            assert s.value == pytest.approx(100*right/Q)
            lenient = sum(any(positive[q, i] for i in sorted(range(G), key=lambda i: (-scores[q, i].item(), not positive[q, i].item()))[:k]) for q in range(Q))
            assert s.ties == lenient - right


def test_recall_counts_wrong_candidates_in_front():
    "Several right candidates in front of a wrong one do not push each other back"
    scores = torch.tensor([[.9, .8, .7, .6]]); positive = torch.tensor([[False, True, True, True]])
    assert [s.value for s in ev.recall_at(scores, positive, (1,))] == [0.]
    assert ev.recall_hits(scores, positive, (2,))[2].correct.all()


def test_one_nan_candidate_ranks_in_front():
    scores = torch.tensor([[.9, .1, float("nan"), .0]])
    one, two = ev.recall_at(scores, torch.tensor([0]), (1, 2))
    assert (one.value, one.nan, two.value) == (0., 1, 100.)


@pytest.mark.parametrize("value", [1., float("nan"), 0., float("inf")])
def test_collapsed_models_score_nothing(folder, value):
    t = towers()
    t.model.visual = lambda x: torch.full((len(x), 4), value)
    t.model.encode_text = lambda ids: torch.full((len(ids), 4), value)
    table = ev.evaluate(t, folder, progress=False)
    measured = table[table.value.notna()]
    assert (measured.value == 0).all() and ((measured.ties + measured.nan) == measured.n).all()
    assert len(measured) > 40


def test_equal_vectors_tie_in_any_column():
    c = unit(1, 768)
    for m in (3, 64, 129, 1001): assert ev.similarities(c.expand(5, -1), c.expand(m, -1)).unique().numel() == 1


def test_triples_equal_the_definition():
    i, p, q, n = (unit(500, 4, seed=k) for k in range(4))
    itt, tot = ev.triple_hits(i, p, q, n)
    d = lambda a, b: (a*b).sum(-1)
    assert (itt.correct == ((d(i, p) > d(i, n)) & (d(i, q) > d(i, n)))).all()
    assert (tot.correct == ((d(p, q) > d(p, n)) & (d(p, q) > d(q, n)))).all()


def test_zero_shot_with_one_class_is_no_measurement():
    assert math.isnan(ev.zero_shot(unit(3, 4), unit(1, 4), torch.zeros(3, dtype=torch.long)).value)


# --- embedding

def test_embedded_once_and_in_order(folder):
    t = towers()
    texts = ["a b c", "c d", "A b c.", "a b c", "c d"]
    e = ev.embed_texts(t, texts, batch_size=1, progress=False)
    assert t.model.seen == 2 and torch.equal(e[0], e[2]) and torch.equal(e[0], e[3]) and torch.equal(e[1], e[4])
    t.model.seen = 0
    files = sorted((folder/"images").iterdir())
    v = ev.embed_images(t, [*files, files[0], Image.open(files[1])], batch_size=4, progress=False)
    assert t.model.seen == 7 and torch.equal(v[0], v[6]) and torch.allclose(v[1], v[7])
    assert v.dtype == torch.float32 and torch.allclose(v.norm(dim=-1), torch.ones(8))
    alone = torch.cat([ev.embed_images(t, [f], progress=False) for f in files])
    assert torch.allclose(alone, v[:6], atol=1e-6)


def test_mode_and_gradients_are_given_back():
    t = towers()
    t.model.train(); t.model.dropout.eval()                      # a part that was frozen stays frozen
    e = ev.embed_texts(t, ["a"], progress=False)
    assert not e.requires_grad and t.model.training and not t.model.dropout.training
    with pytest.raises(RuntimeError), ev.evaluating(t.model): raise RuntimeError
    assert t.model.training


def test_batch_size_changes_nothing(folder):
    a, b = (ev.evaluate(towers(), folder, batch_size=n, progress=False) for n in (1, 100))
    pd.testing.assert_frame_equal(a, b)


def test_pictures_are_read_as_colour(tmp_path):
    for mode, kind in (("L", "png"), ("RGBA", "png"), ("P", "png"), ("1", "png"), ("CMYK", "jpg")):
        file = tmp_path/f"{mode}.{kind}"; Image.new("RGB", (9, 7), (200, 30, 60)).convert(mode).save(file)
        assert ev.embed_images(towers(), [file], progress=False).isfinite().all()


# --- the table

def test_table_of_a_folder(folder):
    hits = {}
    t = ev.evaluate(towers(), folder, progress=False, hits=hits)
    assert t.columns.tolist() == ["suite", "name", "value", "n", "ties", "nan"]
    assert t[t.suite == "sugarcrepe"].name.tolist() == [*ev.SUGARCREPE, "average"]
    pp = t[t.suite == "sugarcrepe_pp"]
    assert pp.name.tolist()[:6] == [f"replace_{x} {k}" for k in ("ITT", "TOT") for x in ("obj", "att", "rel")] and pp.name.tolist()[-3:] == ["average ITT", "average TOT", "average"]
    tasks = pp[~pp.name.str.startswith("average")]
    assert pp.value.iloc[-1] == pytest.approx(tasks.value.mean()) and pp.value.iloc[-3] == pytest.approx(tasks.value[tasks.name.str.endswith("ITT")].mean())
    assert t.suite.unique().tolist() == ["sugarcrepe", "sugarcrepe_pp", "retrieval", "zeroshot", "heldout/sugarcrepe", "heldout/sugarcrepe_pp", "heldout/zeroshot"]
    for (s, n), h in hits.items():
        row = t[(t.suite == s) & (t.name == n)].iloc[0]
        if h is not None: assert row.value == pytest.approx(100*h.correct.float().mean().item()) and row.n == len(h.correct)
    errors = ev.with_errors(t)
    assert errors.se[:7].tolist() == pytest.approx([100*math.sqrt(v/100*(1 - v/100)/8) for v in t.value[:7]])
    both = ev.before_after(t, t, hits, hits)
    assert (both.change.dropna() == 0).all() and (both.low.dropna() == 0).all()


def test_too_few_candidates_are_no_measurement(folder):
    t = ev.evaluate(towers(), folder, "retrieval", progress=False, ks=(1, 5, 6)).set_index("name")
    assert t.loc["t2i R@5", "value"] == t.loc["t2i R@5", "value"] and math.isnan(t.loc["t2i R@6", "value"])   # five wrong pictures: R@6 cannot fail


def test_equal_sentences_are_one_candidate(folder):
    data = json.loads((folder/"retrieval.json").read_text())
    for i in (0, 1): data["images"][i]["sentences"] = [{"raw": "the same words"}]
    (folder/"retrieval.json").write_text(json.dumps(data))
    items = ev.read_retrieval(folder/"retrieval.json")
    texts = list(dict.fromkeys(t for i in items for t in i.captions))
    e = unit(len(texts), 16); v = unit(6, 16, seed=5); v[0] = v[1] = e[texts.index("the same words")]
    got = dict(ev.retrieval_task(items, lambda n: v, lambda t: e[[texts.index(x) for x in t]], ks=(1,)))
    assert got["i2t R@1"].correct[:2].all() and got["t2i R@1"].correct[:2].all() and len(got["t2i R@1"].correct) == 2 + 4*3


def test_chunked_retrieval_equals_whole():
    v, t = unit(70, 8), unit(210, 8, seed=2)
    positive = torch.arange(210)[None] // 3 == torch.arange(70)[:, None]
    whole, parts = (ev._searched(v, t, positive, (1, 5), at_once) for at_once in (10**6, 1500))
    for k in (1, 5): assert all(torch.equal(a, b) for a, b in zip(whole[k], parts[k]))


def test_partial_suites_say_so(folder):
    (folder/"sugarcrepe"/"add_att.json").unlink()
    assert "average of 6" in ev.evaluate(towers(), folder, "sugarcrepe", progress=False).name.tolist()


def test_suites_asked_for(folder):
    "What is asked for is there, nothing else, and what cannot be there is said"
    for want in (["zeroshot"], ["heldout/zeroshot"], ["retrieval", "heldout/sugarcrepe"]):
        assert ev.evaluate(towers(), folder, want, progress=False).suite.unique().tolist() == want
    for want in (["heldout/retrieval"], ["zeroshot", "heldout/retrieval"]):
        with pytest.raises(UserError, match="nothing for heldout/retrieval"): ev.evaluate(towers(), folder, want, progress=False)
    (folder/"retrieval.json").unlink()
    with pytest.raises(UserError, match="nothing for retrieval"): ev.evaluate(towers(), folder, ["zeroshot", "retrieval"], progress=False)


def test_weights_of_another_type(folder):
    t = towers(); t.model.bfloat16()
    assert ev.embed_images(t, sorted((folder/"images").iterdir()), progress=False).dtype == torch.float32


@pytest.mark.parametrize("file, edit, says", [
    ("zeroshot/object.json", lambda d: d | {"classnames": ["w1"], "items": d["items"][:1]}, "at least two classnames"),
    ("sugarcrepe/add_att.json", lambda d: [*d.values()], "add_att.json: a SugarCrepe file is an object"),
    ("sugarcrepe/add_att.json", lambda d: {}, "add_att.json holds no items"),
    ("sugarcrepe/add_att.json", lambda d: d | {"4": 7}, "add_att.json, item 4: expected an object"),
    ("sugarcrepe/add_att.json", lambda d: d | {"4": d["4"] | {"caption": " "}}, "item 4: 'caption' must be a text"),
    ("sugarcrepe/add_att.json", lambda d: d | {"4": d["4"] | {"filename": "none.png"}}, "none.png is missing; it is asked for by sugarcrepe add_att, item 4"),
    ("sugarcrepe_pp/swap_att.json", lambda d: [{k: v for k, v in d[0].items() if k != "caption2"}], "item 0: the key 'caption2' is missing"),
    ("sugarcrepe_pp/swap_att.json", lambda d: [], "swap_att.json holds no items"),
    ("retrieval.json", lambda d: d["images"], 'expected an object with a list "images"'),
    ("retrieval.json", lambda d: {"images": []}, "the list 'images' is empty"),
    ("retrieval.json", lambda d: {"images": [dict(filename="0.png", sentences=[])]}, 'item 0 (0.png): expected a list "sentences"'),
    ("retrieval.json", lambda d: {"images": [dict(filename="0.png", sentences=["text"])]}, "item 0 (0.png): expected an object with raw"),
    ("zeroshot/object.json", lambda d: d | {"templates": ["no place"]}, "templates 0: expected a text with {}"),
    ("zeroshot/object.json", lambda d: d | {"items": [dict(filename="0.png", label=3)]}, "item 0 (0.png): the label must be 0 to 2, got 3"),
    ("zeroshot/object.json", lambda d: d | {"items": [dict(filename="0.png", label=True)]}, "got True"),
])
def test_bad_files(folder, file, edit, says):
    data = json.loads((folder/file).read_text())
    (folder/file).write_text(json.dumps(edit(data)))
    with pytest.raises(UserError) as e: ev.evaluate(towers(), folder, progress=False)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_bad_folders(folder, tmp_path):
    (tmp_path/"empty").mkdir()
    for at, suites, says in ((tmp_path/"empty", None, "holds none of the suites"), (tmp_path/"no", None, "no benchmark folder"), (folder, ["zeroshots"], "did you mean 'zeroshot'")):
        with pytest.raises(UserError, match=says): ev.evaluate(towers(), at, suites)
    (folder/"sugarcrepe"/"swap_at.json").write_text("{}")
    with pytest.raises(UserError, match="swap_at.json is no subtask of sugarcrepe, did you mean swap_att.json"): ev.evaluate(towers(), folder)
    (folder/"sugarcrepe"/"swap_at.json").unlink()
    (folder/"images"/"2.png").write_bytes(b"not a picture")
    with pytest.raises(UserError, match="2.png cannot be read .* asked for by sugarcrepe replace_obj, item 4"): ev.evaluate(towers(), folder, progress=False)


def test_launcher(run, tmp_path):
    "papermill leaves the table that `evaluate` gives, and repeats it from params.json"
    words = "-p items 6 -p pictures 30 -p suites sugarcrepe,zeroshot -p split validation".split()
    done = run("papermill", "nbs/evaluate.ipynb", *words, "-p", "baseline", "base", "-p", "run_dir", tmp_path/"a")
    assert done.returncode == 0, done.out
    assert "SugarCrepe" in done.out and "change" in done.out and "C2LIP (paper)" in done.out
    assert {p.name for p in (tmp_path/"a").iterdir()} >= {"params.json", "table.csv", "table.html", "changes.png", "evaluate.ipynb"}
    from c2lip import towers as tw
    mine = ev.evaluate(tw.load("base"), ev.benchmark_folder("world", "validation", items=6, pictures=30), ["sugarcrepe", "zeroshot"], progress=False)
    table = pd.read_csv(tmp_path/"a"/"table.csv")
    assert table.after.tolist() == pytest.approx(mine.value.tolist()) and table.n.tolist() == mine.n.tolist() and (table.change == 0).all()
    assert json.loads((tmp_path/"a"/"params.json").read_text())["suites"] == ["sugarcrepe", "zeroshot"]


# --- statistics

def test_bootstrap_covers():
    "The interval of a change holds the true change about as often as it says"
    rng, held = np.random.default_rng(0), 0
    for i in range(300):
        a = torch.from_numpy(rng.random(300) < .6); flip = torch.from_numpy(rng.random(300) < .1)
        b = torch.where(flip, ~a, a)                                   # true change: .1·(.4 − .6) = −2 points
        low, high = ev.bootstrap([a], [b], samples=1000, seed=i); held += low <= -2 <= high
    assert .90 <= held/300 <= .98


def test_sign_test_equals_the_binomial():
    for gain, loss in ((0, 0), (3, 3), (10, 2), (400, 350)):
        before = torch.cat([torch.zeros(gain), torch.ones(loss), torch.ones(5)]).bool()
        after = torch.cat([torch.ones(gain), torch.zeros(loss), torch.ones(5)]).bool()
        try: from scipy.stats import binomtest
        except ImportError: pytest.skip("scipy is not here")
        assert ev.sign_test(before, after) == pytest.approx(binomtest(gain, gain + loss).pvalue if gain + loss else 1.)


def test_tables_show(folder):
    t = ev.evaluate(towers(), folder, progress=False)
    for frame in (t, ev.with_errors(t), ev.compare_table({"a": t, "b": t}), ev.before_after(t, t)):
        html = ev.show_table(frame, "words").to_html()
        assert "SugarCrepe++" in html and "words" in html and "nan" not in html.lower().replace("nan_", "")
    with pytest.raises(UserError, match="different benchmarks"): ev.compare_table({"a": t, "b": t.assign(n=3)})


# --- the published files

@real
def test_published_files():
    pairs = {t: ev.read_sugarcrepe(REAL/"sugarcrepe"/f"{t}.json") for t in ev.SUGARCREPE}
    assert {t: len(x) for t, x in pairs.items()} == dict(add_obj=2062, add_att=692, replace_obj=1652, replace_att=788, replace_rel=1406, swap_obj=245, swap_att=666)
    keys = [int(i.key) for i in pairs["swap_obj"]]
    assert 108 not in keys and max(keys) == 245                      # keys with a gap
    triples = {t: ev.read_sugarcrepe_pp(REAL/"sugarcrepe_pp"/f"{t}.json") for t in ev.SUGARCREPE_PP}
    assert {t: len(x) for t, x in triples.items()} == dict(replace_obj=1652, replace_att=788, replace_rel=1406, swap_obj=245, swap_att=666)
    assert [i.key for i in triples["swap_obj"] if i.negative in i.captions] == ["2", "8"]   # no model can solve these


@real
def test_unsolvable_items_are_ties():
    items = ev.read_sugarcrepe_pp(REAL/"sugarcrepe_pp"/"swap_obj.json")
    t = towers()
    text = lambda texts: ev.embed_texts(t, texts, progress=False)
    first, second, negative = (text(x) for x in ([i.captions[0] for i in items], [i.captions[1] for i in items], [i.negative for i in items]))
    itt, tot = ev.triple_hits(text([i.captions[1] for i in items]), first, second, negative)   # a picture that is the second caption itself
    twins = torch.tensor([k for k, i in enumerate(items) if i.key in ("2", "8")])
    assert not itt.correct[twins].any() and not tot.correct[twins].any()
    assert itt.tie[twins].all()


@real
def test_whole_real_folder(tmp_path):
    "The real text with pictures of noise: every subtask is there, in time"
    (tmp_path/"images").mkdir()
    for kind in ("sugarcrepe", "sugarcrepe_pp"): (tmp_path/kind).symlink_to(REAL/kind)
    names = {i.filename for t in ev.SUGARCREPE for i in ev.read_sugarcrepe(REAL/"sugarcrepe"/f"{t}.json")}
    names |= {i.filename for t in ev.SUGARCREPE_PP for i in ev.read_sugarcrepe_pp(REAL/"sugarcrepe_pp"/f"{t}.json")}
    for n in names: Image.new("RGB", (8, 8), tuple(hash(n + c) % 256 for c in "rgb")).save(tmp_path/"images"/n, "PNG")
    t = ev.evaluate(towers(), tmp_path, progress=False)
    assert t[t.name == "average"].n.tolist() == [7511, 2*4757]


# --- published.csv

@pytest.fixture(scope="module")
def figures(): return ev.read_published()


def test_published_is_whole(figures):
    assert figures.columns.tolist() == "paper table model backbone training_data benchmark subtask metric value note".split()
    assert figures.value.between(0, 100).all()
    assert not figures.duplicated(["paper", "table", "model", "backbone", "benchmark", "subtask", "metric"]).any()
    c2lip = figures[figures.paper.str.startswith("C2LIP")]
    assert c2lip.table.value_counts().to_dict() == {"Table 2": 21*13, "Table 3": 11*7, "Table 4": 7*13, "Table 5": 4*9, "Table 6": 4*7, "Table A2": 5, "Table A3": 21*11, "Table A4": 21*15, "Table A5": 21*9, "Table A6": 21*12}


def means(figures, table, benchmark, whole, parts, metric=None, weights=None):
    "(model, printed mean, mean of its parts) of every row of a table"
    rows = figures[(figures.table == table) & figures.paper.str.startswith("C2LIP")]
    for (model, backbone), r in rows.groupby(["model", "backbone"]):
        value = {(b, s, m): v for b, s, m, v in zip(r.benchmark, r.subtask, r.metric, r.value)}
        got = [value[p] for p in parts]
        yield model, value[whole], float(np.average(got, weights=weights))


SEVEN = [("sugarcrepe", s, "accuracy") for s in ev.SUGARCREPE]
TEN = [("sugarcrepe_pp", s, m) for s in ev.SUGARCREPE_PP for m in ("ITT", "TOT")]
TWELVE = [*(("sugarcrepe", s, "accuracy") for s in ("add", "replace", "swap")), *(("sugarcrepe_pp", s, m) for s in ("replace", "swap") for m in ("ITT", "TOT")),
          ("imagenet1k", "", "top-1"), *((b, "", "R@5 mean") for b in ("flickr30k", "mscoco", "docci", "iiw"))]
ZERO = "imagenet1k food101 cifar10 cifar100 sun397 cars aircraft dtd pets caltech101 flowers".split()


@pytest.mark.parametrize("table, whole, parts, weights", [
    ("Table A3", ("sugarcrepe", "average", "accuracy"), SEVEN, None),
    ("Table 5", ("sugarcrepe", "average", "accuracy"), SEVEN, None),
    ("Table A4", ("sugarcrepe_pp", "average", "mean"), TEN, None),
    ("Table 2", ("all", "", "mean of 12"), TWELVE, None),
    ("Table 4", ("all", "", "mean of 12"), TWELVE, None),
    ("Table 3", ("attributes", "", "mean of 6"), [*(("sugarcrepe", f"{e}_att", "accuracy") for e in ("replace", "swap")), *(("sugarcrepe_pp", f"{e}_att", m) for e in ("replace", "swap") for m in ("ITT", "TOT"))], None),
    ("Table A5", ("retrieval", "", "mean of 8"), [(b, "", f"{d} R@5") for b in ("mscoco", "flickr30k", "docci", "iiw") for d in ("t2i", "i2t")], None),
    ("Table A6", ("zeroshot", "", "mean of 11"), [(b, "", "top-1") for b in ZERO], None),
    ("Table 6", ("sugarcrepe", "average", "accuracy"), [("sugarcrepe", e, "accuracy") for e in ("replace", "swap", "add")], (3, 2, 2)),
    ("Table 6", ("sugarcrepe_pp", "average", "ITT"), [("sugarcrepe_pp", e, "ITT") for e in ("replace", "swap")], (3, 2)),
    *(("Table A3", ("sugarcrepe", e, "accuracy"), [("sugarcrepe", f"{e}_{x}", "accuracy") for x in k], None) for e, k in (("replace", ("obj", "att", "rel")), ("swap", ("obj", "att")), ("add", ("obj", "att")))),
    *(("Table A4", ("sugarcrepe_pp", e, m), [("sugarcrepe_pp", f"{e}_{x}", m) for x in k], None) for m in ("ITT", "TOT") for e, k in (("replace", ("obj", "att", "rel")), ("swap", ("obj", "att")))),
])
def test_published_averages(figures, table, whole, parts, weights):
    "Printed averages are the means of their rows, to the rounding of the figures"
    for model, printed, mean in means(figures, table, whole[0], whole, parts, weights=weights): assert abs(printed - mean) <= .1001, (table, model, printed, mean)


def test_published_contradictions_are_marked(figures):
    "A figure that two tables of the C2LIP paper give differently says so on both lines; nothing else does"
    paper = figures[figures.paper.str.startswith("C2LIP")]
    for key, r in paper.groupby(["model", "backbone", "benchmark", "subtask", "metric"]):
        assert r.note.str.contains("contradicted").all() == (r.value.nunique() > 1), key
    assert paper[paper.note.str.contains("contradicted") & (paper.model == "TripletCLIP")].shape[0] == 4


def test_published_figures_of_the_brief(figures):
    "Spot checks against figures typed by hand"
    def row(model, suite, **k):
        p = ev.published(model, **k); return dict(zip(p.name[p.suite == suite], p.value[p.suite == suite]))
    want = dict(zip(ev.SUGARCREPE + ("average",), (95.3, 86.7, 70.3, 60.0, 71.5, 89.1, 83.8, 79.5)))
    got = row("SigLIP", "sugarcrepe"); assert {k: got[k] for k in want} == want
    got = row("C2LIP", "sugarcrepe_pp")
    assert [got[f"{e}_{x} {m}"] for e, k in (("replace", ("obj", "att", "rel")), ("swap", ("obj", "att"))) for m in ("ITT", "TOT") for x in k] == [93.9, 79.8, 65.4, 91.1, 80.2, 54.7, 44.1, 66.2, 28.6, 59.8] and got["average"] == 66.4
    got = row("CLIP", "sugarcrepe", backbone="ViT-B/32"); assert (got["replace_obj"], got["average"]) == (90.9, 73.1)
    assert row("C2LIP", "mscoco")["t2i R@5"] == 77.9 and row("C2LIP", "flickr8k")["R@5 mean"] == 96.4
    ablation = figures[figures.table == "Table A2"]
    assert ablation.value.tolist() == [84.6, 85.2, 85.2, 85.1, 85.6]
    macco = figures[figures.paper.str.startswith("MACCO") & (figures.model == "MACCO")]
    assert macco.value.tolist() == [73.1, 68.5, 76.0, 77.1, 70.2, 75.3]
