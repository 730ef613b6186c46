"""All methods on one spine: gradients in parts and over ranks equal those of one process.

Weights that only training has stay out of the release."""

import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, on_ranks
from torch.nn.parallel import DistributedDataParallel

import c2lip.methods
from c2lip.concepts import noun_phrases
from c2lip.core import Batch, Sample, Texts, UserError
from c2lip.data.loading import Samples
from c2lip.distributed import sum_over_ranks
from c2lip.methods import Step, build, method_names
from c2lip.methods.clic import squeeze_whole
from c2lip.release import save
from c2lip.towers import load
from c2lip.training.config import Config
from c2lip.training.fit import fit
from c2lip.training.step import halve_weights, parameter_groups, train_step
from c2lip.world_captions import train_records

METHODS = "plain c2lip clic negclip concrete_jungle macco uniformity labclip tripletclip".split()
CASES = [*((name, 1, {}) for name in METHODS), ("clic", 2, {})]  # CLIC's second step is a plain one
CASES += [("c2lip", 1, {"concepts": "pool", "duplicates": duplicates}) for duplicates in ("separate", "mask", "merge")]
CASES += [("c2lip", 1, {"trainable": r"text\..*"}), ("macco", 1, {"lambda_mlm": 0.0})]  # the predictor of words rests


@pytest.fixture(scope="module")
def samples():
    return twelve()


def twelve():
    towers, records = load("base"), train_records(12)
    return [Sample(key, towers.preprocess(image()), text, noun_phrases(text)) for key, image, text in records]


def made(name, double=True, trainable="", **options):
    torch.manual_seed(0)
    towers = load("base")
    method = build(name, towers, {}, options)
    if double:
        towers.model.double()
        method.objective.double()
        method = with_double_images(method)
    parameter_groups(towers, method, Config(lr=1e-3, trainable=trainable))
    return towers, method


def backward(towers, method, samples, step, parts=1):
    "The losses of a step, whose gradients are there afterwards"
    losses = Step(towers, method, parts)(method.view(samples, step))
    losses["total"].backward()
    return losses


def gradients(towers, method):
    named = [*towers.model.named_parameters(), *((f"objective.{n}", p) for n, p in method.objective.named_parameters())]
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named if p.requires_grad}


def with_double_images(method):
    "The method with a view whose images are float64 too: some it draws itself"
    view = method.view

    def doubled_view(samples, step):
        batch = view(samples, step)
        return replace(batch, images={name: x.double() for name, x in batch.images.items()})

    method.view = doubled_view
    return method


def doubled(samples):
    return [Sample(s.key, s.image.double(), s.caption, s.phrases) for s in samples]


@pytest.mark.parametrize("name, step, options", CASES)
def test_parts_give_the_gradients_of_the_whole(name, step, options, samples):
    towers, method = made(name, **options)
    whole = backward(towers, method, doubled(samples), step)
    right = gradients(towers, method)
    assert any(g.abs().max() > 0 for g in right.values())
    for p in [*towers.model.parameters(), *method.objective.parameters()]:
        p.grad = None
    parts = backward(towers, method, doubled(samples), step, parts=3)
    for k in whole:
        assert math.isclose(whole[k].item(), parts[k].item(), rel_tol=1e-6)
    for n, g in gradients(towers, method).items():
        # MACCO's counts over ranks and some buffers are float32: sixth digits, not twelfth
        assert torch.allclose(g, right[n], rtol=1e-5, atol=1e-7 * max(1.0, right[n].abs().max().item())), n


def on_one_rank(rank, folder, ranks):
    "Its part of each batch gives what one process has stored in `folder`; on three ranks it is encoded in two parts"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{ranks}", rank=rank, world_size=ranks)
    samples = doubled(twelve())
    for case, (name, step, options) in enumerate(CASES):
        towers, method = made(name, **options)
        whole = torch.load(f"{folder}/{case}.pt", weights_only=True)
        even = options.get("duplicates") == "merge"  # which mention is the first is known for equal ranks
        sizes = [12 // ranks] * ranks if even else [5, 7] if ranks == 2 else [3, 4, 5]
        part = part_of(method.view(samples, step), sum(sizes[:rank]), sum(sizes[: rank + 1]))
        module = DistributedDataParallel(Step(towers, method, parts=ranks - 1), find_unused_parameters=True)
        losses = module(part)
        losses["total"].backward()
        for k, v in losses.items():
            mean, want = sum_over_ranks(v.detach().clone()).item() / ranks, whole["losses"][k]
            assert abs(mean - want) <= 1e-6 * max(1, abs(mean)), (CASES[case], k, mean, want)
        for k, g in gradients(towers, method).items():
            want = whole["gradients"][k]
            assert torch.allclose(g, want, rtol=1e-5, atol=1e-7 * max(1.0, want.abs().max().item())), (CASES[case], k)
        if rank == 0:
            Path(folder, f"{case}.equal{ranks}").touch()
    dist.destroy_process_group()


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


def test_two_and_three_ranks_give_what_one_gives(samples, tmp_path):
    "The same batch, cut with uneven numbers of hard captions"
    for case, (name, step, options) in enumerate(CASES):
        towers, method = made(name, **options)
        losses = backward(towers, method, doubled(samples), step)
        numbers = {k: v.item() for k, v in losses.items()}
        torch.save({"losses": numbers, "gradients": gradients(towers, method)}, tmp_path / f"{case}.pt")
    for ranks in (2, 3):
        on_ranks(on_one_rank, tmp_path, ranks, ranks)
        assert len(list(tmp_path.glob(f"*.equal{ranks}"))) == len(CASES)


@pytest.mark.parametrize(
    "name, moved", [("macco", ".*"), ("clic", "(?!visual[.]).*"), ("labclip", "text[.]text_projection")]
)
def test_the_release_holds_the_towers_alone(name, moved, samples, tmp_path):
    "Names as before, weights that are trained moved, others bit for bit as they were, without a gradient"
    towers, method = made(name, double=False)
    before = {n: p.clone() for n, p in towers.model.state_dict().items()}
    optimizer = torch.optim.AdamW(parameter_groups(towers, method, Config(lr=1e-3)))
    for step in (1, 2):
        assert math.isfinite(train_step(Step(towers, method), optimizer, method.view(samples, step), step)["total"])
    save(towers, tmp_path / "model")
    after = load(str(tmp_path / "model")).model.state_dict()
    assert set(after) == set(before)
    changed = [n for n, x in after.items() if not torch.equal(x, before[n])]
    assert changed and all(re.fullmatch(moved, n) for n in changed)
    assert all(p.grad is None for n, p in towers.model.named_parameters() if not re.fullmatch(moved, n))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainer_gives_a_method_whole_images(workers, tmp_path):
    "CLIC's halves are resized from what was opened, in workers too; other methods get plain samples"
    wide = [(key, image().resize((192, 96)), caption) for key, image, caption in train_records(8)]
    high = [(f"high {key}", image.rotate(90, expand=True), caption) for key, image, caption in wide]
    seen = {}
    for name in ("clic", "plain"):
        towers = load("base")
        method = build(name, towers, {})
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
    towers, method = made("macco", double=False, predictor_lr=0.02)
    groups = parameter_groups(towers, method, Config(lr=1e-4))
    found = {id(p): (g["peak"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert {found[id(p)] for p in method.objective.parameters() if p.ndim > 1} == {(0.02, 0.01)}
    assert found[id(towers.model.visual.trunk.patch_embed.proj.weight)] == (1e-4, 0.1)


def test_the_trainer_names_no_method_and_no_entry():
    about_data = ("config", "run")
    trainer = [file for file in (ROOT / "c2lip" / "training").glob("*.py") if file.stem not in about_data]
    files = [ROOT / "c2lip" / "distributed.py", *trainer]
    assert len(files) > 5
    words = set(method_names()) - {"c2lip", "clip", "plain"} | {"npc", "xac", "phrase_signs"}
    words |= {"phrase", "caption", "negative", "positive_1"}
    for file in files:
        text = re.sub(r"^# %%.*$", "", file.read_text(encoding="utf8"), flags=re.M)
        for word in words:
            assert not re.search(rf"\b{word}\b", text), (file.name, word)


OWN = """
from c2lip.methods import Method, Objective, caption_view, contrast

def half(model, share: float = 0.5) -> "Method":
    loss = contrast(model)

    def losses(f, batch, terms):
        return {"half": share * loss(f["image"], f["caption"], f, batch.rows)}

    return Method(caption_view(model), Objective(losses, {"half": 1.0}, columns=("image", "caption")))
"""


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    "A folder whose modules are modules of c2lip.methods for a while"
    monkeypatch.setattr(c2lip.methods, "__path__", [*c2lip.methods.__path__, str(tmp_path)])
    yield tmp_path
    for name in [f"c2lip.methods.{file.stem}" for file in tmp_path.glob("*.py")]:
        sys.modules.pop(name, None)


def test_a_method_whose_first_parameter_has_another_name(own_modules, samples):
    (own_modules / "half.py").write_text(OWN)
    towers = load("base")
    method = build("half", towers, {"share": 0.25, "lr": 1.0})
    own, whole = (backward(towers, m, samples, 1) for m in (method, made("c2lip", False)[1]))
    assert math.isclose(own["half"].item(), 0.25 * whole["contrastive"].item(), rel_tol=1e-5)
    with pytest.raises(UserError, match="has no option 'towers'"):
        build("half", towers, {}, {"towers": 1})


BROKEN = {
    "missing": ("import no_such_library", "cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"),
    "syntax": ("def broken(:", "cannot be imported: SyntaxError"),
    "unannotated": ("def broken(towers):\n    pass", "holds no function that is declared to return a Method"),
}


def test_modules_that_fail_leave_the_others(own_modules):
    towers, before = load("base"), method_names()
    for name, (text, message) in BROKEN.items():
        (own_modules / f"{name}.py").write_text(text)
        with pytest.raises(UserError, match=f"the module c2lip.methods.{name} {message}"):
            build(name, towers)
    assert method_names() == before and build("plain", towers).objective.terms == ["contrastive"]


@pytest.mark.parametrize("name", METHODS)
def test_weights_in_bfloat16(name, samples):
    "Every method's step with pure_bf16: finite losses near those in float32"
    found = []
    for halved in (False, True):
        towers, method = made(name, double=False)
        if halved:
            halve_weights(towers)
        losses = backward(towers, method, samples, 1)
        found.append({term: loss.item() for term, loss in losses.items()})
    assert found[1] == pytest.approx(found[0], rel=0.25)


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
        data = Samples(train_records(24), towers.preprocess, cache=True)
        fit(towers, method, data, Config.of({**cfg, "resume": resume}), folder)
        return {**towers.model.state_dict(), **{f"objective.{k}": v for k, v in method.objective.state_dict().items()}}

    whole = fitted(tmp_path / "whole")
    with pytest.raises(Stop):
        fitted(tmp_path / "cut", stop=4)
    torch.rand(3)
    again = fitted(tmp_path / "cut", resume=True)
    assert all(torch.equal(v, again[k]) for k, v in whole.items())
