"""The embedded world is the same on every machine, its splits are apart, and its false captions are false."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from c2lip.core import UserError
from c2lip.core.files import project_root, read_yaml, shipped
from c2lip.lab.data.sources import open_data
from c2lip.lab.relatives.edits import word_bag
from c2lip.lab.world.benchmark import make_item, write_benchmark
from c2lip.lab.world.captions import numbered_scene, train_records, world_scene
from c2lip.lab.world.cutouts import _natural_colour, _pixels, _recolour, open_world
from c2lip.lab.world.drawn import DRAWN, draw_scene, make_scene, object_mask
from c2lip.lab.world.twins import DOUBTS, KINDS, _is_new, write_questions
from c2lip.lab.world.worlds import COLOURS

# Of the first sixteen training images, with Python 3.11; the drawing itself was compared with 3.12 and 3.13 before
PIXELS = "dbb5f17de5f617be636e2ed33d84e645677ee002f18322631b467612541893c2"


def test_pixels_and_captions_are_the_same_everywhere():
    digest = hashlib.sha256()
    for _, draw, caption in train_records(16):
        digest.update(np.asarray(draw()).tobytes() + caption.encode())
    assert digest.hexdigest() == PIXELS


def test_splits_share_no_scene_and_training_shows_no_held_out_pair():
    scenes = [[make_scene(split, i) for i in range(800)] for split in ("pretrain", "train", "validation", "test")]
    assert len({scene.things for split in scenes for scene in split}) == 4 * 800
    placed = [make_scene("train", i, place=i % 16) for i in range(800)]
    assert not any(t.held_out for scene in [*scenes[0], *scenes[1], *placed] for t in scene.things)


def words_true_of(scene, text):
    "Every colour in the text is directly before a noun, as such a pair is in the scene"
    pairs = {t.pair[::-1] for t in scene.things}
    words = text.lower().replace(",", "").replace(".", "").split()
    return all((w, words[i + 1]) in pairs for i, w in enumerate(words) if w in scene.world.colours)


@pytest.mark.parametrize("data", ["world", "cutouts"])
@pytest.mark.parametrize("task", ["replace_obj", "replace_att", "swap_obj", "swap_att"])
def test_captions_are_true_and_negatives_false(task, data):
    made = 0
    for i in range(400):
        scene = make_scene("validation", i, world=open_world(data))
        item = make_item(task, scene, i)
        if item is None:
            continue
        made += 1
        caption, other_words, negative = item
        assert words_true_of(scene, caption) and words_true_of(scene, other_words), item
        assert not words_true_of(scene, negative), item
        if task.startswith("swap"):
            assert word_bag(caption) == word_bag(negative), "a bag of words cannot tell"
    assert made > 30


def test_held_out_phrases_name_held_out_pairs(tmp_path):
    write_benchmark(tmp_path, "validation", images=80, items=20, single=96)
    for half, held in ((tmp_path, False), (tmp_path / "heldout", True)):
        for row in json.loads((half / "binding" / "attribute.json").read_text()).values():
            for text in (row["caption"], row["negative_caption"]):
                *_, colour, noun = text.split()
                assert ((noun, colour) in DRAWN.held_out) == held, text


@pytest.mark.parametrize("data", ["world", "cutouts"])
def test_masks_cover_what_was_drawn(data):
    for i in range(30):
        scene = make_scene("test", i, world=open_world(data))
        empty = scene.world.ground(scene.ground, 96)
        changed = np.abs(np.asarray(draw_scene(scene), dtype=int) - empty).sum(-1) > 90
        masks = np.any([object_mask(t) for t in scene.things], axis=0)
        assert (changed & ~masks).mean() < 0.05  # shadows are outside the masks
        least = 0.4 if data == "cutouts" else 0.5  # white objects on light ground hardly change a pixel
        assert (masks & changed).sum() > least * masks.sum()


def test_twins_look_different(tmp_path):
    "Their texts are those of test_suites, which sees that no text alone answers them"
    write_questions(tmp_path, 12, "validation")
    for suite, kinds in (("world_sugarcrepe_2", KINDS), ("doubts", DOUBTS)):
        for kind in kinds:
            rows = list(json.loads((tmp_path / suite / f"{kind}.json").read_text()).values())
            images = [(tmp_path / "images" / row["filename"]).read_bytes() for row in rows]
            assert all(a != b for a, b in zip(images[::2], images[1::2], strict=True)), kind


def test_scenes_of_questions_are_new():
    scenes = [numbered_scene("train", i) for i in range(200)]
    assert not any(_is_new(scene) for scene in scenes if len(scene.things) > 1)


def test_scenes_of_cut_outs_train_on_seen_pairs_and_open_by_key_and_in_a_worker():
    world = open_world("cutouts")
    assert pickle.loads(pickle.dumps(world)) is world
    scenes = [numbered_scene("train", i, world=world) for i in range(800)]
    assert not any(thing.held_out for scene in scenes for thing in scene.things)
    assert {thing.noun for scene in scenes for thing in scene.things} == set(world.nouns)
    key, _, _ = train_records(3, world=world)[2]
    assert world_scene(key) == scenes[2] and world_scene("train-000002") != scenes[2]


def test_a_recoloured_picture_is_of_its_colour():
    world = open_world("cutouts")
    right = []
    for (square,) in world.pictures.values():
        rgb, alpha = _pixels(square, 64)
        for word in ("red", "yellow", "green", "blue", "purple"):
            painted = np.concatenate([_recolour(rgb, alpha, COLOURS[word]).clip(0, 255), 255 * alpha], -1)
            right.append(_natural_colour(Image.fromarray(painted.astype(np.uint8))) in (word, ""))
    assert len(right) == 250 and np.mean(right) > 0.98


@pytest.fixture
def emoji(tmp_path):
    "Ten of the pictures that ship, in a folder as anybody has one"
    folder = tmp_path / "my_emoji"
    folder.mkdir()
    for file in sorted(shipped("cutouts").glob("*.webp"))[:10]:
        shutil.copy(file, folder)
    return folder


def test_pictures_that_cannot_be_used_are_counted(emoji):
    owl = Image.open(shipped("cutouts") / "owl.webp").convert("RGBA")
    owl.convert("RGB").save(emoji / "owl.png")
    owl.resize((20, 20)).save(emoji / "small_owl.png")
    owl.save(emoji / "007.png")
    owl.save(emoji / "orange.png")
    (emoji / "dead_owl.png").write_bytes(b"no image")
    owl.save(emoji / "x.png")
    (emoji / "x.txt").write_text("A large barn owl at night.\n")
    world = open_world(f"cutouts:{emoji}")
    counts = {cause.partition(", ")[2]: count for cause, count in world.left_out.items()}
    assert counts == {"no alpha": 1, "too small or thin": 1, "no name": 2, "cannot be read": 1}
    assert len(world.nouns) == 11 and len(world.pictures["owl"]) == 1


def test_too_few_nouns_are_told_in_a_line(emoji):
    for file in sorted(emoji.iterdir())[1:]:
        file.rename(emoji / f"airplane {file.name[0]}.webp")
    with pytest.raises(UserError, match="^.*pictures of 6 nouns.*there are 1: airplane.*$"):
        open_world(f"cutouts:{emoji}")
    with pytest.raises(UserError, match="no data at"):
        open_world(f"cutouts:{emoji}s")


def test_ten_emoji_train_as_typed(emoji, run):
    tiny = read_yaml(shipped("smoke.yaml"))["train"].items()
    words = [word for name, value in tiny for word in ("-p", name, str(value))]
    call = ["nbs/train.ipynb", "-p", "data", f"cutouts:{emoji}", *words, "-p", "run_dir", emoji.parent / "run"]
    done = run("papermill", *call, timeout=900)
    assert done.returncode == 0, done.out[-4000:]
    assert "world_sugarcrepe_2" in (emoji.parent / "run/table.csv").read_text()


STAMPS = Path("/usr/share/tuxpaint/stamps/animals")


@pytest.mark.skipif(not STAMPS.is_dir(), reason="tuxpaint-stamps-default is not installed")
def test_photographed_cut_outs():
    world = open_world(f"cutouts:{STAMPS}")
    assert len(world.nouns) > 80 and len(world.pictures["spider"]) > 2


FLICKR8K = Path(os.environ.get("C2LIP_FLICKR8K", project_root().parent / "shared/photographs/flickr8k"))
NEEDED = f"Flickr8k is not in {FLICKR8K}, C2LIP_FLICKR8K; its authors give it on request"
needs_flickr8k = pytest.mark.skipif(not FLICKR8K.is_dir(), reason=NEEDED)


def draw_photographs(folder):
    "Sixty scenes, each with its caption, in Flickr8k's layout"
    (folder / "images").mkdir()
    lines = ["image,caption"]
    for number, (_, draw, caption) in enumerate(train_records(60, single=0.0)):
        draw().save(folder / f"images/{number}.png")
        lines.append(f'{number}.png,"{caption}"')
    (folder / "captions.txt").write_text("\n".join(lines))
    return [f"{number}.png" for number in range(60)]


def link_photographs(folder):
    "Flickr8k itself, and sixty of its names"
    for name in ("images", "captions.txt"):
        (folder / name).symlink_to(FLICKR8K / name)
    return json.loads((FLICKR8K / "split.json").read_text())["val"][60:120]


SMALL = """
rehearse:
  bases:
    steps: 2
    batch: 8
    seeds: [1]
    table: {"linear, captions": [linear, {}, 20], 8 images: [two layers, {npc: 1.0}, 8], transformer: [1, {}, 20]}
  trials: {steps: 2, batch: 8, seeds: [1], losses: {plain: {}, code: {npc: 1.0}, default: {npc: 0.1, xac: 0.1}}}
  course: {steps: [0, 1], losses: [plain]}
"""


@pytest.mark.parametrize("source", [draw_photographs, pytest.param(link_photographs, marks=needs_flickr8k)])
def test_the_page_on_photographs_rehearses(run, tmp_path, source):
    "Both halves of the page to their last line"
    names = source(tmp_path)
    (tmp_path / "split.json").write_text(json.dumps(dict(train=names[:20], val=names[20:40], test=names[40:])))

    given = {"data": tmp_path, "record": "rehearsal", "items": 16, "run_dir": tmp_path / "run"}
    words = [word for name, value in given.items() for word in ("-p", name, value)]
    page = "nbs/9_study/11_photographs.ipynb"
    done = run("papermill", page, tmp_path / "out.ipynb", *words, "-y", SMALL, timeout=600)
    assert done.returncode == 0, done.out[-4000:]

    trials = pd.read_csv(tmp_path / "run/rehearsal/trials.csv")
    assert set(trials.model) == {"base", "plain", "code", "default"}
    assert "transformer" in (tmp_path / "run/rehearsal/course.csv").read_text()
    suites = {"binding", "presence", "retrieval"}
    assert set(trials.suite) == suites | {f"phrases/{suite}" for suite in suites}
    claims = pd.read_csv(tmp_path / "run/rehearsal/claims.csv")
    assert set(claims.verdict) == {"too few"}, "so few questions decide nothing"
    predictions = pd.read_csv(tmp_path / "run/predictions.csv")
    assert set(predictions[predictions.verdict != "not asked"].model) == {"siglip"}


@needs_flickr8k
def test_flickr8k_opens_as_it_is():
    images = list(open_data(str(FLICKR8K), part="val"))
    assert len(images) == 500
    assert sum(len(image.captions) for image in images) == 2499, "five each, one of them written twice"
    assert sum(len(caption.phrases) for image in images for caption in image.captions) > 5000
