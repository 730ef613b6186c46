"""Every recipe is accepted and runs on small shards.

Damaged shards are counted, stop a run only where they must, and cost no exactness."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
import yaml
from tars import write_tar

from c2lip.concepts import noun_phrases
from c2lip.core import UserError, read_json
from c2lip.data.batches import batches
from c2lip.data.sources import open_data
from c2lip.release import run as run_room
from c2lip.release.run import train_from_terminal
from c2lip.training.log import read_log
from c2lip.training.settings import check
from c2lip.training.step import train_step
from c2lip.workshop.parameters import read_parameters
from c2lip.world_captions import train_records

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "data" / "recipes").glob("*.yaml"))
TINY = dict(
    model="base",
    epochs=1,
    batch_size=16,
    gpus=1,
    accumulate=1,
    workers=0,
    warmup=1,
    log_every=1,
    evaluate_every=0,
    hold_back=0.1,
    precision="float32",
    threads=1,
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    "Three shards of 32 images of the embedded world, with the public reference's keys"
    folder = tmp_path_factory.mktemp("shards")
    for n in range(3):
        members = []
        for i, (_, image, caption) in enumerate(train_records(96)[32 * n : 32 * n + 32]):
            jpeg = io.BytesIO()
            image().save(jpeg, "jpeg", quality=95)
            facts = dict(
                url=f"http://images/{n}-{i}.jpg",
                shortLLA_captions=caption,
                nounphrases=[p.text for p in noun_phrases(caption)],
            )
            members += [
                (f"{i:09d}.jpg", jpeg.getvalue()),
                (f"{i:09d}.json", json.dumps(facts).encode()),
                (f"{i:09d}.txt", b"an old caption"),
            ]
        write_tar(folder / f"cc3m-train-{n:04d}.tar", members)
    return folder


@pytest.fixture(scope="module")
def damaged(shards, tmp_path_factory):
    "Seven kinds of damage in one data set; returns the shards and how many samples are whole"
    folder = tmp_path_factory.mktemp("damaged")
    for f in shards.glob("*.tar"):
        shutil.copy(f, folder)
    bomb = b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff\x03\x01\x11\x00\x02\x11\x00\x03\x11\x00\xff\xd9"
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
        members += [
            (f"{name}.jpg", content),
            (f"{name}.json", text.encode()),
            (f"{name}.pickle", b"cos\nsystem\n(S'exit'\ntR."),
        ]
    write_tar(folder / "cc3m-train-0003.tar", [*members, ("good.jpg", image)])
    with tarfile.open(shards / "cc3m-train-0001.tar") as second:
        inside = second.getmember("000000016.jpg").offset_data + 100  # the shard ends within an image
    whole = (shards / "cc3m-train-0001.tar").read_bytes()
    (folder / "cc3m-train-0004.tar").write_bytes(whole[:inside])
    return folder / "cc3m-train-{0000..0005}.tar"  # 0005 is missing


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_is_accepted(recipe):
    given = yaml.safe_load(recipe.read_text(encoding="utf8"))
    launcher = "pretrain" if recipe.stem == "base" else "train"
    settings = check(read_parameters(ROOT / "nbs" / f"{launcher}.ipynb"), given, launcher)
    assert all(settings[k] == v for k, v in given.items()), "a value is read as something else"
    assert f"-f data/recipes/{recipe.name}" in recipe.read_text(encoding="utf8")
    if recipe.stem != "base":
        assert settings["batch_size"] % (settings["gpus"] * settings["accumulate"]) == 0


def test_the_paper_s_recipe_holds_the_paper_s_values():
    given = yaml.safe_load((ROOT / "data" / "recipes" / "cc3m_c2lip.yaml").read_text())
    published = dict(
        lambda_npc=1,
        lambda_xac=0.01,
        epochs=5,
        batch_size=768,
        gpus=8,
        lr=1e-5,
        weight_decay=0.1,
        warmup=50,
        clip_grad=0,
        crop_scale=0.9,
        seed=42,
    )
    assert {k: given[k] for k in published} == published
    one = yaml.safe_load((ROOT / "data" / "recipes" / "cc3m_c2lip_one_gpu.yaml").read_text())
    assert {k for k in given if given[k] != one.get(k)} <= {"gpus", "workers"} and set(one) - set(given) == {
        "accumulate"
    }


def test_the_paper_s_recipe_runs_by_its_papermill_line(shards, tmp_path, run):
    words = [
        w
        for k, v in {
            **TINY,
            "data": f"{shards}/cc3m-train-{{0000..0002}}.tar",
            "run_dir": tmp_path / "run",
            "accumulate": 2,
        }.items()
        for w in ("-p", k, str(v))
    ]
    done = run("papermill", "nbs/train.ipynb", "-f", "data/recipes/cc3m_c2lip.yaml", *words)
    assert done.returncode == 0, done.out
    assert (tmp_path / "run" / "model" / "open_clip_model.safetensors").exists() and "zero" not in done.out
    rows = read_log(tmp_path / "run")
    assert {"contrastive", "npc", "xac", "skipped"} <= set(rows[-1]) and rows[-1]["skipped"] == 0


@pytest.mark.parametrize("recipe", [p for p in RECIPES if p.stem not in ("base", "cc3m_c2lip")], ids=lambda p: p.stem)
def test_the_other_recipes_run(recipe, shards, tmp_path):
    train_from_terminal(
        [str(recipe), str(tmp_path / "run"), f"data={shards}/*.tar", *(f"{k}={v}" for k, v in TINY.items())]
    )
    assert (
        read_log(tmp_path / "run")[-1]["total"] > 0
        and read_json(tmp_path / "run" / "params.json")["method"] == yaml.safe_load(recipe.read_text())["method"]
    )


# hostile data


HOSTILE = dict(method="c2lip", lr=1e-4, crop_scale=0.8, hold_back=0, max_skipped=0.4, epochs=2, batches="random")


def train(source, folder, **settings):
    "Train on `source` with settings that let it have damage"
    return run_room.train({**TINY, **HOSTILE, "data": str(source), **settings}, folder)


def test_damaged_shards_are_trained_on_and_counted(damaged, tmp_path, capfd):
    weights = {}
    for workers in (0, 2):
        folder = tmp_path / f"{workers}"
        folder.mkdir()
        weights[workers] = train(damaged, folder, workers=workers).model.state_dict()
        causes = sorted(json.loads(line)["cause"] for line in (folder / "skipped.jsonl").read_text().splitlines())
        assert causes == [
            "bad JSON",
            "bad phrases",
            "broken image",
            "damaged shard",
            "duplicate member",
            "empty caption",
            "image too large",
            "missing shard",
        ], causes
        assert read_log(folder)[-1]["skipped"] == 8
    assert all(torch.equal(weights[0][k], weights[2][k]) for k in weights[0]), "workers change nothing, damage or not"
    out = capfd.readouterr().out
    assert "1 missing shard" in out and "members not read: 6 pickle" in out


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


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_bit_equal_on_damaged_shards(damaged, tmp_path, monkeypatch, workers):
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
    want = train(damaged, tmp_path / "straight", workers=workers).model.state_dict()
    step = train_step

    def stopping(*args, **kw):
        if args[4] == 6:
            raise KeyboardInterrupt
        return step(*args, **kw)

    monkeypatch.setattr("c2lip.training.fit.train_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(damaged, tmp_path / "stopped", workers=workers, save_every=3)
    monkeypatch.setattr("c2lip.training.fit.train_step", step)
    got = train(damaged, tmp_path / "stopped", workers=workers, resume=True).model.state_dict()
    assert all(torch.equal(want[k], got[k]) for k in want)
    lists = [
        sorted(set((tmp_path / name / "skipped.jsonl").read_text().splitlines())) for name in ("straight", "stopped")
    ]
    assert (
        lists[0] == lists[1]
        and read_log(tmp_path / "straight")[-1]["skipped"] == read_log(tmp_path / "stopped")[-1]["skipped"]
    )


def test_ranks_see_disjoint_parts_and_as_many_steps(shards, monkeypatch):
    records = open_data(shards / "*.tar")
    for epoch in range(2):
        order = batches(records.phrases, 24, 7, epoch)
        parts = [[b[r * 8 : r * 8 + 8] for b in order] for r in range(3)]
        assert [len(p) for p in parts] == [4, 4, 4] and sorted(sum((sum(p, []) for p in parts), [])) == list(range(96))
