"""The numbers of other people's code on a release folder and a benchmark folder, as JSON; no import of c2lip.

    python outside.py RELEASE BENCHMARK SETS     in an environment made from requirements.txt beside this file

* clip-benchmark's own command, without mixed precision: SugarCrepe's seven subtasks, retrieval R@1, 5, 10
* clip-benchmark's readers and its metric: zero-shot classification of the sets in SETS
* the texts and names of classes that clip-benchmark brings for every set
* the rule of the public SugarCrepe script (the right caption's score is greater, strictly) over stock open_clip
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import clip_benchmark.cli
import clip_benchmark.datasets
import open_clip
import torch
from clip_benchmark.datasets.builder import build_dataset, get_dataset_collate_fn
from clip_benchmark.metrics.zeroshot_classification import evaluate
from PIL import Image

TASKS = ("replace_obj", "replace_att", "replace_rel", "swap_obj", "swap_att", "add_obj", "add_att")


def questions(benchmark, task):
    "Our file of a task; of both that exchange objects the one that exchanges nouns"
    name = "swap_obj_nouns" if task == "swap_obj" else task
    return benchmark / "world_sugarcrepe_2" / f"{name}.json"


def lay_out(benchmark, home):
    "clip-benchmark's folders: images and SugarCrepe's files as links, captions in COCO's annotation format"
    for name in ("val2017", "val2014"):
        (home / name).symlink_to(benchmark / "images", target_is_directory=True)
    for task in TASKS:
        (home / f"{task}.json").symlink_to(questions(benchmark, task))
    images = json.loads((benchmark / "retrieval.json").read_text())["images"]
    texts = [(i, s["raw"]) for i, image in enumerate(images) for s in image["sentences"]]
    captions = dict(images=[dict(id=i, file_name=image["filename"]) for i, image in enumerate(images)])
    captions |= dict(annotations=[dict(id=n, image_id=i, caption=text) for n, (i, text) in enumerate(texts)])
    (home / "captions.json").write_text(json.dumps(captions))


CLASS_SETS = {"shards": "wds/shards"}  # our name of a set: the tool's, where they differ


def zero_shot(release, sets):
    "{set: metrics} of clip-benchmark's data sets and its metric; one process, since starting it takes a minute"
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{release}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{release}")
    model.eval()

    found = {}
    for at in sorted(sets.iterdir()):
        name = CLASS_SETS.get(at.name, at.name)
        data = build_dataset(name, str(at), preprocess, "test", download=False, task="zeroshot_classification")
        batches = data.batched(50) if name.startswith("wds/") else data
        size = None if name.startswith("wds/") else 50
        loader = torch.utils.data.DataLoader(batches, size, collate_fn=get_dataset_collate_fn(name) if size else None)
        loader.dataset.classes = data.classes
        found[at.name] = evaluate(model, loader, tokenizer, data.classes, data.templates, "cpu", amp=False)
    return found


def protocol():
    "The lists that clip-benchmark brings: {templates: {set: texts}, classnames: {set: names}}"
    home = Path(clip_benchmark.datasets.__file__).parent
    files = dict(templates="en_zeroshot_classification_templates", classnames="en_classnames")
    return {kind: json.loads((home / f"{file}.json").read_text()) for kind, file in files.items()}


def choices_and_retrieval(release, benchmark):
    "{dataset: metrics} of clip-benchmark's command line, called in this process, since its start takes long"
    with tempfile.TemporaryDirectory() as home:
        home = Path(home)
        lay_out(benchmark, home)
        call = ["clip_benchmark", "eval", "--model", f"local-dir:{release}", "--pretrained", "none"]
        call += ["--dataset_root", str(home), "--output", str(home / "{dataset}.json")]
        call += ["--no_amp", "--num_workers", "0", "--batch_size", "250"]
        sugarcrepe = ["--dataset", *(f"sugar_crepe/{task}" for task in TASKS)]
        retrieval = ["--dataset", "mscoco_captions", "--annotation_file", str(home / "captions.json")]
        for words in (sugarcrepe, [*retrieval, "--recall_k", "1", "5", "10"]):
            sys.argv = [*call, *words]
            with contextlib.redirect_stdout(sys.stderr):
                clip_benchmark.cli.main()
        found = [json.loads(f.read_text()) for f in home.glob("*.json") if f.stem not in (*TASKS, "captions")]
    return {f["dataset"]: f["metrics"] for f in found}


@torch.no_grad()
def sugarcrepe_rule(release, benchmark):
    "{task: share} by the public script's rule: an image and two captions, right if the first scores strictly higher"
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{release}")
    model.eval()
    tokenizer = open_clip.get_tokenizer(f"local-dir:{release}")
    seen = {}

    found = {}
    for task in TASKS:
        items = json.loads(questions(benchmark, task).read_text()).values()
        right = 0
        for item in items:
            name = item["filename"]
            if name not in seen:
                image = preprocess(Image.open(benchmark / "images" / name).convert("RGB"))
                seen[name] = model.encode_image(image[None], normalize=True)
            words = model.encode_text(tokenizer([item["caption"], item["negative_caption"]]), normalize=True)
            positive, negative = (seen[name] @ words.T)[0].tolist()
            right += positive > negative
        found[task] = right / len(items)
    return found


if __name__ == "__main__":
    release, benchmark, sets = (Path(p).resolve() for p in sys.argv[1:4])
    found = dict(
        clip_benchmark=choices_and_retrieval(release, benchmark),
        zero_shot=zero_shot(release, sets),
        protocol=protocol(),
        sugarcrepe_rule=sugarcrepe_rule(release, benchmark),
    )
    print(json.dumps(found, indent=1))
