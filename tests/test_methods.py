"""All methods on one spine: gradients in parts and over ranks equal those of one process, weights of training alone stay out of the release."""

import math
import re
import sys

import pytest
import torch
from conftest import ROOT

from c2lip.concepts import noun_phrases
from c2lip.core import Batch, Sample, UserError
from c2lip.data.loading import Samples
from c2lip.methods import build, method_names
from c2lip.release import save
from c2lip.towers import load
from c2lip.training.config import Config
from c2lip.training.fit import fit
from c2lip.training.step import backward, backward_in_parts, parameter_groups, train_step
from c2lip.world_captions import train_records

METHODS = ["finetune", "c2lip", "clic", "negclip", "concrete_jungle", "macco", "uniformity"]
CASES = [*((name, 1) for name in METHODS), ("clic", 2)]  # CLIC's second step is a plain one


@pytest.fixture(scope="module")
def samples():
    return twelve()


def twelve():
    towers = load("base")
    return [
        Sample(key, towers.preprocess(image()), caption, noun_phrases(caption))
        for key, image, caption in train_records(12)
    ]


def made(name, double=True, **options):
    torch.manual_seed(0)
    towers = load("base")
    method = build(name, towers, {}, options)
    if double:
        towers.model.double()
        method.objective.double()
    parameter_groups(towers, method, Config())
    return towers, method


def gradients(towers, method):
    named = [*towers.model.named_parameters(), *((f"objective.{n}", p) for n, p in method.objective.named_parameters())]
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named if p.requires_grad}


def doubled(samples):
    return [Sample(s.key, s.image.double(), s.caption, s.phrases) for s in samples]


@pytest.mark.parametrize("name, step", CASES)
def test_parts_give_the_gradients_of_the_whole(name, step, samples):
    towers, method = made(name)
    whole = backward(towers, method, doubled(samples), step, "cpu")
    right = gradients(towers, method)
    assert any(g.abs().max() > 0 for g in right.values())
    for p in [*towers.model.parameters(), *method.objective.parameters()]:
        p.grad = None
    parts = backward_in_parts(towers, method, doubled(samples), step, "cpu", parts=3)
    for k in whole:
        assert math.isclose(whole[k].item(), parts[k].item(), rel_tol=1e-6)
    for n, g in gradients(towers, method).items():
        # MACCO's counts over ranks and some buffers are float32: sixth digits, not twelfth
        assert torch.allclose(g, right[n], rtol=1e-5, atol=1e-7 * max(1.0, right[n].abs().max().item())), n


RANK = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from test_methods import CASES, made, gradients, doubled, part_of, twelve
from c2lip import training
from c2lip.towers import average_gradients, sum_over_ranks
dist.init_process_group("gloo")
rank, samples = dist.get_rank(), doubled(twelve())
for name, step in CASES:
    towers, method = made(name)
    whole = torch.load({folder!r} + f"/{{name}}{{step}}.pt", weights_only=True)
    part = part_of(method.view(samples, step), rank)
    method.view = lambda *_: part
    losses = training.backward(towers, method, [None], step, "cpu")
    average_gradients([p for p in [*towers.model.parameters(), *method.objective.parameters()] if p.requires_grad])
    for k, v in losses.items():
        total = sum_over_ranks(v.detach().clone()).item()
        assert abs(total - whole["losses"][k]) <= 1e-6*max(1, abs(total)), (name, step, k, total, whole["losses"][k])
    for k, g in gradients(towers, method).items():
        assert torch.allclose(g, whole["gradients"][k], rtol=1e-5, atol=1e-7*max(1., whole["gradients"][k].abs().max().item())), (name, step, k)
    if rank == 0: print("equal", name, step, flush=True)
dist.destroy_process_group()
"""


def part_of(batch, rank):
    "What one of two ranks would have made: its half of the pairs and the further texts of these"
    n = len(batch.images["image"]) // 2
    mine = slice(rank * n, rank * n + n)
    owned = None if batch.owner is None else (batch.owner >= mine.start) & (batch.owner < mine.stop)

    def rows(x, entry):
        if entry == "hard":
            return x[:3] if rank == 0 else x[3:]  # these belong to nobody
        return x[owned] if entry in ("negative", "phrase") else x[mine]

    take = lambda entries: {k: rows(x, k) for k, x in entries.items()}
    owner = None if owned is None else batch.owner[owned] - mine.start
    return Batch(
        take(batch.images),
        take(batch.texts),
        owner,
        None if batch.column is None else torch.arange(len(owner)),
        None if batch.phrase_id is None else batch.phrase_id[owned],
        None,
        take(batch.masks),
    )


def test_two_ranks_give_what_one_gives(samples, tmp_path, run):
    "The same batch, cut in two with uneven numbers of hard captions"
    for name, step in CASES:
        towers, method = made(name)
        losses = backward(towers, method, doubled(samples), step, "cpu")
        torch.save(
            {"losses": {k: v.item() for k, v in losses.items()}, "gradients": gradients(towers, method)},
            tmp_path / f"{name}{step}.pt",
        )
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(tests=str(ROOT / "tests"), folder=str(tmp_path)))
    done = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, timeout=200)
    assert done.returncode == 0, done.out[-3000:]
    assert done.out.count("equal") == len(CASES), done.out


@pytest.mark.parametrize("name", ["macco", "clic"])
def test_the_release_holds_the_towers_alone(name, samples, tmp_path):
    towers, method = made(name, double=False)
    names = set(towers.model.state_dict())
    optimizer = torch.optim.AdamW(parameter_groups(towers, method, Config(lr=1e-3)))
    for step in (1, 2):
        row = train_step(towers, method, optimizer, samples, step, "cpu")
    assert math.isfinite(row["total"])
    save(towers, tmp_path / "model")
    again = load(str(tmp_path / "model"))
    assert set(again.model.state_dict()) == names
    with torch.no_grad():
        assert torch.allclose(
            again.model.encode_image(samples[0].image[None]),
            towers.model.eval().encode_image(samples[0].image[None]),
            atol=1e-6,
        )


def test_clic_leaves_the_images_tower_alone(samples):
    towers, method = made("clic", double=False)
    before = {n: p.clone() for n, p in towers.model.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(towers, method, Config(lr=1e-3)))
    for step in (1, 2):
        train_step(towers, method, optimizer, samples, step, "cpu")
    moved = {n for n, p in towers.model.named_parameters() if not torch.equal(p, before[n])}
    assert (
        moved
        and not any(n.startswith("visual.") for n in moved)
        and all(p.grad is None for n, p in towers.model.named_parameters() if n.startswith("visual."))
    )


def test_heads_have_their_own_rate(samples):
    towers, method = made("macco", double=False, predictor_lr=0.02)
    groups = parameter_groups(towers, method, Config(lr=1e-4))
    rate = {id(p): g["peak"] for g in groups for p in g["params"]}
    assert {rate[id(p)] for p in method.objective.parameters()} == {0.02} and rate[
        id(towers.model.visual.trunk.patch_embed.proj.weight)
    ] == 1e-4


def test_the_trainer_names_no_method():
    text = (ROOT / "c2lip" / "training.py").read_text(encoding="utf8")
    for name in set(method_names()) - {"c2lip", "clip", "siglip", "finetune"} | {"npc", "xac", "phrase_signs"}:
        assert not re.search(rf"\b{name}\b", text), name


def test_unknown_method_and_option():
    towers = load("base")
    with pytest.raises(UserError, match="did you mean clic"):
        build("click", towers, {})
    with pytest.raises(UserError, match="has no option 'regimes'.*regime"):
        build("concrete_jungle", towers, {}, {"regimes": "low"})


@pytest.mark.parametrize("name", ["macco", "clic"])
def test_a_stopped_run_goes_on_to_the_same_bits(name, tmp_path):
    "Weights that only training has, and steps that take turns, are where they were"

    class Stop(Exception):
        pass

    cfg = {"epochs": 2.0, "batch_size": 8, "lr": 1e-3, "warmup": 1, "save_every": 1, "log_every": 10}

    def fitted(folder, stop=None, resume=False):
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        towers = load("base")
        method = build(name, towers, {})
        view = method.view

        def watched(samples, step):
            if step == stop:
                raise Stop
            return view(samples, step)

        method.view = watched
        fit(
            towers,
            method,
            Samples(train_records(24), towers.preprocess, cache=True),
            Config.of({**cfg, "resume": resume}),
            folder,
        )
        return {**towers.model.state_dict(), **{f"objective.{k}": v for k, v in method.objective.state_dict().items()}}

    whole = fitted(tmp_path / "whole")
    with pytest.raises(Stop):
        fitted(tmp_path / "cut", stop=4)
    torch.rand(3)
    again = fitted(tmp_path / "cut", resume=True)
    assert all(torch.equal(v, again[k]) for k, v in whole.items())
