"""Writes the page that needs no kernel: one HTML file with two models, sixty scenes and the code that runs them.

python docs/page.py FILE [BEFORE AFTER]     BEFORE and AFTER: names or folders of models made from the embedded base
"""

import base64
import io
import itertools
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from timm.layers import resample_abs_pos_embed

from c2lip.core import UserError
from c2lip.core.files import read_yaml, shipped
from c2lip.lab.attention.controls import MAP_CONTROLS, Selection
from c2lip.lab.attention.figures import add_outline
from c2lip.lab.attention.maps import AMOUNT_COLOURS, CHANGE_COLOURS, MAP_KINDS
from c2lip.lab.attention.questions import PHOTO_COLOURS, PHOTO_NOUNS, QUESTIONS, Exhibit, gallery
from c2lip.lab.world.captions import caption_scene, change_things, name_thing
from c2lip.lab.world.drawn import DRAWN, SIZES, draw_scene, make_scene, object_mask
from c2lip.lab.world.scenes import binding_scenes
from c2lip.lab.world.worlds import COLOURS, PATTERNS
from c2lip.score import Embedded, Score, read_vector_head
from c2lip.towers import load

HERE = Path(__file__).resolve().parent


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _png(image: Image.Image) -> str:
    with io.BytesIO() as file:
        image.save(file, "PNG", optimize=True)
        return _text(file.getvalue())


def scenes() -> list[Exhibit]:
    "The gallery of the explorer, and eight more scenes of the validation split"
    more = [("scene", make_scene("validation", i)) for i in (14, 15, 19, 21, 22, 27)]
    more += [("held out", scene) for scene in binding_scenes(4, "validation", held_out=True)[2:]]
    exhibits = list(gallery())
    for place, (kind, scene) in enumerate(more, len(exhibits) + 1):
        exhibits.append(Exhibit(f"{kind} {place}", draw_scene(scene), caption_scene(scene, "explorer", place), scene))
    return exhibits


SEARCHES = {  # a text → the two things that it names
    "a red mug and a blue fish": (("mug", "red"), ("fish", "blue")),  # no model has seen a red mug
    "a blue kite and a green tree": (("kite", "blue"), ("tree", "green")),
}


def searched() -> list[Exhibit]:
    "Twenty scenes of three things for each search: six show both things, seven exchange their colours, seven show one"
    exhibits = []
    for text, ((noun, colour), (other_noun, other_colour)) in SEARCHES.items():
        first, second = {"noun": noun, "colour": colour}, {"noun": other_noun, "colour": other_colour}
        both = [first, second]
        exchanged = [first | {"colour": other_colour}, second | {"colour": colour}]
        kinds = [both] * 6 + [exchanged] * 7 + [[first, {}]] * 4 + [[{}, second]] * 3

        drawn = (make_scene("validation", text, number, count=3, contact=0.0) for number in itertools.count())
        others = (scene for scene in drawn if not {noun, other_noun} & {thing.noun for thing in scene.things})
        for changes, scene in zip(kinds, others):
            changed = {thing: replace(thing, **change) for thing, change in zip(scene.things, changes)}
            scene = change_things(scene, changed)
            place = len(exhibits) + 1
            exhibits.append(Exhibit(f"search {place}", draw_scene(scene), caption_scene(scene, "search", place), scene))
    return exhibits


def _search():
    "What the page's search holds"
    listed = []
    for exhibit in searched():
        things = [dict(words=_words(thing)) for thing in exhibit.scene.things]
        listed.append(dict(name=exhibit.name, caption=exhibit.caption, seen=_png(exhibit.image), things=things))
    return dict(scenes=listed, texts=[*SEARCHES])


def _words(thing):
    return [word for word in (thing.noun, thing.colour, thing.pattern, thing.size) if word]


def _outline(thing, size=384):
    "The contour of a thing, transparent elsewhere"
    blank = np.full((size, size, 3), 0.5)
    drawn = add_outline(blank, object_mask(thing, size))
    alpha = (drawn != blank).any(-1, keepdims=True)
    return Image.fromarray(np.uint8(np.concatenate([drawn, alpha], -1) * 255 + 0.5), "RGBA")


def _scene(exhibit):
    "A scene for the page: what the models see, what a reader sees, the words, the outlines"
    things = [asdict(t) | dict(words=_words(t), outline=_png(_outline(t))) for t in exhibit.scene.things]
    return dict(
        name=exhibit.name,
        caption=exhibit.caption,
        truth=[*map(name_thing, exhibit.scene.things)],
        seen=_png(exhibit.image),
        shown=_png(exhibit.shown),
        things=things,
        ground=exhibit.scene.ground,
    )


def _model(name):
    "Weights and what else the page must know of a model; `UserError` where its towers are of another form"
    towers = load(name)
    trunk = getattr(towers.model.visual, "trunk", None)
    known = getattr(trunk, "attn_pool", None) is not None and len(getattr(trunk, "blocks", ())) == 6
    if not known or towers.preprocess_cfg["size"] not in (96, [96, 96], (96, 96)):
        raise UserError(f"{name}: the page runs the embedded base and what is tuned from it, no other towers")
    weights = {key: value.float().contiguous() for key, value in towers.model.state_dict().items()}
    place = "visual.trunk.pos_embed"
    weights[place] = resample_abs_pos_embed(weights[place], (6, 6), num_prefix_tokens=1).contiguous()
    return _text(save(weights))


def _head(name):
    "The phrases' half of a model's vector head, and the other half's answers for the scenes to search; empty: none"
    towers = load(name)
    head = read_vector_head(towers)
    if head is None:
        return ""
    images = [exhibit.image for exhibit in [*scenes(), *searched()]]
    held = {key: value for key, value in head.state_dict().items() if key.startswith("phrase")}
    held["scenes"] = head.image(Embedded.of(towers, images).patches)
    held["share"] = torch.tensor([head.share])
    return _text(save({key: value.half() for key, value in held.items()}))


def data(before: str, after: str) -> dict:
    "All that the page holds besides its code"
    tokenizer = json.loads((shipped("base") / "tokenizer.json").read_text(encoding="utf8"))["model"]
    palettes = {}
    for name, cmap in (("amount", AMOUNT_COLOURS), ("change", CHANGE_COLOURS)):
        palettes[name] = cmap(np.arange(cmap.N), bytes=True)[:, :3].tolist()
    words = dict(colours=[*COLOURS], nouns=[*DRAWN.nouns], others=[*PATTERNS, *filter(None, SIZES)])
    words |= dict(more_colours=PHOTO_COLOURS, more_nouns=PHOTO_NOUNS)
    looks = read_yaml(shipped("world.yaml"))
    controls = {name: vars(control) for name, control in MAP_CONTROLS.items()}
    # no gradient × input: the page has no backward pass
    kinds = [choice for choice in controls["kind"]["choices"].items() if choice[0] != "gradient"]
    controls["kind"] = controls["kind"] | dict(choices=kinds)
    opening = Selection(kind="softmax", smooth=True, same_scale=True)  # as explore.ipynb opens
    scores = [Score.load(load(model), "phrases") for model in (before, after)]
    return dict(
        names=[Path(name).name for name in (before, after)],
        models=[_model(before), _model(after)],
        heads=[_head(before), _head(after)],
        vocab=tokenizer["vocab"],
        merges=tokenizer["merges"],
        palettes=palettes,
        scenes=[_scene(exhibit) for exhibit in scenes()],
        words=words,
        world={name: looks[name] for name in ("objects", "colours", "patterns")} | dict(sizes=SIZES),
        controls=controls,
        selection={name: getattr(opening, name) for name in MAP_CONTROLS},
        labels=MAP_KINDS,
        questions=[*QUESTIONS],
        weights=[[score.cosine, score.phrases] for score in scores],
        search=_search(),
    )


@torch.no_grad()
def write_page(file: Path, before: str = "base", after: str = ""):
    "Write the page; by default with the base and the tuned model that ships"
    text = (HERE / "page.html").read_text(encoding="utf8")
    parts = {
        "STYLE": shipped("explorer.css").read_text(encoding="utf8"),
        "DATA": json.dumps(data(before, after or str(shipped("tuned"))), ensure_ascii=False).replace("<", "\\u003c"),
        "CODE": "".join((HERE / f"{name}.js").read_text(encoding="utf8") for name in ("page", "scene")),
        "SEARCH": (HERE / "search.js").read_text(encoding="utf8"),
    }
    for name, part in parts.items():
        text = text.replace(f"/*{name}*/", part)
    Path(file).write_text(text, encoding="utf8")


if __name__ == "__main__":
    write_page(Path(sys.argv[1]), *sys.argv[2:])
