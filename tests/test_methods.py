"""All methods on one spine: gradients in parts and over ranks equal those of one process.

Weights that only training has stay out of the release."""

import math
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from torch.nn.parallel import DistributedDataParallel

from c2lip.concepts import noun_phrases
from c2lip.core import Batch, Sample, Texts
from c2lip.encoding import sum_over_ranks
from c2lip.lab.data.loading import Samples
from c2lip.lab.relatives import build
from c2lip.lab.relatives.clic import squeeze_whole
from c2lip.lab.training.config import Config
from c2lip.lab.training.fit import fit
from c2lip.lab.training.step import halve_weights, parameter_groups, train_step
from c2lip.lab.world.base_model import BASE_PREPROCESS, BASES, new_towers
from c2lip.lab.world.captions import train_records
from c2lip.methods import Step
from c2lip.towers import load, save
from c2lip.towers.folders import base_folder

METHODS = "plain c2lip clic negclip concrete_jungle macco".split()
EQUAL = [{"concepts": "pool", "duplicates": duplicates} for duplicates in ("separate", "mask", "merge")]
CASES = [("siglip", name, 1, {}) for name in METHODS]
CASES += [("clip", name, 1, {}) for name in ("plain", "clic", "negclip", "macco")]
CASES += [(kind, "c2lip", 1, options) for kind in ("siglip", "clip") for options in EQUAL]
CASES += [("siglip", "clic", 2, {}), ("siglip", "clip", 1, {})]  # CLIC's second step is a plain one
CASES += [("siglip", "c2lip", 1, {"trainable": r"text\..*"})]
CASES += [("siglip", "macco", 1, {"lambda_mlm": 0.0})]  # the predictor of words rests


def sample_of(towers, record):
    key, image, text = record
    whole = squeeze_whole(image(), towers.image_size)
    return Sample(key, towers.preprocess(image()), text, noun_phrases(text), whole=whole)


@pytest.fixture(scope="module")
def samples():
    return [sample_of(load("base"), record) for record in train_records(12)]


@pytest.fixture(scope="module")
def uneven():
    "Twelve images of 32 pixels in float64: the first four without a phrase, two far apart with the same phrases"
    towers = toy("siglip")
    found = [sample_of(towers, record) for record in train_records(12)]
    found = [replace(s, image=s.image.double()) for s in found]
    found[11] = replace(found[11], caption=found[5].caption, phrases=found[5].phrases)
    return [replace(s, phrases=[]) for s in found[:4]] + found[4:]


def toy(kind):
    "Random towers of 16 patches and one or three layers"
    config = deepcopy(BASES["small" if kind == "siglip" else "clip"])
    config["vision_cfg"] |= {"image_size": 32} if kind == "siglip" else {"image_size": 32, "layers": 1, "patch_size": 8}
    config["text_cfg"] |= {"layers": 1}
    return new_towers(base_folder(), config, BASE_PREPROCESS | {"size": 32})


def made(name, towers=None, trainable="", **options):
    towers = towers or load("base")
    torch.manual_seed(0)
    method = build(name, towers, options)
    parameter_groups(towers, method, Config(lr=1e-3, trainable=trainable))
    return towers, method


def exact(kind, name, options):
    "Toy towers and a method in float64"
    torch.manual_seed(0)
    towers, method = made(name, toy(kind), **options)
    towers.model.double()
    method.objective.double()
    return towers, method


def backward(towers, method, batch, parts=1):
    "The losses of a batch, whose gradients are there afterwards"
    losses = Step(towers, method, parts)(batch)
    losses["total"].backward()
    return losses


def gradients(towers, method):
    named = [*towers.model.named_parameters(), *((f"objective.{n}", p) for n, p in method.objective.named_parameters())]
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named if p.requires_grad}


def assert_equal(case, losses, found, whole):
    "MACCO's counts over ranks and some buffers are float32: sixth digits, not twelfth"
    for k, value in losses.items():
        assert math.isclose(value, whole["losses"][k], rel_tol=1e-6, abs_tol=1e-6), (case, k)
    for k, g in found.items():
        want = whole["gradients"][k]
        assert torch.allclose(g, want, rtol=1e-5, atol=1e-7 * max(1.0, want.abs().max().item())), (case, k)


@pytest.fixture(scope="module")
def folder(uneven, tmp_path_factory):
    "Of every case the batch, and the losses and gradients of one process"
    folder = tmp_path_factory.mktemp("cases")
    for case, (kind, name, step, options) in enumerate(CASES):
        towers, method = exact(kind, name, options)
        batch = method.view(uneven, step)
        batch = replace(batch, images={entry: x.double() for entry, x in batch.images.items()})  # some it draws itself
        losses = {k: v.item() for k, v in backward(towers, method, batch).items()}
        found = gradients(towers, method)
        assert any(g.abs().max() > 0 for g in found.values())
        torch.save({"batch": batch, "losses": losses, "gradients": found}, folder / f"{case}.pt")
    return folder


def read_case(folder, case):
    return torch.load(f"{folder}/{case}.pt", weights_only=False)


def test_parts_give_the_gradients_of_the_whole(folder):
    for case, (kind, name, _, options) in enumerate(CASES):
        towers, method = exact(kind, name, options)
        whole = read_case(folder, case)
        losses = backward(towers, method, whole["batch"], parts=3)
        assert_equal(CASES[case], {k: v.item() for k, v in losses.items()}, gradients(towers, method), whole)


def on_one_rank(rank, folder):
    "Two ranks, then three, which encode in two parts: a rank's share of each batch gives what one process gave"
    torch.set_num_threads(1)
    sent = []
    usual = dist.all_gather

    def recorded(parts, x, **options):
        sent.append(x.ndim)
        return usual(parts, x, **options)

    dist.all_gather = recorded
    for ranks in (2, 3):
        if rank == ranks:
            continue  # sits out
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet{ranks}", rank=rank, world_size=ranks)
        for case, (kind, name, _, options) in enumerate(CASES):
            towers, method = exact(kind, name, options)
            whole = read_case(folder, case)
            # which of equal mentions is the first, and where an image is, are known for ranks of equal size
            even = options.get("duplicates") == "merge" or kind == "clip" and name.startswith("c2lip")
            sizes = [12 // ranks] * ranks if even else [5, 7] if ranks == 2 else [3, 4, 5]
            part = part_of(whole["batch"], sum(sizes[:rank]), sum(sizes[: rank + 1]))
            module = DistributedDataParallel(Step(towers, method, parts=ranks - 1), find_unused_parameters=True)
            losses = module(part)
            losses["total"].backward()
            means = {k: sum_over_ranks(v.detach().clone()).item() / ranks for k, v in losses.items()}
            assert_equal(CASES[case], means, gradients(towers, method), whole)
        dist.destroy_process_group()
    assert max(sent) == 2, "visual tokens (B,M,D) stay where they are"
    Path(folder, f"equal{rank}").touch()


def part_of_entry(entry, images):
    "The texts of some of the images, a row for every mention"
    if entry.owner is None:
        return Texts(entry.ids[images], mask=None if entry.mask is None else entry.mask[images])
    mine = (entry.owner >= images.start) & (entry.owner < images.stop)
    rows = (torch.arange(len(entry)) if entry.column is None else entry.column)[mine]
    spans = entry.spans

    return Texts(
        None if entry.ids is None else entry.ids[rows],
        entry.owner[mine] - images.start,
        torch.arange(len(rows)),
        number=None if entry.number is None else entry.number[rows],
        weight=None if entry.weight is None else entry.weight[mine],
        spans=None if spans is None else spans[rows] - spans.new_tensor([images.start, 0, 0]),
        of=entry.of,
    )


def part_of(batch, first, end):
    "What one of the ranks would have made: its images of the twelve, and the texts of these"
    mine = slice(first, end)
    images = {name: x[mine] for name, x in batch.images.items() if name != "negative_image"}
    if "negative_image" in batch.images:  # a row for each negative, not for each image
        owner = batch.texts["negative"].owner
        images["negative_image"] = batch.images["negative_image"][(owner >= mine.start) & (owner < mine.stop)]
    texts = {name: part_of_entry(entry, mine) for name, entry in batch.texts.items()}
    return Batch(images, texts, {name: x[mine] for name, x in batch.masks.items()})


def test_two_and_three_ranks_give_what_one_gives(folder):
    "The same batch, cut with uneven numbers of hard captions, a rank without a phrase, equal phrases on two ranks"
    assert on_ranks(on_one_rank, folder, 3) == [0, 0, 0]
    assert len(list(folder.glob("equal*"))) == 3


@pytest.mark.parametrize("name, moved", [("macco", ".*"), ("clic", "(?!visual[.]).*")])
def test_the_release_holds_the_towers_alone(name, moved, samples, tmp_path):
    "Names as before, weights that are trained moved, others bit for bit as they were, without a gradient"
    towers, method = made(name)
    before = {n: p.clone() for n, p in towers.model.state_dict().items()}
    optimizer = torch.optim.AdamW(parameter_groups(towers, method, Config(lr=1e-3)))
    for step in (1, 2):
        assert math.isfinite(train_step(Step(towers, method), optimizer, method.view(samples, step), step)["total"])
    save(towers, tmp_path / "model")
    after = load(str(tmp_path / "model")).model.state_dict()
    assert set(after) == set(before)

    changed = [n for n, x in after.items() if not torch.equal(x, before[n])]
    assert changed
    assert all(re.fullmatch(moved, n) for n in changed)
    assert all(p.grad is None for n, p in towers.model.named_parameters() if not re.fullmatch(moved, n))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainer_gives_a_method_whole_images(workers, tmp_path):
    "CLIC's halves are resized from what was opened, in workers too; other methods get plain samples"
    wide = [(key, image().resize((192, 96)), caption) for key, image, caption in train_records(8)]
    high = [(f"high {key}", image.rotate(90, expand=True), caption) for key, image, caption in wide]
    seen = {}
    for name in ("clic", "plain"):
        towers = load("base")
        method = build(name, towers)
        view = method.view

        def watched(samples, step, view=view, name=name):
            seen.setdefault(name, []).extend(samples)
            return view(samples, step)

        method.view = watched
        cfg = Config.of({"epochs": 1.0, "batch_size": 8, "lr": 1e-4, "warmup": 1, "workers": workers})
        (tmp_path / name).mkdir()
        fit(towers, method, Samples([*wide, *high], towers.preprocess), cfg, tmp_path / name)
    opened = {key: image for key, image, _ in [*wide, *high]}
    assert len(seen["clic"]) == 16
    for s in seen["clic"]:
        assert (s.whole == squeeze_whole(opened[s.key], (96, 96))).all()
        assert s.whole.shape[:2] == ((96, 48) if s.key.startswith("high") else (48, 96))
    assert all(s.whole is None for s in seen["plain"])


def test_heads_have_their_own_rate(samples):
    "The public code's decay of MACCO's predictors, not the run's"
    towers, method = made("macco", predictor_lr=0.02)
    groups = parameter_groups(towers, method, Config(lr=1e-4))
    found = {id(p): (g["peak"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert {found[id(p)] for p in method.objective.parameters() if p.ndim > 1} == {(0.02, 0.01)}
    assert found[id(towers.model.visual.trunk.patch_embed.proj.weight)] == (1e-4, 0.1)


@pytest.mark.parametrize("name", METHODS)
def test_weights_in_bfloat16(name, samples):
    "Every method's step with pure_bf16: finite losses near those in float32"
    found = []
    for halved in (False, True):
        towers, method = made(name)
        if halved:
            halve_weights(towers)
        losses = backward(towers, method, method.view(samples, 1))
        found.append({term: loss.item() for term, loss in losses.items()})
    assert found[1] == pytest.approx(found[0], rel=0.25)
