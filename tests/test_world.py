"""The embedded world is the same on every machine, its splits are apart, and its false captions are false."""

import hashlib
import json

import numpy as np
import pytest

from c2lip.lab.relatives.edits import word_bag
from c2lip.lab.world.benchmark import make_item, write_benchmark
from c2lip.lab.world.captions import numbered_scene, train_records
from c2lip.lab.world.drawn import COLOURS, HELD_OUT, Scene, draw_scene, make_scene, object_mask
from c2lip.lab.world.questions import DOUBTS, KINDS, _is_new, write_questions

# Of the first sixteen training images, with Python 3.11; the drawing itself was compared with 3.12 and 3.13 before
PIXELS = "dbb5f17de5f617be636e2ed33d84e645677ee002f18322631b467612541893c2"


def test_pixels_and_captions_are_the_same_everywhere():
    digest = hashlib.sha256()
    for _, draw, caption in train_records(16):
        digest.update(np.asarray(draw()).tobytes() + caption.encode())
    assert digest.hexdigest() == PIXELS


def test_splits_share_no_scene_and_training_shows_no_held_out_pair():
    scenes = [[make_scene(split, i) for i in range(800)] for split in ("pretrain", "train", "validation", "test")]
    assert len({scene.things for of in scenes for scene in of}) == 4 * 800
    placed = [make_scene("train", i, place=i % 16) for i in range(800)]
    assert not any(t.pair in HELD_OUT for scene in [*scenes[0], *scenes[1], *placed] for t in scene.things)


def words_true_of(scene, text):
    "Every colour in the text is directly before a noun, as such a pair is in the scene"
    pairs = {t.pair[::-1] for t in scene.things}
    words = text.lower().replace(",", "").replace(".", "").split()
    return all((w, words[i + 1]) in pairs for i, w in enumerate(words) if w in COLOURS)


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("task", ["replace_obj", "replace_att", "swap_obj", "swap_att", "add_obj"])
def test_captions_are_true_and_negatives_false(task, held_out):
    made = 0
    for i in range(400):
        scene = make_scene("validation", i, held_out=held_out)
        item = make_item(task, scene, i, held_out=held_out)
        if item is None:
            continue
        made += 1
        caption, other_words, negative = item
        assert words_true_of(scene, caption) and words_true_of(scene, other_words), item
        assert not words_true_of(scene, negative), item
        if task.startswith("swap"):
            assert word_bag(caption) == word_bag(negative), "a bag of words cannot tell"
    assert made > 30


def test_held_out_items_edit_held_out_pairs(tmp_path):
    write_benchmark(tmp_path, "validation", images=80, items=20, single=96)
    for half, held in ((tmp_path, False), (tmp_path / "heldout", True)):
        for row in json.loads((half / "world_sugarcrepe" / "swap_att.json").read_text()).values():
            for text in (row["caption"], row["negative_caption"]):
                words = text.lower().strip(".").split()
                pairs = [(words[i + 1].strip(".,"), w) for i, w in enumerate(words) if w in COLOURS]
                assert all((p in HELD_OUT) == held for p in pairs), (text, held)


def test_masks_cover_what_was_drawn():
    for i in range(30):
        scene = make_scene("test", i)
        empty = np.asarray(draw_scene(Scene((), scene.ground)), dtype=int)
        changed = np.abs(np.asarray(draw_scene(scene), dtype=int) - empty).sum(-1) > 90
        masks = np.any([object_mask(t) for t in scene.things], axis=0)
        assert (changed & ~masks).mean() < 0.05  # shadows are outside the masks
        assert (masks & changed).sum() > 0.5 * masks.sum()  # white objects on light ground hardly change a pixel


def test_a_question_of_two_scenes_cannot_be_answered_without_an_image(tmp_path):
    "Twins exchange their texts; so does every score of a text alone, which is then right once in two"
    write_questions(tmp_path, 12, "validation")
    rows = {}
    for suite, kinds in (("world_sugarcrepe_2", KINDS), ("doubts", DOUBTS)):
        for kind in kinds:
            rows[kind] = list(json.loads((tmp_path / suite / f"{kind}.json").read_text()).values())

    assert {len(of_kind) for of_kind in rows.values()} == {12, 8, 6}
    for kind, of_kind in rows.items():
        for first, second in zip(of_kind[::2], of_kind[1::2]):
            assert first["question"] == second["question"] and first["filename"] != second["filename"], kind
            assert (first["caption"], first["negative_caption"]) == (second["negative_caption"], second["caption"])
            assert first["caption"] != second["caption"], kind
            images = [(tmp_path / "images" / row["filename"]).read_bytes() for row in (first, second)]
            assert images[0] != images[1], f"{kind}: both scenes look alike"


def test_scenes_of_questions_are_new():
    scenes = [numbered_scene("train", i) for i in range(200)]
    assert not any(_is_new(scene) for scene in scenes if len(scene.things) > 1)
