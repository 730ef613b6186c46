"""Maps, their figure and localisation: mechanics on hand-made tokens, nothing that depends on a model's quality."""

import io
import json
import math

import numpy as np
import open_clip
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import roc_auc_score

from c2lip.attention.coco import coco_mask, coco_probes
from c2lip.attention.comparison import compare_figure, maps_figure
from c2lip.attention.figures import ImageMaps, map_columns
from c2lip.attention.localisation import auroc, localisation, localisation_table, measure_map
from c2lip.attention.maps import (
    attention_map,
    embed_phrases,
    encode_view,
    head_attention,
    resample_map,
)
from c2lip.attention.probes import Probe, binding_scenes, coverage, probe_maps, scene_probes
from c2lip.core import UserError
from c2lip.towers import Towers, load
from c2lip.world import Thing, draw_scene, make_scene, object_mask

WHOLE = (0.0, 0.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def base():
    return load("base")


@pytest.fixture(scope="module")
def tiny_clip():
    "A CLIP with a class token, a grid unlike the base's and a middle crop, with the base's tokenizer"
    torch.manual_seed(0)
    config = dict(
        embed_dim=64,
        vision_cfg=dict(image_size=64, patch_size=16, width=64, layers=2, head_width=32),
        text_cfg=dict(context_length=48, vocab_size=512, width=64, heads=2, layers=1),
    )
    base = load("base")
    model = open_clip.model.CLIP(**config).eval()
    cfg = dict(size=64, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), interpolation="bicubic", resize_mode="shortest")
    return Towers(model, base.tokenizer, config, cfg, "tiny")


def test_cosines_are_those_of_the_tokens(base):
    view = encode_view(base, draw_scene(make_scene("test", 1)))
    maps = attention_map(base, view, ["a red mug"])
    c = embed_phrases(base, ["a red mug"])[0]
    slow = torch.stack([torch.dot(c, t) for t in view.tokens]).reshape(view.grid)
    assert torch.allclose(maps[0], slow, atol=1e-6)
    v, read = view.scores(c[None], xac_scale=3.0)
    a = (3 * view.tokens @ c).softmax(0)
    assert math.isclose(read[0], F.normalize(a @ view.tokens, dim=0) @ c, abs_tol=1e-5)
    assert math.isclose(v[0], view.image @ c, abs_tol=1e-6)


def test_rows_run_downwards(base):
    "The first token is the top left patch: a change at the top right moves a token of the first rows, last columns"
    plain = Image.new("RGB", (96, 96), "grey")
    spot = plain.copy()
    spot.paste((255, 0, 0), (80, 0, 96, 16))
    a, b = (encode_view(base, p).tokens for p in (plain, spot))
    row, column = divmod(int((a - b).norm(dim=-1).argmax()), 6)
    assert row < 3
    assert column >= 3


def test_layers_of_a_clip(tiny_clip):
    "The tokens after every block, through the norm and the projection, as hooks catch them"
    visual, caught = tiny_clip.model.visual, []
    image = Image.new("RGB", (64, 64), "teal")
    hooks = [b.register_forward_hook(lambda block, args, out: caught.append(out)) for b in visual.transformer.resblocks]
    view = encode_view(tiny_clip, image)
    for hook in hooks:
        hook.remove()
    layers = encode_view(tiny_clip, image, layers=True).layers
    with torch.no_grad():
        slow = [F.normalize(visual.ln_post(x)[:, 1:] @ visual.proj, dim=-1)[0] for x in caught]
    assert len(layers) == len(slow) == len(visual.transformer.resblocks)
    torch.testing.assert_close(layers, torch.stack(slow))
    torch.testing.assert_close(layers[-1], view.tokens)


def test_head_attention_of_both_towers(base, tiny_clip):
    pool = base.model.visual.trunk.attn_pool
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        weights = head_attention(base.model, x).mean(1)
        assert weights.shape == (2, 36) and torch.allclose(weights.sum(1), torch.ones(2), atol=1e-5)
        clip = head_attention(tiny_clip.model, x[..., :64, :64]).mean(1)
        assert clip.shape == (2, 16) and bool((clip.sum(1) < 1).all()) and bool((clip > 0).all())
        seen = {}
        last = tiny_clip.model.visual.transformer.resblocks[-1]
        hook = last.attn.register_forward_hook(lambda m, args, kw, out: seen.update(x=args[0]), with_kwargs=True)
        tiny_clip.model.visual(x[..., :64, :64])
        hook.remove()
        assert torch.allclose(
            last.attn(seen["x"], seen["x"], seen["x"], need_weights=True)[1][:, 0, 1:], clip, atol=1e-6
        )
    assert pool.fused_attn in (True, False)


def test_models_of_other_grids(base, tiny_clip):
    wide = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 120, 3), np.uint8))
    view = encode_view(tiny_clip, wide)
    assert view.grid == (4, 4) and view.field == (0.25, 0, 0.75, 1)
    figure = compare_figure(tiny_clip, base, wide, ["a red mug"], kind="softmax")
    assert any("4×4 and 6×6 patches" in t.get_text() for t in figure.texts)
    constant = resample_map(torch.full((1, 6, 6), 1 / 36), WHOLE, (4, 4), view.field, share=True)
    assert torch.allclose(constant.sum(), torch.tensor(0.5))  # the middle half of the image holds half of the attention


@pytest.mark.parametrize("size, grid", [(96, 6), (64, 4), (100, 7)])
def test_coverage_keeps_area(size, grid):
    mask = object_mask(Thing("cat", "red", x=0.4, y=0.6, side=0.42), size)
    cover = coverage(mask, (grid, grid), WHOLE, 64)
    assert abs(float(cover.mean()) - mask.mean()) < 0.01 and float(cover.min()) >= 0 and float(cover.max()) <= 1
    half = coverage(mask, (grid, grid), (0.0, 0.0, 0.5, 1.0), 64)
    assert abs(float(half.mean()) - mask[:, : size // 2].mean()) < 0.01


def test_auroc_is_the_pixelwise_rank_statistic():
    rng = np.random.default_rng(0)
    mask = object_mask(Thing("key", "red", x=0.4, y=0.6, side=0.42), 96)
    values = torch.tensor(rng.integers(0, 5, (6, 6)) / 7.0).float()
    cover = coverage(mask, (6, 6), WHOLE)
    pixels = np.kron(values.numpy(), np.ones((16, 16)))
    inside, outside = pixels[mask], pixels[~mask]
    slow = np.mean([(x > outside).mean() + 0.5 * (x == outside).mean() for x in inside])
    assert math.isclose(auroc(values.flatten(), cover.flatten(), 1 - cover.flatten()), slow, rel_tol=1e-5)


@pytest.mark.parametrize("patches", [4, 36])
def test_auroc_is_that_of_scikit_learn(patches):
    "Every patch twice: inside with its coverage as weight, and outside with the rest"
    rng = np.random.default_rng(patches)
    for _ in range(10):
        values = torch.tensor(rng.integers(0, 6, patches) / 7.0)
        inside = torch.tensor(rng.uniform(0, 1, patches))
        twice, weights = torch.cat([values, values]), torch.cat([inside, 1 - inside])
        expected = roc_auc_score([1] * patches + [0] * patches, twice, sample_weight=weights)
        assert math.isclose(auroc(values, inside, 1 - inside), expected, rel_tol=1e-12)


def test_images_in_several_batches(base):
    probes = binding_probes()[:12]
    whole, numbers, _ = probe_maps(base, probes)
    assert numbers == [0] * 4 + [1] * 4 + [2] * 4
    parts, *_ = probe_maps(base, probes, batch_size=2)
    assert torch.allclose(whole, parts, atol=1e-5)
    assert localisation(base, probes, batch_size=1).auroc.notna().all()


def oracle_rows(aim):
    "Localisation of maps that are exactly the coverage of what `aim(probe)` returns"
    probes = binding_probes()
    rows = []
    for number, p in enumerate(probes):
        covers = {k: coverage(m, (6, 6), WHOLE).flatten() for k, m in p.rivals.items()}
        rows.append(
            dict(image=number // 4, phrase=p.phrase, group=p.group)
            | measure_map(
                coverage(aim(p), (6, 6), WHOLE).flatten(), coverage(p.mask, (6, 6), WHOLE).flatten(), covers, 10.0
            )
        )
    return pd.DataFrame(rows)


def binding_probes():
    return scene_probes(binding_scenes(6, "validation") + binding_scenes(6, "validation", True), draw_scene)


def test_perfect_and_mistaken_maps():
    right, wrong = oracle_rows(lambda p: p.mask), oracle_rows(lambda p: p.rivals["colour"])
    table = localisation_table(wrong, right).set_index(["suite", "name"])
    for suite in ("localisation", "heldout/localisation"):
        for name in ("AUROC", "pointing", "pointing over same colour"):
            assert table.loc[(suite, name)].after > 90, (suite, name)
        assert (
            table.loc[(suite, "AUROC over same colour")].before < 15
            and table.loc[(suite, "AUROC over same colour")].low > 50
        )
        assert table.loc[(suite, "pointing over same colour")].before == 0
        assert 20 < table.loc[(suite, "AUROC over same noun")].before < 80  # neither of the two is looked at
        mass = table.loc[(suite, "mass inside")]
        assert mass.after > 5 * mass.chance and mass.before < mass.chance


def test_a_random_map_is_at_chance():
    generator = np.random.default_rng(1)
    tables = []
    for k in range(6):
        rows = oracle_rows(lambda p: generator.random((6, 6)) > 0.5)
        tables.append(rows.assign(image=rows.image + 100 * k))
    rows = pd.concat(tables, ignore_index=True)
    table = localisation_table(rows)
    for r in table.itertuples():
        if r.name in ("AUROC", "mass inside", "mass over same colour", "AUROC over same noun"):
            assert r.low - 2 < r.chance < r.high + 2, r


def test_interval_needs_no_single_group_and_counts_what_is_missing():
    rows = oracle_rows(lambda p: p.mask)
    rows.loc[:3, "auroc colour"] = math.nan
    table = localisation_table(rows)
    n = table.set_index(["suite", "name"]).n
    assert n["localisation", "AUROC"] == 24 and n["localisation", "AUROC over same colour"] == 20


def test_bad_input(base):
    draw = draw_scene(make_scene("test", 1))
    for call, word in (
        (lambda: attention_map(base, draw, ["  "]), "empty"),
        (lambda: attention_map(base, draw, ["red " * 100]), "longer"),
        (lambda: encode_view(base, b"\x89PNG broken"), "broken image"),
        (lambda: encode_view(base, "/nowhere/x.png"), "missing"),
        (lambda: attention_map(base, draw, ["a mug"], "hed"), "head"),
        (lambda: localisation(base, []), "no probes"),
        (lambda: localisation(base, [Probe(draw, "a mug", np.zeros((4, 4), bool))]), "empty"),
        (lambda: coco_mask([[1, 2, 3]], 5, 5), "three points"),
    ):
        with pytest.raises(UserError, match=word) as e:
            call()
        assert "\n" not in str(e.value)


def test_figure_is_vector_and_reproducible(base):
    draw = draw_scene(make_scene("test", 1))
    maps = attention_map(base, draw, ["a $10 mug", "a_b^c {mug}"])
    pages = []
    for _ in range(2):
        columns = map_columns(["before", "after"], [maps, maps * 2], [WHOLE] * 2)
        figure = maps_figure([ImageMaps(draw, columns)], ["a $10 mug", "a_b^c {mug}"])
        with io.BytesIO() as f:
            figure.savefig(f, format="svg", metadata={"Date": None})
            pages.append(f.getvalue())
    assert pages[0].startswith(b"<?xml") and len(pages[0]) > 10_000 and pages[0] == pages[1]
    same = maps_figure([ImageMaps(draw, map_columns(["a", "b"], [maps[:1]] * 2, [WHOLE] * 2))], ["a mug"])
    assert len(same.axes) == 7  # four panels, a colour bar under each map


# Masks of 7 rows and 9 columns as pycocotools 2.0.11 writes them.
COMPRESSED = {0: "=44MM0100060J0O0:0J1", 1: "141M11001O01N00O01201OM032N0ON4", 2: "0=1g01WO"}


def test_compressed_run_lengths():
    for seed, text in COMPRESSED.items():
        mask = np.random.default_rng(seed).random((7, 9)) < (0.2, 0.5, 0.9)[seed]
        for counts in (text, text.encode()):
            assert np.array_equal(coco_mask(dict(segmentation=dict(counts=counts, size=[7, 9])), 9, 7), mask)


@pytest.mark.parametrize(
    "counts", ["4~", "~~", "4", "99999", "", b"\xff", "P", "\n", "狗", [-1, 13], [], [12.5, "x"], 7]
)
def test_malformed_run_lengths(counts):
    "Each is an error of one line; none makes the library read beyond its memory"
    with pytest.raises(UserError) as e:
        coco_mask(dict(segmentation=dict(counts=counts, size=[3, 4])), 4, 3)
    assert "\n" not in str(e.value)


def test_run_lengths_written_out():
    mask = np.random.default_rng(0).random((7, 9)) < 0.5
    column_wise = np.r_[False, mask.T.ravel()]
    changes = np.flatnonzero(column_wise[1:] != column_wise[:-1])
    counts = np.diff(np.r_[0, changes, mask.size]).tolist()
    assert np.array_equal(coco_mask(dict(counts=counts, size=[7, 9]), 9, 7), mask)


def test_a_polygon_has_its_area():
    star = [
        [320 + r * math.cos(a), 240 + r * math.sin(a)]
        for r, a in zip([100, 40] * 6, np.linspace(0, 2 * math.pi, 12, endpoint=False))
    ]
    area = abs(sum(x * v - u * y for (x, y), (u, v) in zip(star, star[1:] + star[:1]))) / 2
    mask = coco_mask([np.ravel(star).tolist()], 640, 480)
    assert mask.shape == (480, 640) and abs(mask.sum() / area - 1) < 0.01
    assert coco_mask([[-50, -50, 2000, -50, 2000, 2000, -50, 2000]], 20, 10).all()  # beyond the image
    assert coco_mask([[0, 0, 4, 0, 4, 4, 0, 4], [6, 6, 8, 6, 8, 8, 6, 8]], 10, 10).sum() == 20  # parts


@pytest.fixture
def coco(tmp_path):
    "A small file in COCO's format and its two images"
    for name in ("a", "b"):
        Image.new("RGB", (60, 40), "grey").save(tmp_path / f"{name}.jpg")
    return dict(
        images=[dict(id=7, file_name="a.jpg", width=60, height=40), dict(id=8, file_name="b.jpg", width=60, height=40)],
        categories=[dict(id=1, name="dog"), dict(id=2, name="cat")],
        annotations=[
            dict(id=1, image_id=8, category_id=1, bbox=[0, 0, 10, 10]),
            dict(id=2, image_id=8, category_id=1, segmentation=[[20, 0, 30, 0, 30, 20, 20, 20]], bbox=[20, 0, 10, 20]),
            dict(id=3, image_id=7, category_id=2, bbox=[0, 20, 60, 20], phrase="the cat below"),
            dict(id=4, image_id=7, category_id=2, bbox=[0, 0, 60, 10], phrase="the cat above"),
        ],
    )


def test_probes_of_a_coco_file(coco, tmp_path, base):
    (tmp_path / "x.json").write_text(json.dumps(coco))
    probes = coco_probes(tmp_path / "x.json", tmp_path, "mine")
    assert [p.phrase for p in probes] == ["the cat below", "the cat above", "dog"]
    assert {p.group for p in probes} == {"mine"}
    assert [p.mask.sum() for p in probes] == [1200, 600, 300]
    assert np.array_equal(probes[0].rivals["noun"], probes[1].mask)
    assert not probes[2].rivals
    table = localisation_table(localisation(base, probes)).set_index("name")
    assert set(table.suite) == {"mine/localisation"}
    assert table.n["AUROC"] == 3
    assert table.n["AUROC over same noun"] == 2
    assert abs(table.chance["mass inside"] - 100 * (1200 + 600 + 300) / 2400 / 3) < 3
    coarse = coco_probes(coco, tmp_path, points=30)
    assert coarse[0].mask.shape == (20, 30) and coarse[0].mask.mean() == 0.5


@pytest.mark.parametrize(
    "change, word",
    [
        (lambda c: c.pop("categories"), "lacks categories"),
        (lambda c: c["annotations"][0].update(image_id=99), "annotation 1 belongs to the image 99"),
        (lambda c: c["annotations"][1].update(category_id=5), "annotation 2 is of the category 5"),
        (lambda c: c["annotations"][1].update(segmentation=[[1, 2, 3]]), "annotation 2: a polygon needs"),
        (lambda c: c["annotations"][2].pop("bbox"), "annotation 3: the annotation has neither"),
        (lambda c: c["annotations"][2].update(bbox=[0, 0, math.nan, 2]), "not finite"),
        (lambda c: c["annotations"][2].update(segmentation=dict(counts=[2400], size=[60, 40])), "image has .40, 60."),
        (lambda c: c["images"][0].update(file_name="gone.jpg"), "gone.jpg is missing"),
        (lambda c: c["annotations"][1].update(segmentation="circle"), "list of polygons"),
        (lambda c: c["annotations"][1].update(segmentation=dict(size=[40, 60])), "annotation 2: the run lengths"),
        (lambda c: c["annotations"][1].update(segmentation=dict(counts=[2400], size=7)), "image has .40, 60."),
        (lambda c: c["annotations"].append("a dog"), "entry 4 of annotations is no object"),
        (lambda c: c["annotations"][0].update(image_id=[8]), "entry 0 of annotations has no usable image_id"),
        (lambda c: c["images"][1].pop("width"), "entry 1 of images has no usable width"),
        (lambda c: c["categories"][0].update(name=None), "entry 0 of categories has no usable name"),
        (lambda c: c["annotations"][1].update(segmentation=dict(counts="~~", size=[40, 60])), "cannot be read"),
    ],
)
def test_wrong_coco_files(coco, tmp_path, change, word):
    change(coco)
    with pytest.raises(UserError, match=word) as e:
        coco_probes(coco, tmp_path)
    assert "\n" not in str(e.value)


def test_a_file_that_is_no_coco_file(tmp_path):
    (tmp_path / "x.json").write_text("[1, 2")
    (tmp_path / "y.json").write_text("[1, 2]")
    for name, word in (
        ("x.json", "cannot be read"),
        ("y.json", "lacks images, annotations, categories"),
        ("z.json", "No such file"),
    ):
        with pytest.raises(UserError, match=word):
            coco_probes(tmp_path / name, tmp_path)
