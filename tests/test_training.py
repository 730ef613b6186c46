"""Runs that stop, go on, freeze, split over processes or meet a NaN end as they should."""

import math
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch
from writing import Canary

from c2lip.core import UserError, seed_everything
from c2lip.core.files import sole_writer
from c2lip.lab.data.loading import Samples
from c2lip.lab.evaluation.suites import benchmark_folder
from c2lip.lab.relatives import build
from c2lip.lab.training import fit as fit_room
from c2lip.lab.training.checkpoint import load_checkpoint, read_checkpoint
from c2lip.lab.training.config import Config
from c2lip.lab.training.log import read_log
from c2lip.lab.training.run import train
from c2lip.lab.training.step import halve_weights, look_at_gradients, make_optimizer, train_step
from c2lip.lab.world.captions import train_records
from c2lip.methods import Step, plain
from c2lip.methods.c2lip import c2lip
from c2lip.towers import load

CFG = Config(epochs=2, batch_size=4, warmup=2, log_every=1, save_every=3, lr=1e-3, batches="random")


@pytest.fixture(scope="module")
def samples():
    return Samples(train_records(24), load().preprocess, cache=True)


def run(samples, folder, cfg=CFG, make=c2lip, stop_at=None, soft=False):
    "Train a fresh base; after `stop_at` steps it ends in the middle of one, or `soft`, by Ctrl-C, after it"
    folder.mkdir(exist_ok=True)
    seed_everything(0)
    towers = load()
    method = make(towers)
    if stop_at:
        view, method.view = method.view, None

        def stopping(batch, step):
            if step > stop_at:
                signal.raise_signal(signal.SIGINT)
                if not soft:
                    raise KeyboardInterrupt
            return view(batch, step)

        method.view = stopping
    with suppress(KeyboardInterrupt):
        fit_room.fit(towers, method, samples, cfg, folder)
    return towers.model.state_dict()


def equal(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


def losses(folder):
    "What the log says of each step"
    return [row["total"] for row in read_log(folder)]


STOPS = [("c2lip", 1, "random"), ("c2lip", 11, "neighbours"), ("macco", 4, "random"), ("clic", 4, "random")]


@pytest.mark.parametrize("method, stop_at, batches", STOPS)
def test_a_stopped_run_goes_on_bit_equal(samples, tmp_path, method, stop_at, batches):
    "A lost table of neighbours is found again; weights that only training has, and steps that take turns, go on"
    cfg = replace(CFG, batches=batches)
    make = partial(build, method)
    soft = method == "macco"
    stopped = tmp_path / "stopped"
    straight = run(samples, tmp_path / "straight", cfg, make)
    run(samples, stopped, cfg, make, stop_at, soft)

    kept = read_checkpoint(stopped) or {"step": 0}
    assert kept["step"] == (stop_at + 1 if soft else stop_at // 3 * 3)
    if batches == "neighbours":
        (stopped / "neighbours.npy").unlink()
    assert equal(straight, run(samples, stopped, replace(cfg, resume=True), make))
    assert losses(stopped) == losses(tmp_path / "straight")
    assert len(losses(stopped)) == 12


def test_a_damaged_checkpoint_falls_back_to_the_one_before(samples, tmp_path, capsys):
    "Noise in a view, too, is the step's own: the same bits, and the caller's generator is left alone"

    def noisy(towers):
        method = c2lip(towers)
        view = method.view

        def noise(batch, step):
            found = view(batch, step)
            found.images["image"] = found.images["image"] + 0.1 * torch.randn_like(found.images["image"])
            return found

        method.view = noise
        return method

    want = run(samples, tmp_path / "straight", make=noisy)
    run(samples, tmp_path / "stopped", stop_at=8, make=noisy)  # checkpoints of steps 3 and 6
    path = tmp_path / "stopped" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:5000])
    assert equal(want, run(samples, tmp_path / "stopped", replace(CFG, resume=True), make=noisy))
    assert "damaged" in capsys.readouterr().out


def test_weights_of_zero_are_plain_fine_tuning_bit_for_bit(samples, tmp_path):
    zero = run(samples, tmp_path / "zero", make=lambda towers: c2lip(towers, 0, 0))
    assert equal(zero, run(samples, tmp_path / "plain", make=plain))


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_weights(samples, tmp_path):
    def spoiled(towers):
        method = c2lip(towers)
        losses = method.objective.losses
        calls = []

        def spoil(f, batch, terms):
            calls.append(1)
            found = losses(f, batch, terms)
            return {**found, "npc": found["npc"] * math.nan} if len(calls) == 5 else found

        method.objective.losses = spoil
        return method

    with pytest.raises(UserError, match="step 5: the npc loss is nan.*weights of step 4"):
        run(samples, tmp_path / "run", make=spoiled)
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 4
    assert all(v.isfinite().all() for v in state["model"].values())


def test_a_checkpoint_with_code_in_it_is_refused(samples, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").write_bytes(pickle.dumps({"step": Canary(tmp_path / "gone")}))
    towers = load()
    method = c2lip(towers)
    with pytest.raises(UserError, match="checkpoint.pt is damaged"):
        load_checkpoint(tmp_path / "run", towers, method, torch.optim.AdamW(towers.model.parameters()))
    assert not (tmp_path / "gone").exists()


def test_accumulation_and_bf16_with_a_pattern_of_what_is_trained(samples, tmp_path):
    before = load().model.state_dict()
    for parts in (1, 4):
        cfg = replace(CFG, epochs=0.5, precision="bf16", accumulate=parts, trainable=r"logit_.*|visual\..*")
        after = run(samples, tmp_path / f"{parts}", cfg)
        moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
        assert moved == {"visual", "logit_scale", "logit_bias"}, "no cast was cached without its graph"
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "4"), rel=0.05)


def test_parts_keep_less(samples):
    "Bytes that autograd holds for the backward pass after a step's losses, in the end or in between"
    towers = load()
    method = c2lip(towers)
    batch = method.view([samples[i] for i in range(24)], 0)

    def held(parts):
        bytes_held = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (bytes_held.append(t.nbytes), t)[1], lambda t: t)
        with hooks:
            losses = Step(towers, method, parts)(batch)
        again = []
        usual = method.objective.encode

        def counted(model, part):
            again.append(part.rows)
            return usual(model, part)

        method.objective.encode = counted
        losses["total"].backward()
        method.objective.encode = usual
        return sum(bytes_held), again

    whole, again = held(1)
    assert again == []
    least, again = held(6)
    assert least < whole / 6 and again == [4] * 6, "each part is encoded once more, alone"


def test_alpha_ends_a_run_on_the_way_back(samples, tmp_path):
    "The same training, ended at a share of the way from the first weights"
    first = load().model.state_dict()
    last = run(samples, tmp_path / "whole")
    quarter = run(samples, tmp_path / "part", replace(CFG, alpha=0.25))
    for name, weight in quarter.items():
        average = 0.75 * first[name].double() + 0.25 * last[name].double()
        assert torch.allclose(weight.double(), average, atol=1e-6)
    assert not torch.equal(quarter["logit_bias"], last["logit_bias"])


@pytest.mark.parametrize("validation", ["auto", "folder"])
def test_own_images_or_a_folder_validate_a_run(tmp_path, validation):
    data = tmp_path / "data"
    data.mkdir()
    for i, (_, image, caption) in enumerate(train_records(60)):
        image().save(data / f"{i}.png")
        (data / f"{i}.txt").write_text(caption)
    if validation == "folder":
        validation = str(benchmark_folder("world", "validation", items=8, images=24))

    settings = dict(method="plain", data=str(data), epochs=1, batch_size=16, warmup=1, lr=1e-3, log_every=1)
    settings |= dict(evaluate_every=1, hold_back=0.3, device="cpu", threads=1, validation=validation)
    train(settings, tmp_path / "run")
    measured = "R@1" if validation == "auto" else "zero-shot"
    assert f"validation/{measured}" in read_log(tmp_path / "run")[0]


def test_two_runs_do_not_write_into_one_folder(samples, tmp_path, monkeypatch):
    monkeypatch.setattr("c2lip.lab.training.checkpoint.sole_writer", partial(sole_writer, patience=0.5))
    code = """import filelock, sys, time
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)"""
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        with pytest.raises(UserError, match="another process writes to"):
            run(samples, tmp_path)
    finally:
        other.kill()
        other.wait()
    run(samples, tmp_path)


def test_a_look_at_the_gradients(samples):
    "The same in parts; the weighted terms add up to the total, as their norms and cosines say"
    towers = load()
    method = c2lip(towers, lambda_npc=1.0, lambda_xac=0.01)
    batch = method.view([samples[i] for i in range(24)], 0)
    look, parts = (look_at_gradients(Step(towers, method, count)(batch), towers.model) for count in (1, 4))
    assert parts == pytest.approx(look, abs=1e-3)

    weights = {name: weight for name, weight in method.objective.weights.items() if weight}
    terms = {name: weight * look[f"gradient/text/{name}"] for name, weight in weights.items()}
    square = sum(norm**2 for norm in terms.values())
    for first, second in combinations(terms, 2):
        square += 2 * terms[first] * terms[second] * look[f"cosine/text/{first}-{second}"]
    assert math.sqrt(square) == pytest.approx(look["gradient/text/total"], rel=1e-4)


def test_how_strongly_each_term_pulls():
    "At the base, 64 images, phrases pooled as in the paper; with weights in bf16 most updates at lr 1e-5 are lost"
    towers = load()
    method = c2lip(towers, lambda_npc=1.0, lambda_xac=0.01, concepts="pool", duplicates="separate", xac_scale=1.0)
    drawn = Samples(train_records(64), towers.preprocess, cache=True)
    look = look_at_gradients(Step(towers, method)(method.view([drawn[i] for i in range(64)], 0)), towers.model)
    terms = ("contrastive", "npc", "xac")
    norms = {tower: [look[f"gradient/{tower}/{name}"] for name in terms] for tower in ("text", "image")}
    assert norms["text"] == pytest.approx([3.6, 17.6, 30.1], abs=0.1)
    assert norms["image"] == pytest.approx([3.3, 16.7, 13.6], abs=0.1)

    moved = []
    for change in (lambda towers: None, halve_weights):
        towers = load()
        change(towers)
        method = c2lip(towers)
        before = {name: weight.detach().clone() for name, weight in towers.model.named_parameters()}
        optimizer = make_optimizer(towers, method, Config(lr=1e-5))
        train_step(Step(towers, method), optimizer, method.view([drawn[i] for i in range(16)], 0), 1)
        moved.append(sum((weight != before[name]).sum() for name, weight in towers.model.named_parameters()))
    assert moved[1] < 0.5 * moved[0]
