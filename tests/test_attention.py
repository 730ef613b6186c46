"""Maps, their figure and localisation: mechanics on hand-made tokens, nothing that depends on a model's quality."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from pycocotools.mask import encode

from c2lip.core import UserError
from c2lip.lab.attention.maps import encode_view, head_attention
from c2lip.lab.evaluation.localisation import (
    coco_probes,
    coverage,
    localisation_rows,
    measure_map,
    scene_probes,
)
from c2lip.lab.evaluation.scores import score
from c2lip.lab.world.drawn import Thing, object_mask
from c2lip.lab.world.scenes import binding_scenes
from c2lip.towers import load

WHOLE = (0.0, 0.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def base():
    return load("base")


def test_rows_run_downwards(base):
    "The first token is the top left patch: a change at the top right moves a token of the first rows, last columns"
    plain = Image.new("RGB", (96, 96), "grey")
    spot = plain.copy()
    spot.paste((255, 0, 0), (80, 0, 96, 16))
    a, b = (encode_view(base, p).tokens for p in (plain, spot))
    row, column = divmod(int((a - b).norm(dim=-1).argmax()), 6)
    assert row < 3 <= column


def test_head_attention_of_a_clip(tiny_clip):
    images = torch.randn(2, 3, 64, 64)
    caught = []
    attention = tiny_clip.model.visual.transformer.resblocks[-1].attn
    hook = attention.register_forward_hook(lambda m, args, kw, out: caught.append(args[0]), with_kwargs=True)
    with torch.no_grad():
        weights = head_attention(tiny_clip.model, images).mean(1)
        caught.clear()
        tiny_clip.model.visual(images)
        hook.remove()
        assert torch.allclose(attention(*caught * 3, need_weights=True)[1][:, 0, 1:], weights, atol=1e-6)

    assert weights.shape == (2, 16)
    assert bool((weights.sum(1) < 1).all())
    assert bool((weights > 0).all())


@pytest.mark.parametrize("size, grid", [(96, 6), (100, 7)])
def test_coverage_keeps_area(size, grid):
    mask = object_mask(Thing("cat", "red", x=0.4, y=0.6, side=0.42), size)
    cover = coverage(mask, (grid, grid), WHOLE, 64)
    assert abs(float(cover.mean()) - mask.mean()) < 0.01
    assert float(cover.min()) >= 0
    assert float(cover.max()) <= 1
    half = coverage(mask, (grid, grid), (0.0, 0.0, 0.5, 1.0), 64)
    assert abs(float(half.mean()) - mask[:, : size // 2].mean()) < 0.01


def oracle_rows(aim):
    "Localisation of maps that are exactly the coverage of what `aim(probe, number)` returns"

    def cover(mask):
        return coverage(mask, (6, 6), WHOLE).flatten()

    rows = []
    for number, p in enumerate(binding_probes()):
        measured = measure_map(cover(aim(p, number)), cover(p.mask))
        rows.append(dict(image=number // 4, phrase=p.phrase) | measured)
    return pd.DataFrame(rows)


def binding_probes():
    return scene_probes(binding_scenes(6, "validation") + binding_scenes(6, "validation", True))


def values_of(rows):
    return {name: score(name, items) for name, items in localisation_rows(rows)}


def test_perfect_and_mistaken_maps():
    probes = binding_probes()
    for part in (slice(24), slice(24, None)):  # what training has seen, what was held out
        both = oracle_rows(lambda p, _: p.mask), oracle_rows(lambda p, number: probes[number ^ 1].mask)
        right, wrong = (values_of(rows[part]) for rows in both)
        assert all(right[name].value > 90 for name in ("AUROC", "pointing"))
        assert wrong["AUROC"].value < 50 and wrong["pointing"].value < 10  # another thing of the scene is looked at


def test_a_random_map_is_at_chance():
    generator = np.random.default_rng(1)
    rows = pd.concat([oracle_rows(lambda *_: generator.random((6, 6)) > 0.5) for _ in range(6)], ignore_index=True)
    assert abs(values_of(rows)["AUROC"].value - 50) < 6


def test_what_was_not_measured_is_counted():
    rows = oracle_rows(lambda p, _: p.mask)
    rows.loc[:3, "auroc"] = math.nan
    measured = values_of(rows)
    assert [(measured[name].n, measured[name].nan) for name in ("pointing", "AUROC")] == [(48, 0), (44, 4)]


# --- masks in COCO's format


def coco_file(folder, segmentation):
    "An image of 7 rows and 9 columns with one annotation of a category"
    Image.new("RGB", (9, 7)).save(folder / "x.png")
    data = dict(images=[dict(id=1, file_name="x.png", width=9, height=7)], categories=[dict(id=2, name="dog")])
    data |= dict(annotations=[dict(id=1, image_id=1, category_id=2, **segmentation)])
    (folder / "instances.json").write_text(json.dumps(data))
    return folder / "instances.json"


BOX = np.zeros((7, 9), bool)
BOX[2:6, 1:4] = True


def test_one_mask_in_every_notation(tmp_path):
    for segmentation in (
        dict(segmentation=[[1, 2, 4, 2, 4, 6, 1, 6]]),
        dict(segmentation=[[1, 2, 4, 2, 4, 4, 1, 4], [1, 4, 4, 4, 4, 6, 1, 6]]),
        dict(segmentation=dict(size=[7, 9], counts=[9, 4, 3, 4, 3, 4, 36])),
        dict(segmentation=dict(size=[7, 9], counts=encode(np.asfortranarray(BOX, np.uint8))["counts"].decode())),
        dict(bbox=[1, 2, 3, 4]),
    ):
        (probe,) = coco_probes(coco_file(tmp_path, segmentation), tmp_path)
        assert probe.phrase == "dog" and np.array_equal(probe.mask, BOX), segmentation


def test_pycocotools_sees_only_masks_of_the_image(tmp_path):
    "Its C checks little: what is beyond the image, or is too short, would be read from the heap or end the process"
    draw = np.random.default_rng(0)
    right = encode(np.asfortranarray(BOX, np.uint8))["counts"].decode()
    wrong = [dict(size=size, counts=[9, 4, 50]) for size in ([9, 7], [7, 10], [7])]
    wrong += [dict(size=[7, 9], counts=counts) for counts in ([63, -5, 5], [9, 4], ["9", 54], "", right[:-1])]
    wrong += [[[0, 0, far, 0, far, far]] for far in (1e9, float("nan"), "1")] + [[[1, 2, 3]], [[]], [7]]
    for _ in range(100):
        text = "".join(map(chr, draw.integers(48, 112, draw.integers(1, 9))))
        wrong.append(dict(size=[7, 9], counts=text))

    file = coco_file(tmp_path, dict(bbox=[1, 2, 3, 4]))
    data = json.loads(file.read_text())
    cases = [data | dict(images=[data["images"][0] | dict(width=side, height=side)]) for side in (10**6, 0, 7.5, None)]
    cases += [data | dict(annotations=[data["annotations"][0] | dict(segmentation=shape)]) for shape in wrong]
    for case in cases:
        file.write_text(json.dumps(case))
        with pytest.raises(UserError, match="instances.json is not in COCO's format"):
            coco_probes(file, tmp_path)


def test_a_phrase_is_a_probe_of_its_own_and_a_wrong_file_is_named(tmp_path):
    file = coco_file(tmp_path, dict(bbox=[1, 2, 3, 4], phrase="the left dog"))
    data = json.loads(file.read_text())
    data["annotations"].append(dict(id=2, image_id=1, category_id=2, bbox=[5, 2, 2, 2]))
    file.write_text(json.dumps(data))
    left, dog = coco_probes(file, tmp_path)
    assert (dog.phrase, left.phrase) == ("dog", "the left dog")
    assert left.mask.sum() == 12 and dog.mask.sum() == 4
    for damage in ("categories", "images"):
        file.write_text(json.dumps({key: value for key, value in data.items() if key != damage}))
        with pytest.raises(UserError, match=f"instances.json is not in COCO's format: KeyError '{damage}'"):
            coco_probes(file, tmp_path)
