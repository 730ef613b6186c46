"""A benchmark folder with every published layout, a few drawn items each, for the tests of c2lip.lab.evaluation."""

import json
from pathlib import Path

from PIL import Image, ImageDraw
from writing import encoded, write_tar

from c2lip.lab.evaluation.readers.composition import PHENOMENA

EXAMPLE_COLOURS = dict(red=(220, 40, 40), green=(40, 170, 70), blue=(50, 90, 220), yellow=(240, 200, 40))


def two_squares(first, second, upright=False):
    "Two coloured squares, 16×16: first left of second, or above it"
    image = Image.new("RGB", (16, 16), "white")
    draw = ImageDraw.Draw(image)
    for start, colour in ((2, first), (9, second)):
        box = (5, start, 10, start + 4) if upright else (start, 5, start + 4, 10)
        draw.rectangle(box, EXAMPLE_COLOURS[colour])
    return image


def say(first, second, where="left of"):
    return f"a {first} square {where} a {second} square"


def other_colour(first, second):
    return next(c for c in EXAMPLE_COLOURS if c not in (first, second))


def put_image(file, first, second, upright=False):
    file.parent.mkdir(parents=True, exist_ok=True)
    two_squares(first, second, upright).save(file, format="PNG")


def put_images(folder, pairs):
    for a, b in pairs:
        put_image(folder / f"{a}_{b}.jpg", a, b)


def put_json(file, data):
    "A JSON file, or JSON lines"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "jsonl" in file.suffix
    text = "".join(json.dumps(row) + "\n" for row in data) if lines else json.dumps(data)
    file.write_text(text, encoding="utf8")


def write_winoground(home, squares):
    rows = []
    for n, (a, b) in enumerate(squares):
        stems = {f"image_{j}": f"ex_{n}_img_{j}" for j in (0, 1)}
        rows.append(dict(id=n, **stems, caption_0=say(a, b), caption_1=say(b, a), tag="Object", num_main_preds=1))
        put_image(home / "images" / f"ex_{n}_img_0.png", a, b)
        put_image(home / "images" / f"ex_{n}_img_1.png", b, a)
    put_json(home / "examples.jsonl", rows)


def write_aro(home, pairs):
    (home / "images").mkdir(parents=True)
    for a, b in pairs:  # the box holds the right half, the left one shows the opposite
        wide = Image.new("RGB", (32, 16))
        wide.paste(two_squares(b, a))
        wide.paste(two_squares(a, b), (16, 0))
        wide.save(home / "images" / f"{a}_{b}.jpg", format="PNG")

    def item(a, b, false, **more):
        box = dict(bbox_x=16, bbox_y=0, bbox_w=16, bbox_h=16)
        return dict(image_path=f"{a}_{b}.jpg", **box, true_caption=say(a, b), false_caption=false, **more)

    relations = []
    for n, (a, b) in enumerate(pairs):
        relations.append(item(a, b, say(b, a), relation_name="next to" if n < 3 else "to the left of"))
    for a, b in pairs[:2]:
        relations.append(item(a, b, say(other_colour(a, b), b), relation_name="wearing"))
    put_json(home / "visual_genome_relation.json", relations)
    attributes = [item(a, b, say(b, a), attributes=[a, b]) for a, b in [pairs[0]] * 25 + [pairs[1]] * 3]
    put_json(home / "visual_genome_attribution.json", attributes)
    for file, place in (("coco_karpathy_test.json", "val2014"), ("flickr30k_test.json", "flickr30k-images")):
        captioned = []
        for a, b in pairs[:4]:
            captioned.append(dict(image=f"{place}/{a}_{b}.jpg", caption=[say(a, b).capitalize() + ".", "Squares."]))
        put_json(home / file, captioned)
        put_images(home / place, pairs)


def write_controlled(home, file, place, upper, lower, squares):
    "One of What'sUp's controlled parts: four positions of the same two squares"
    rows = []
    words = upper.replace("-", " ") + (" of" if "-" in upper else "")
    names = ("left_of", "right_of", upper + ("_of" if "-" in upper else ""), lower)
    for a, b in squares[:2]:
        texts = [say(a, b, where) for where in ("left of", "right of", words, lower)]
        for n, position in enumerate(names):
            first, second = (a, b) if n in (0, 2) else (b, a)
            put_image(home / place / f"{a}_{position}_{b}.jpeg", first, second, upright=n > 1)
            options = [texts[n], *(t for t in texts if t != texts[n])]
            rows.append(dict(image_path=f"data/{place}/{a}_{position}_{b}.jpeg", caption_options=options))

    put_json(home / file, rows)


def write_whatsup(home, squares):
    write_controlled(home, "controlled_images_dataset.json", "controlled_images", "on", "under", squares)
    write_controlled(home, "controlled_clevr_dataset.json", "controlled_clevr", "in-front", "behind", squares)
    for kind, place, width in (("coco", "val2017", 12), ("vg", "vg_images", 0)):
        rows = [[n, say(a, b), say(b, a)] for n, (a, b) in enumerate(squares)]
        for many in ("one", "two"):
            put_json(home / f"{kind}_qa_{many}_obj.json", rows)
        for n, (a, b) in enumerate(squares):
            put_image(home / place / f"{str(n).zfill(width)}.jpg", a, b)


def write_valse(home, pairs):
    "The last item of each task is not valid"
    sources = ("visual7w", "SWiG", "VisDial_v1.0", "coco_2017", "FOIL dataset")
    for n, task in enumerate(PHENOMENA):
        entries = {}
        source = sources[n % 5]
        for k, (a, b) in enumerate(pairs[:3]):
            entries[f"{task}_test_{k}"] = dict(
                dataset=source,
                image_file=f"{a}_{b}.jpg",
                caption=say(a, b),
                foil=say(b, a) if n % 2 else say(other_colour(a, b), b),
                mturk=dict(foil=0, caption=3 - k, other=0),
            )
        put_json(home / "data" / f"{task}.json", entries)
        put_images(home / source, pairs[:3])


def write_vl_checklist(home, pairs):
    files = ["Relation/hake_action", "Relation/swig_action", "Relation/vg/action", "Relation/vg/spatial"]
    files += ["Attribute/vaw/color", "Attribute/vg/color", "Object/Location/vg_location/vg_obj_mid"]
    for n, file in enumerate(files):
        rows = []
        for a, b in pairs[n % 3 : n % 3 + 2]:
            wrong = say(b, a) if "Relation" in file else say(other_colour(a, b), b)
            rows.append([f"{a}_{b}.jpg", dict(POS=[say(a, b)], NEG=[wrong])])
        put_json(home / "data" / f"{file}.json", rows)
    for place in ("hake", "swig", "vg"):
        put_images(home / place, pairs[:4])


def write_karpathy(folder, pairs):
    "mscoco and flickr30k"
    for name, file, place, where in (
        ("mscoco", "dataset_coco.json", "val2014", dict(filepath="val2014")),
        ("flickr30k", "dataset_flickr30k.json", "flickr30k-images", {}),
    ):
        images = []
        for n, (a, b) in enumerate(pairs):
            sentences = [dict(raw=say(a, b)), dict(raw=say(b, a, "right of"))]
            split = "test" if n < 11 else "train"
            images.append(dict(filename=f"{a}_{b}.jpg", split=split, sentences=sentences, **where))
        put_json(folder / name / file, dict(dataset=name, images=images))
        put_images(folder / name / place, pairs[:11])


def write_retrieval_shards(home, pairs):
    members = []
    for n, (a, b) in enumerate(pairs):
        text = f"{say(a, b)}\n{say(b, a, 'right of')}\n"
        members.append((f"s{n:07}.{'webp' if n % 2 else 'png'}", encoded(two_squares(a, b))))
        members.append((f"s{n:07}.txt", text.encode()))
    for n in range(2):
        write_tar(home / "test" / f"{n}.tar", members[12 * n : 12 * n + 12])
    (home / "test" / "nshards.txt").write_text("2\n")
    (home / "dataset_type.txt").write_text("retrieval\n")


def write_descriptions(folder, pairs):
    "docci and iiw"
    docci = []
    iiw = []
    for n, (a, b) in enumerate(pairs):
        text = f"There is {say(a, b)}. The sky is white. Here {a} is at the left, St. Paul says."
        name = f"test_{n:05}"
        split = "train" if n == 0 else "test"
        docci.append(dict(example_id=name, split=split, image_file=f"{name}.jpg", description=text))
        iiw.append({"IIW": text, "IIW-P5B": "Not used.", "image/key": f"aar_{name}", "objects": []})
        put_image(folder / "docci" / "images" / f"{name}.jpg", a, b)
        put_image(folder / "iiw" / "images" / f"aar_{name}.jpg", a, b)

    put_json(folder / "docci" / "docci_descriptions.jsonlines", docci)
    put_json(folder / "iiw" / "data.jsonl", iiw)


def write_classes(folder, colours):
    "A set of classes as folders and as shards"
    for c in colours:
        put_image(folder / "imagenet1k" / "val" / c / "a.jpeg", c, c)
    food = folder / "food101"
    members = []
    for n, c in enumerate(colours):
        members += [(f"s{n:07}.webp", encoded(two_squares(c, c))), (f"s{n:07}.cls", str(n).encode())]
    write_tar(food / "test" / "0.tar", members)
    (food / "test" / "nshards.txt").write_text("1\n")
    (food / "classnames.txt").write_text("\n".join(colours) + "\n")
    (food / "zeroshot_classification_templates.txt").write_text("a {c} square\n{c}\n")


def write_examples(folder):
    "Make a benchmark folder with every layout"
    folder = Path(folder)
    folder.mkdir(parents=True)
    pairs = [(a, b) for a in EXAMPLE_COLOURS for b in EXAMPLE_COLOURS if a != b]
    squares = [(a, b) for a, b in pairs if a < b]
    write_winoground(folder / "winoground", squares)
    write_aro(folder / "aro", pairs)
    write_whatsup(folder / "whatsup", squares)
    write_valse(folder / "valse", pairs)
    write_vl_checklist(folder / "vl_checklist", pairs)
    write_karpathy(folder, pairs)
    write_retrieval_shards(folder / "flickr8k", pairs)
    write_descriptions(folder, pairs)
    write_classes(folder, list(EXAMPLE_COLOURS))

    return folder
