"""Evaluation: slow twins of the rules, other layouts of the same data, spoilt files, embeddings."""

import itertools
import json
import math
import os
import random
import re
import shutil
import zlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from benchmark_examples import EXAMPLE_COLOURS, put_image, put_json, say, two_squares, write_examples
from PIL import Image
from writing import encoded

from c2lip.core import UserError
from c2lip.core.files import read_yaml, shipped
from c2lip.lab.evaluation.base import Item, Scorer
from c2lip.lab.evaluation.choices import choice_hits
from c2lip.lab.evaluation.embeddings import embed_images, embed_texts
from c2lip.lab.evaluation.published import blind_table, floor_tables
from c2lip.lab.evaluation.readers.classes import read_classes
from c2lip.lab.evaluation.readers.composition import word_orders
from c2lip.lab.evaluation.readers.crossed import winoground_hits
from c2lip.lab.evaluation.readers.retrieval import search_hits
from c2lip.lab.evaluation.scores import recall_hits
from c2lip.lab.evaluation.suites import benchmark_folder, evaluate, read_folder
from c2lip.lab.world import twins
from c2lip.lab.world.captions import train_records
from c2lip.towers import load


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    return write_examples(tmp_path_factory.mktemp("suites") / "examples")


@pytest.fixture
def copy(examples, tmp_path):
    def one(name):
        shutil.copytree(examples / name, tmp_path / name)
        return tmp_path / name

    return one


class Eyes(torch.nn.Module):
    "A random projection of the pixels; of words, a random vector for each"

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.words = torch.nn.Parameter(torch.randn(5000, 24, generator=g))
        self.pixels, self.seen = torch.nn.Parameter(torch.randn(768, 24, generator=g)), 0

    def visual(self, x):
        self.seen += len(x)
        return x.flatten(1) @ self.pixels

    def encode_text(self, ids):
        self.seen += len(ids)
        return self.words[ids].sum(1)


def tokenize(texts):
    rows = [[zlib.crc32(w.encode()) % 4990 + 1 for w in t.lower().replace(".", "").split()][:40] for t in texts]
    return torch.tensor([row + [0] * (40 - len(row)) for row in rows])


def towers(model, tokenizer=tokenize):
    how = dict(preprocess=lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - 0.5)
    return SimpleNamespace(model=model, tokenizer=tokenizer, **how)


def run(folder, names=None, model=None, tokenizer=tokenize, hits=None):
    return evaluate(towers(model or Eyes(), tokenizer), folder, names, progress=False, hits=hits)


def same(a, b):
    pd.testing.assert_frame_equal(a.reset_index(drop=True), b.reset_index(drop=True))


# --- the rules against slow twins


def test_recall_equals_sorting():
    "The worst order among ties has the wrong ones first; the best order tells how many were lost by ties"
    g = torch.Generator().manual_seed(3)
    for levels in (0, 4):  # few levels: many ties
        scores = torch.randn(20, 30, generator=g) if not levels else torch.randint(0, levels, (20, 30), generator=g)
        positive = (torch.rand(20, 30, generator=g) < 0.15) | torch.eye(20, 30).bool()
        for k, hits in recall_hits(scores.float(), positive, (1, 3, 7)).items():
            for q in range(20):
                worst = sorted((-scores[q, i].item(), positive[q, i].item()) for i in range(30))[:k]
                best = sorted((-scores[q, i].item(), not positive[q, i].item()) for i in range(30))[:k]
                assert hits.correct[q] == any(right for _, right in worst)
                assert hits.tie[q] == (not hits.correct[q] and not all(wrong for _, wrong in best))


def test_chunked_retrieval_equals_whole():
    g = torch.Generator().manual_seed(2)
    v, t = (F.normalize(torch.randn(n, 8, generator=g), dim=-1) for n in (70, 210))
    positive = torch.arange(210)[None] // 3 == torch.arange(70)[:, None]
    whole, parts = (search_hits(v, t, positive, (1, 5), at_once) for at_once in (10**6, 1500))
    for k in (1, 5):
        assert all(torch.equal(a, b) for a, b in zip(whole[k][:3], parts[k][:3]))


def test_choices_equal_the_definition():
    g = torch.Generator().manual_seed(1)
    v, t = (torch.randint(-2, 3, (40, 3), generator=g).float() for _ in range(2))  # few values: many ties
    t[3] = float("nan")
    draw = random.Random(0)

    items = []
    for n in range(300):
        wrong = tuple(draw.randrange(40) for _ in range(draw.randint(1, 4)))
        items.append(Item(str(n), draw.randrange(40), (draw.randrange(40),), wrong))
    h = choice_hits(items, Scorer(lambda k: v[k], lambda k: t[k]))
    for n, i in enumerate(items):
        right = (v[i.image] @ t[i.right[0]]).item()
        wrong = [(v[i.image] @ t[w]).item() for w in i.wrong]
        assert h.correct[n] == all(right > w for w in wrong)
        assert h.tie[n] == (all(right >= w for w in wrong) and right in wrong)
        assert h.nan[n] == any(x != x for x in (right, *wrong))


def test_winoground_equals_the_published_formulas():
    g = torch.Generator().manual_seed(2)
    v, t = (torch.randint(-1, 2, (80, 3), generator=g).float() for _ in range(2))
    first, second = ([Item(str(n), 2 * n + k, (2 * n + k,)) for n in range(40)] for k in (0, 1))
    h = winoground_hits(first, second, Scorer(lambda k: v[k], lambda k: t[k]))
    for n in range(40):
        s = v[2 * n : 2 * n + 2] @ t[2 * n : 2 * n + 2].T  # image, caption
        text = s[0, 0] > s[0, 1] and s[1, 1] > s[1, 0]
        image = s[0, 0] > s[1, 0] and s[1, 1] > s[0, 1]
        answers = (h["text"].correct[n], h["image"].correct[n], h["group"].correct[n])
        assert answers == (text, image, text and image)
    assert not (h["group"].correct & h["group"].tie).any()


def test_orders_are_drawn_the_same_anywhere():
    right, orders = word_orders("Two small brown dogs run across the wet grass, fast.")
    assert right == "two small brown dogs run across the wet grass, fast"
    assert orders["within threes"] == "two brown small run dogs across wet grass, the fast"
    assert orders["threes"] == "two small brown dogs run across fast the wet grass,"


# --- models whose answers are known, on every layout


class Squares(torch.nn.Module):
    "Colours at the left, right, top, bottom; or, without places, anywhere"

    palette = torch.tensor(list(EXAMPLE_COLOURS.values())) / 255 - 0.5
    spots = ((8, 4), (8, 11), (4, 8), (11, 8))

    def __init__(self, places):
        super().__init__()
        self.places = places

    def _out(self, seen):
        return (seen.flatten(1) if self.places else seen.amax(1)).float()

    def visual(self, x):
        near = [(x[:, None, :, y, c] - self.palette).abs().amax(2) < 0.02 for y, c in self.spots]
        return self._out(torch.stack(near, 1))

    def encode_text(self, ids):
        return self._out((ids[:, :, None] == torch.arange(1, 5)).float())


def tokenize_places(texts):
    "The colours named at the left, right, top and bottom"
    rows = []
    for text in texts:
        words = text.lower().replace(".", "").replace(",", "").split()
        named = [1 + list(EXAMPLE_COLOURS).index(w) for w in words if w in EXAMPLE_COLOURS]
        first, second = (named * 2)[:2] if named else (0, 0)
        if {"right", "under", "behind"} & set(words):
            first, second = second, first
        upright = {"on", "under", "front", "behind"} & set(words)
        rows.append([0, 0, first, second] if upright else [first, second, 0, 0])
    return torch.tensor(rows)


def rows_of(model, folder, names=None):
    return run(folder, names, model, tokenize_places).set_index(["suite", "name"])


def test_a_bag_of_words_ties(examples):
    "Where the wrong text holds the same words the bag of words ties; where a colour was replaced both are right"
    bag, placed = (rows_of(Squares(places), examples) for places in (False, True))
    for row, n, ties in (
        (("winoground", "group"), 6, 6),
        (("winoground", "text without flaws"), 4, 4),
        (("aro", "relation micro"), 14, 12),
        (("aro", "attribute"), 25, 25),
        (("aro", "coco_order"), 4, 4),
        (("whatsup", "controlled A"), 8, 8),
        (("valse", "relations"), 2, 2),
        (("vl_checklist", "relation"), 8, 8),
        (("mscoco", "t2i R@1"), 22, 20),
        (("flickr30k", "t2i R@1"), 22, 20),
        (("flickr8k", "t2i R@1"), 24, 24),
        (("docci", "t2i R@1"), 15, None),
        *(((name, "full t2i R@1"), 11 if name == "docci" else 12, None) for name in ("docci", "iiw")),
        (("food101", "top-1"), 4, 0),
    ):
        assert placed.loc[row].n == bag.loc[row].n == n
        assert ties is None or bag.loc[row].ties == ties

    for suite in ("winoground", "whatsup", "valse", "vl_checklist", "imagenet1k", "food101"):
        assert placed.value[suite].tolist() == pytest.approx([100.0] * len(placed.value[suite]))
    for row in ("relation", "attribute"):
        assert placed.value["aro", row] == pytest.approx(100.0)
    # "to the left of" 0 %, "wearing" 100 %, "next to" set aside
    assert bag.value["aro", "relation"] == pytest.approx(50.0)
    assert bag.value["aro", "relation micro"] == pytest.approx(100 * 2 / 14)
    assert bag.value["vl_checklist", "attribute color"] == 100.0


def replaced(old, new, count=1):
    return lambda data: data.replace(old, new, count)


BROKEN = [
    ("winoground/examples.jsonl", lambda b: b[:-9], "line 6: not valid JSON"),
    ("winoground/images/ex_3_img_1.png", None, "needed by winoground, item 3"),
    ("whatsup/coco_qa_one_obj.json", replaced(b'[0, "a', b'["a'), "coco_qa_one_obj.json, item 0: the key '2' is mi"),
    ("mscoco/dataset_coco.json", replaced(b'"test"', b'"tset"', -1), "no images of the split 'test'"),
    ("flickr8k/test/1.tar", lambda b: b[:-9000], "1.tar: damaged shard"),
    ("flickr8k/test/nshards.txt", lambda b: b"3", "says 3 shards, but there are 2"),
    ("food101/classnames.txt", lambda b: b"red\ngreen\n", "s0000002: the .cls member must be the number"),
    ("imagenet1k/val/red/a.jpeg", None, "val/red holds no image"),
]


@pytest.mark.parametrize("file, edit, says", BROKEN, ids=[says for *_, says in BROKEN])
def test_what_is_wrong_is_named(copy, file, edit, says):
    "A damaged file stops the run before anything is embedded, with the file, the item and the key"
    at = copy(Path(file).parts[0]).parent / file
    at.write_bytes(edit(at.read_bytes())) if edit else at.unlink()
    with pytest.raises(UserError) as e:
        run(at.parents[len(Path(file).parts) - 1])
    assert says in str(e.value)


# --- other layouts of the same data give the same numbers


def test_newer_suites_in_their_published_layouts(tmp_path):
    "Who sees places answers all, a bag of words ties wherever words only change places"
    crossed = []
    svo = []
    for n, (a, b) in enumerate([("red", "blue"), ("green", "yellow"), ("blue", "green")]):
        for number, (left, right) in enumerate([(a, b), (b, a)], 2 * n):
            put_image(tmp_path / "svo_probes" / "images" / f"{number}.jpg", left, right)
        images = [dict(bytes=encoded(two_squares(*pair))) for pair in ((a, b), (b, a))]
        crossed.append([say(a, b), say(b, a), *images, 7])
        kinds = dict.fromkeys(["subj_neg", "verb_neg", "obj_neg"], False)
        kinds[[*kinds][n]] = True
        svo.append(dict(sentence=say(a, b), pos_image_id=2 * n, neg_image_id=2 * n + 1, **kinds))

    parquet = {
        "winoground": "caption_0 caption_1 image_0 image_1 id",
        "colorswap": "caption_1 caption_2 image_1 image_2 id",
    }
    for name, keys in parquet.items():
        (tmp_path / name).mkdir()
        pd.DataFrame(crossed, columns=keys.split()).to_parquet(tmp_path / name / "test-0.parquet")
    pd.DataFrame(svo).to_csv(tmp_path / "svo_probes" / "svo_probes.csv", index=False)

    names = [*parquet, "svo_probes"]
    placed, bag = (rows_of(Squares(places), tmp_path, names) for places in (True, False))
    assert {*placed.index.get_level_values(0)} == {*names}
    assert placed.value.sub(100).abs().max() < 1e-9, placed.to_string()
    assert (bag.value == 0).all()
    assert (bag.ties == bag.n).all()
    assert {"subject", "verb", "object", "average"} == set(placed.loc["svo_probes"].index)


def test_layouts_of_retrieval_agree(copy):
    at = copy("mscoco")
    images = [i for i in json.loads((at / "dataset_coco.json").read_text())["images"] if i["split"] == "test"]
    captions = [[s["raw"] for s in i["sentences"]] for i in images]
    whole = run(at.parent, "mscoco")
    (at / "dataset_coco.json").unlink()
    lists = [dict(image=f"{i['filepath']}/{i['filename']}", caption=c) for i, c in zip(images, captions)]
    put_json(at / "coco_karpathy_test.json", lists)
    same(run(at.parent, "mscoco"), whole)


def test_layouts_of_classes_agree(copy):
    at = copy("food101")
    whole = run(at.parent, "food101")
    for n, c in enumerate(EXAMPLE_COLOURS):
        put_image(at / "test" / f"{n}_{c}" / "x.png", c, c)
    (at / "test" / "0.tar").unlink()
    same(run(at.parent, "food101"), whole)  # classnames.txt names the folders


def test_thousand_numbered_folders_are_imagenet(tmp_path):
    from open_clip.zero_shot_metadata import IMAGENET_CLASSNAMES

    for n in range(1000):
        put_image(tmp_path / "imagenet1k" / "val" / f"n{n:08}" / "x.JPEG", "red", "blue")
    data = read_classes(tmp_path / "imagenet1k")
    assert data.classnames == list(IMAGENET_CLASSNAMES)
    assert [i.label for i in data.items] == list(range(1000))


# --- embedding

NAMES = ["aro", "whatsup", "winoground", "iiw", "flickr8k"]


def test_what_suites_share_is_embedded_once(examples):
    model = towers(Eyes())
    suites = read_folder(examples, NAMES)
    embed_images(model, [image for suite in suites.values() for image in suite.images], progress=False)
    assert model.model.seen <= 12 + 4 + 12  # as many images as differ: side by side, upright, and cut from wide ones


def test_two_scores(examples, capsys):
    "Of a CLIP too; a model without tokens has v·t alone, and says so"
    home = benchmark_folder("world", "validation", items=6, images=30)
    rows = evaluate(load("base_clip"), home, progress=False).set_index(["suite", "name"]).value
    assert rows["phrases/zeroshot", "object"] != rows["zeroshot", "object"]
    capsys.readouterr()
    run(examples, ["winoground"])
    assert capsys.readouterr().out.startswith("v·t alone: visual tokens are known for SigLIP")


def test_embedded_once_and_in_order(tmp_path):
    t = towers(Eyes())
    e = embed_texts(t, ["a b c", "c d", "A b c.", "a b c", "c d"], batch_size=1, progress=False)
    assert t.model.seen == 2
    assert torch.equal(e[[0, 0, 1]], e[[2, 3, 4]])

    t.model.seen, files = 0, [tmp_path / f"{n}.png" for n in range(6)]
    for n, file in enumerate(files):
        Image.new("RGB", (16, 16), (40 * n, 200 - 30 * n, 7)).save(file)
    v = embed_images(t, [*files, files[0], Image.open(files[1])], batch_size=4, progress=False)
    assert t.model.seen == 7
    alone = torch.cat([embed_images(t, [file], progress=False) for file in [*files, *files[:2]]])
    assert torch.allclose(alone, v, atol=1e-5)
    assert torch.allclose(v.norm(dim=-1), torch.ones(8))
    t.model.bfloat16()
    assert embed_images(t, files, progress=False).dtype == torch.float32


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
OWN_BROKEN = [
    ("zeroshot/object.json", dict(classnames=["w1"]), "at least two classnames"),
    ("zeroshot/object.json", dict(items=[dict(filename="0.png", label=True)]), "got True"),
    ("sugarcrepe/add_att.json", {"4": 7}, "add_att.json, item 4: the key 'filename' is missing"),
    ("sugarcrepe/add_att.json", {"4": CREPE | dict(filename="no.png")}, "no.png cannot be read (No such file"),
    ("retrieval.json", [7], "holds no items in a list 'images'"),
    ("retrieval.json", dict(images=[dict(filename="0.png", sentences=[])]), "item 0: 'sentences' must be a text"),
]


@pytest.mark.parametrize("file, content, says", OWN_BROKEN)
def test_bad_files(tmp_path, file, content, says):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "images" / "0.png")
    for name, whole in OWN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        bad = whole | content if name.startswith("zeroshot") and name == file else content
        (tmp_path / name).write_text(json.dumps(bad if name == file else whole))
    with pytest.raises(UserError) as e:
        evaluate(towers(Eyes()), tmp_path, progress=False)
    assert says in str(e.value)
    assert "\n" not in str(e.value)


REAL = Path(os.environ.get("C2LIP_BENCHMARKS", Path(__file__).parents[2] / "shared" / "benchmarks"))


@pytest.mark.skipif(not (REAL / "sugarcrepe").is_dir(), reason="set C2LIP_BENCHMARKS to the published files' folder")
def test_the_published_files():
    "Every item is read; the known faults are counted: items 2 and 8 of swap_obj no model can win"
    crepe, both = (read_folder(REAL)[name].items for name in ("sugarcrepe", "sugarcrepe_pp"))
    for suite, whole in ((crepe, {}), (both, {"swap_obj": 2})):
        equal = {task: sum(bool({*i.right} & {*i.wrong}) for i in items) for task, items in suite.items()}
        assert {task: n for task, n in equal.items() if n} == whole
    sizes = dict(replace_obj=1652, replace_att=788, replace_rel=1406, swap_obj=245, swap_att=666)
    assert {task: len(items) for task, items in both.items()} == sizes
    assert {task: len(items) for task, items in crepe.items()} == sizes | dict(add_obj=2062, add_att=692)


# --- the scorer that sees no image


def test_blind_opens_no_image(tmp_path):
    "Its rows are the same without the files"
    world = benchmark_folder("world", "validation", images=40, items=30, single=64)
    shutil.copytree(world, tmp_path / "texts", ignore=shutil.ignore_patterns("*.png"))
    table = blind_table(read_folder(tmp_path / "texts"))
    same(table, blind_table(read_folder(world)))


def pair_counts(n):
    "From a text to how often captions of `n` training images hold its pairs of words"

    def pairs_of(text):
        return itertools.combinations(re.findall(r"\w+", text.lower()), 2)

    known = Counter(pair for *_, caption in train_records(n) for pair in pairs_of(caption))
    return lambda text: sum(math.log1p(known[pair]) for pair in pairs_of(text))


def test_no_question_is_answered_blind(tmp_path, monkeypatch):
    "Each is asked of two scenes with its texts exchanged: neither texts alone nor counts of pairs help"
    monkeypatch.setattr(twins, "save_scene", lambda *scene: None)
    twins.write_questions(tmp_path, 90, "validation")
    suites = read_folder(tmp_path, ["world_sugarcrepe_2", "doubts"])
    bag = floor_tables(suites)["bag of words"].set_index(["suite", "name"]).value["world_sugarcrepe_2"]
    assert (bag[[*twins.HALVES["binding"], "binding"]] == 50).all()
    assert (bag[[*twins.HALVES["recognition"], "recognition"]] > 90).all()
    asked = {(name, kind): items for name, suite in suites.items() for kind, items in suite.items.items()}
    assert {kind for _, kind in asked} == {*twins.KINDS, *twins.DOUBTS, "swap_obj"}
    nouns, both = (len(asked["world_sugarcrepe_2", kind]) for kind in ("swap_obj_nouns", "swap_obj"))
    assert abs(nouns / both - 0.31) < 0.01, "the share of the public files"

    most = read_yaml(shipped("question_rule.yaml"))["blind"]
    likelihood = pair_counts(4800)
    rows = blind_table(suites).set_index(["suite", "name"])
    for kind, items in asked.items():
        for first, second in zip(items[::2], items[1::2], strict=True):
            assert first.group == second.group
            assert first.image != second.image
            assert (first.right, first.wrong) == (second.wrong, second.right)

        row = rows.loc[kind]
        margins = [likelihood(*item.right) - likelihood(*item.wrong) for item in items]
        assert row.value <= most, kind
        assert 50 + 50 * np.sign(margins).mean() <= most, kind
