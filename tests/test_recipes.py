"""Every recipe is accepted and runs on small shards.

Damaged shards are counted, stop a run only where they must, and cost no exactness."""

import json
import re
import shutil
import tarfile

import pytest
import torch
import yaml
from conftest import ROOT
from writing import encoded, write_captioned, write_tar

from c2lip.concepts import noun_phrases
from c2lip.core import UserError
from c2lip.core.files import read_json
from c2lip.lab.data.prepare import prepare
from c2lip.lab.dev.command import main
from c2lip.lab.relatives import build
from c2lip.lab.training import run as run_room
from c2lip.lab.training.config import Config, check, read_methods, read_settings, settings_of
from c2lip.lab.training.launchers import launcher_settings
from c2lip.lab.training.log import read_log
from c2lip.lab.training.run import train_from_terminal
from c2lip.lab.training.step import make_optimizer, train_step
from c2lip.lab.world.captions import train_records
from c2lip.towers import load

RECIPES = sorted((ROOT / "data" / "recipes").glob("*.yaml"))
TINY = dict(model="base", epochs=1, batch_size=16, gpus=1, accumulate=1, workers=0, warmup=1, log_every=1)
TINY |= dict(evaluate_every=0, hold_back=0.1, precision="float32", threads=1)


def read_recipe(name):
    return yaml.safe_load((ROOT / "data" / "recipes" / f"{name}.yaml").read_text(encoding="utf8"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    "Three shards of 32 images of the embedded world, with the public reference's keys"
    folder = tmp_path_factory.mktemp("shards")

    for n in range(3):
        members = []
        for i, (_, image, caption) in enumerate(train_records(96)[32 * n : 32 * n + 32]):
            facts = dict(url=f"http://images/{n}-{i}.jpg", shortLLA_captions=caption)
            facts["nounphrases"] = [p.text for p in noun_phrases(caption)]
            jpeg = encoded(image(), "jpeg", quality=95)
            kinds = dict(jpg=jpeg, json=json.dumps(facts).encode(), txt=b"an old caption")
            members += [(f"{i:09d}.{kind}", content) for kind, content in kinds.items()]
        write_tar(folder / f"cc3m-train-{n:04d}.tar", members)
    return folder


@pytest.fixture(scope="module")
def damaged(shards, tmp_path_factory):
    "Seven kinds of damage in one data set; returns the shards and how many samples are whole"
    folder = tmp_path_factory.mktemp("damaged")
    for f in shards.glob("*.tar"):
        shutil.copy(f, folder)
    bomb = (  # a PNG of 65,535 pixels a side
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\xff\xff\x00\x00\xff\xff\x08\x02\x00\x00\x00"
        b"9gN\x07\x00\x00\x00\x00IDAT5\xaf\x06\x1e"
    )
    with tarfile.open(shards / "cc3m-train-0000.tar") as first:
        image = first.extractfile("000000000.jpg").read()
    members = []
    for name, content, text in (
        ("broken", image[:500], '{"caption": "A broken one."}'),
        ("bomb", bomb, '{"caption": "A large one."}'),
        ("json", image, "{"),
        ("empty", image, '{"caption": " "}'),
        ("phrases", image, '{"caption": "A mug.", "nounphrases": 3}'),
        ("good", image, '{"caption": "A red mug."}'),
    ):
        kinds = dict(jpg=content, json=text.encode(), pickle=b"cos\nsystem\n(S'exit'\ntR.")
        members += [(f"{name}.{kind}", member) for kind, member in kinds.items()]

    write_tar(folder / "cc3m-train-0003.tar", [*members, ("good.jpg", image)])
    with tarfile.open(shards / "cc3m-train-0001.tar") as second:
        inside = second.getmember("000000016.jpg").offset_data + 100  # the shard ends within an image
    whole = (shards / "cc3m-train-0001.tar").read_bytes()
    (folder / "cc3m-train-0004.tar").write_bytes(whole[:inside])
    return folder / "cc3m-train-{0000..0005}.tar"  # 0005 is missing


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_is_accepted(recipe):
    given = read_recipe(recipe.stem)
    launcher = "pretrain" if recipe.stem.startswith("base") else "train"
    settings = check(launcher_settings(ROOT / "nbs" / f"{launcher}.ipynb", given), given, launcher)
    assert all(settings[k] == v for k, v in given.items()), "a value is read as something else"
    assert f"-f data/recipes/{recipe.name}" in recipe.read_text(encoding="utf8")
    if launcher == "train":
        assert set(given) - set(settings_of()) <= set(read_methods()[given.get("method", "c2lip")]), "of another method"
        assert settings["batch_size"] % (settings["gpus"] * settings["accumulate"]) == 0


PAPER = dict(lambda_npc=1, lambda_xac=0.01, epochs=5, batch_size=768, gpus=8, lr=1e-5)
PAPER |= dict(warmup=50, clip_grad=0, crop_scale=0.9, seed=42)


def test_the_paper_s_recipe_holds_the_paper_s_values():
    given = read_recipe("cc3m_c2lip")
    one = read_recipe("cc3m_c2lip_one_gpu")
    assert given.items() >= (PAPER | dict(weight_decay=0.1)).items()
    assert {k for k in given if given[k] != one.get(k)} <= {"gpus", "workers"}
    assert set(one) - set(given) == {"accumulate"}

    letter = read_recipe("c2lip_paper")
    baseline = read_recipe("c2lip_paper_baseline")
    assert baseline == letter | dict(lambda_npc=0, lambda_xac=0), "the fair control differs in the two weights alone"

    newer = dict(model="ViT-B-16-SigLIP2:webli")
    assert read_recipe("c2lip_siglip2") == letter | newer
    assert read_recipe("c2lip_siglip2_baseline") == baseline | newer

    short = re.search(r"-p epochs ([\d.]+) -p run_dir runs/cc3m-short", (ROOT / "nbs/walkthrough.ipynb").read_text())
    assert float(short[1]) * 3673 > 2 * given["warmup"], "the short run gets past its warm-up"


def test_what_the_other_recipes_change():
    "The recommended one and its two forms differ from the paper's, and from each other, where they say so"
    recommended = read_recipe("c2lip_recommended")
    for name, other, changed in (
        ("c2lip_recommended", read_recipe("cc3m_c2lip"), {"xac_scale", "duplicates", "alpha"}),
        ("c2lip_patches", recommended, {"lambda_npc", "lambda_xac"}),
        ("c2lip_vit_l", recommended, {"model", "accumulate"}),
    ):
        given = read_recipe(name)
        assert {key for key in given if given[key] != other.get(key)} == changed and set(other) <= set(given), name


# what the paper's text and the public code share, or the text leaves to the code
BOTH_SEEDS = PAPER | dict(method="c2lip", model="ViT-B-16-SigLIP:webli", xac_scale=1, duplicates="separate")
BOTH_SEEDS |= dict(batches="random", scalar_lr=1, hold_back=0, evaluate_every=0)
SEEDS = {
    "c2lip_paper": dict(concepts="pool", weight_decay=0, max_scale=0, precision="bf16"),
    "c2lip_code": dict(concepts="encode", weight_decay=0.1, max_scale=100, precision="pure_bf16"),
}


@pytest.mark.parametrize("name", SEEDS)
def test_the_seeds_by_the_letter(name):
    "Every setting that the paper's text or the public code fixes, and the rules that decide what a phrase is"
    given = read_recipe(name)
    assert given.items() >= (BOTH_SEEDS | SEEDS[name]).items()

    rules = read_settings(f"data/recipes/{name}.yaml")["phrase_rules"]
    assert rules["max_phrases"] == rules["max_words"] == 0, "neither has a limit"
    assert rules["none"] == {"c2lip_paper": "skip", "c2lip_code": "caption"}[name]

    source = (ROOT / "data" / "recipes" / f"{name}.yaml").read_text().splitlines()
    rest = ("workers", "log_every", "save_every", "max_skipped", "lambda_xac", "phrase_rules")
    bare = [line for line in source if ":" in line and "#" not in line and line.split(":")[0] not in rest]
    assert not bare, f"each line has its quotation or place: {bare}"

    towers = load("base")
    made = make_optimizer(towers, build("c2lip", towers), Config.of(given))
    assert (made.defaults["betas"], made.defaults["eps"]) == ((0.9, 0.98), 1e-6)

    decays = {p.ndim > 1: group["weight_decay"] for group in made.param_groups for p in group["params"]}
    assert decays == {True: given["weight_decay"], False: 0}, "matrices alone decay"


@pytest.mark.parametrize("name", SEEDS)
def test_the_seeds_train_by_the_letter(name, tmp_path):
    "The public code has weights in bf16 and the caption as fallback; the paper has neither"
    images = [image() for _, image, _ in train_records(32)]
    rows = [(f"{i}.png", image, dict(caption=f"Running {i}.", phrases=[])) for i, image in enumerate(images)]
    write_captioned(tmp_path, rows)
    settings = read_recipe(name) | TINY | dict(precision=SEEDS[name]["precision"], hold_back=0)
    towers = run_room.train(settings | dict(data=str(tmp_path), lr=1e-3), tmp_path / "run")

    is_code = name == "c2lip_code"
    assert (read_log(tmp_path / "run")[-1]["npc"] > 0) == is_code, "of no phrase, or of the caption in place of one"
    matrices = [weight for weight in towers.model.parameters() if weight.ndim > 1]
    assert all(torch.equal(w, w.bfloat16().float()) for w in matrices) == is_code


@pytest.mark.parametrize("name, phrases", [("c2lip_paper", 80), ("cc3m_c2lip", 40)])
def test_prepare_follows_a_recipe(tmp_path, capsys, name, phrases):
    'By the paper "A picture" is a phrase, too'
    image = next(iter(train_records(1)))[1]()
    write_captioned(tmp_path, [(f"{i}.png", image, dict(caption="A picture of a red mug.")) for i in range(40)])
    recipe = str(ROOT / "data" / "recipes" / f"{name}.yaml")
    home = str(tmp_path / "prepared")
    assert main(["prepare", str(tmp_path / "captions.jsonl"), home, "--recipe", recipe]) == 0
    assert f"train.ipynb -f {recipe} -p data {home}\n" in capsys.readouterr().out

    made = read_json(tmp_path / "prepared" / "manifest.json")
    assert made["rules"].items() >= read_settings(recipe)["phrase_rules"].items()
    assert made["phrases"] == phrases


def test_the_paper_s_recipe_runs_by_its_papermill_line(shards, tmp_path, run):
    given = TINY | {"data": f"{shards}/cc3m-train-{{0000..0002}}.tar", "run_dir": tmp_path / "run"}
    given |= dict(accumulate=2, hold_back=0)
    words = [word for name, value in given.items() for word in ("-p", name, str(value))]
    done = run("papermill", "nbs/train.ipynb", "-f", "data/recipes/cc3m_c2lip.yaml", *words)
    assert done.returncode == 0 and "no table: fewer than two images are held back" in done.out, done.out
    assert (tmp_path / "run" / "model" / "open_clip_model.safetensors").exists()
    assert "zero" not in done.out
    assert (tmp_path / "run" / "attention.png").stat().st_size > 5000
    rows = read_log(tmp_path / "run")
    assert {"contrastive", "npc", "xac", "skipped"} <= set(rows[-1])
    assert rows[-1]["skipped"] == 0


@pytest.mark.parametrize(
    "recipe", [p for p in RECIPES if not p.stem.startswith("base") and p.stem != "cc3m_c2lip"], ids=lambda p: p.stem
)
def test_the_other_recipes_run(recipe, shards, tmp_path):
    given = {"data": f"{shards}/*.tar", **TINY}
    train_from_terminal([str(recipe), str(tmp_path / "run"), *(f"{k}={v}" for k, v in given.items())])
    assert read_log(tmp_path / "run")[-1]["total"] > 0
    assert read_json(tmp_path / "run" / "params.json")["method"] == read_recipe(recipe.stem)["method"]


# hostile data


HOSTILE = dict(method="c2lip", lr=1e-4, crop_scale=0.8, hold_back=0, max_skipped=0.4, epochs=2, batches="random")


def train(source, folder, **settings):
    "Train on `source` with settings that let it have damage"
    return run_room.train({**TINY, **HOSTILE, "data": str(source), **settings}, folder)


def test_damaged_shards_are_trained_on_and_counted(damaged, tmp_path, capfd):
    train(damaged, tmp_path, workers=2)
    causes = sorted(json.loads(line)["cause"] for line in (tmp_path / "skipped.jsonl").read_text().splitlines())
    damage = "bad JSON,bad phrases,broken image,damaged shard,duplicate member,empty caption,image too large"
    assert causes == [*damage.split(","), "missing shard"], causes
    assert read_log(tmp_path)[-1]["skipped"] == 8
    out = capfd.readouterr().out
    assert "1 missing shard" in out
    assert "also: 6 pickle" in out


def test_too_much_damage_stops_the_run(damaged, tmp_path):
    with pytest.raises(UserError, match="missing or damaged"):
        train(damaged, tmp_path, max_skipped=0.1)
    (tmp_path / "gone").mkdir()

    def half(i):
        (tmp_path / f"{i}.jpg").write_bytes(b"no")
        return dict(image=f"{tmp_path}/{i}.jpg", caption=f"Mug {i}.", phrases=[])

    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(half(i)) for i in range(64)))
    with pytest.raises(UserError, match="broken image"):
        train(tmp_path / "t.jsonl", tmp_path / "gone")
    assert (tmp_path / "gone" / "skipped.jsonl").read_text().count("broken image") >= 7


def captions_to_draw(folder):
    "A prepared folder of 32 images, three captions each"
    rows = []
    for key, image, caption in train_records(32):
        rows.append((f"{key}.png", image(), dict(captions=[caption, f"A drawing of {caption}", "Some things."])))
    write_captioned(folder, rows)
    made = prepare(str(folder / "captions.jsonl"), folder / "prepared", progress=False)
    assert (made["captions"], made["further"]) == (32, 64)
    return folder / "prepared"


@pytest.mark.parametrize("several", [False, True], ids=["damaged", "several captions"])
def test_resume_is_bit_equal(damaged, tmp_path, monkeypatch, several):
    "Damaged shards; one of three captions drawn in each step: two workers and a stop within an epoch change no bit"
    source = captions_to_draw(tmp_path) if several else damaged

    def weights(name, workers=2, **settings):
        (tmp_path / name).mkdir(exist_ok=True)
        return train(source, tmp_path / name, workers=workers, save_every=3, **settings).model.state_dict()

    def stopping(module, optimizer, batch, number, *more):
        if number == (4 if several else 6):
            raise KeyboardInterrupt
        return train_step(module, optimizer, batch, number, *more)

    def equal(a, b):
        return all(torch.equal(a[k], b[k]) for k in a)

    want = weights("straight", workers=0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("c2lip.lab.training.fit.train_step", stopping)
        weights("stopped")
    assert equal(want, weights("stopped", resume=True))
    if several:
        assert not equal(want, weights("first", workers=0, draw_captions=False))
    else:
        lists = [(tmp_path / name / "skipped.jsonl").read_text().splitlines() for name in ("straight", "stopped")]
        assert set(lists[0]) == set(lists[1])
        straight, stopped = (read_log(tmp_path / name)[-1]["skipped"] for name in ("straight", "stopped"))
        assert straight == stopped
