"""Runs that stop, go on, freeze, split over processes or meet a NaN end as they should."""

import math
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from c2lip.core import UserError, seed_everything
from c2lip.core.files import sole_writer
from c2lip.data.loading import Samples
from c2lip.evaluation.suites import benchmark_folder
from c2lip.methods import Step, plain
from c2lip.methods.c2lip import c2lip
from c2lip.towers import load
from c2lip.training import fit as fit_room
from c2lip.training.checkpoint import load_checkpoint
from c2lip.training.config import Config
from c2lip.training.log import plot_log, read_log
from c2lip.training.run import train
from c2lip.training.step import make_optimizer, train_step
from c2lip.world_captions import train_records

CFG = Config(epochs=2, batch_size=8, warmup=2, log_every=1, save_every=3, lr=1e-3, batches="random")


@pytest.fixture(scope="module")
def samples():
    return Samples(train_records(48), load().preprocess, cache=True)


def run(samples, folder, cfg=CFG, make=c2lip, stop_at=None):
    "Train a fresh base; `stop_at` ends the run the hard way after so many steps"
    folder.mkdir(exist_ok=True)
    seed_everything(0)
    towers = load()
    method = make(towers)
    if stop_at:
        view, method.view = method.view, None

        def stopping(batch, step):
            if step > stop_at:
                raise KeyboardInterrupt
            return view(batch, step)

        method.view = stopping
    with suppress(KeyboardInterrupt):
        fit_room.fit(towers, method, samples, cfg, folder)
    return towers.model.state_dict()


def equal(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("stop_at", [1, 11])
def test_a_stopped_run_goes_on_bit_equal(samples, tmp_path, stop_at):
    want = run(samples, tmp_path / "straight")
    run(samples, tmp_path / "stopped", stop_at=stop_at)
    got = run(samples, tmp_path / "stopped", replace(CFG, resume=True))
    assert equal(want, got)
    rows = [[(r["step"], r["total"]) for r in read_log(tmp_path / name)] for name in ("straight", "stopped")]
    assert rows[0] == rows[1], "the log has every step once"


def test_a_stopped_run_on_neighbours_goes_on_bit_equal(samples, tmp_path):
    "With its table of neighbours or without it; with another table it is refused"
    cfg = replace(CFG, batches="neighbours")
    want = run(samples, tmp_path / "straight", cfg)
    assert not equal(want, run(samples, tmp_path / "random"))
    table = tmp_path / "stopped" / "neighbours.npy"
    run(samples, tmp_path / "stopped", cfg, stop_at=8)
    kept = np.load(table)
    np.save(table, kept[:, ::-1])
    with pytest.raises(UserError, match="neighbours"):
        run(samples, tmp_path / "stopped", replace(cfg, resume=True))
    table.unlink()
    assert equal(want, run(samples, tmp_path / "stopped", replace(cfg, resume=True)))
    assert (np.load(table) == kept).all()


def test_a_damaged_checkpoint_falls_back_to_the_one_before(samples, tmp_path, capsys):
    want = run(samples, tmp_path / "straight")
    run(samples, tmp_path / "stopped", stop_at=8)  # checkpoints of steps 3 and 6
    path = tmp_path / "stopped" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:5000])
    assert equal(want, run(samples, tmp_path / "stopped", replace(CFG, resume=True)))
    assert "damaged" in capsys.readouterr().out


def test_weights_of_zero_are_plain_fine_tuning_bit_for_bit(samples, tmp_path):
    assert equal(
        run(samples, tmp_path / "zero", make=lambda t: c2lip(t, 0, 0)), run(samples, tmp_path / "plain", make=plain)
    )


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
    assert state["step"] == 4 and all(v.isfinite().all() for v in state["model"].values())


def test_a_checkpoint_with_code_in_it_is_refused(samples, tmp_path):
    import pickle

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "gone"), "w"))

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").write_bytes(pickle.dumps({"step": Evil()}))
    towers = load()
    method = c2lip(towers)
    with pytest.raises(UserError, match="checkpoint.pt is damaged"):
        load_checkpoint(tmp_path / "run", towers, method, torch.optim.AdamW(towers.model.parameters()))
    assert not (tmp_path / "gone").exists()


def test_two_processes_train_what_one_does(tmp_path):
    settings = dict(
        method="c2lip",
        images=32,
        epochs=1,
        batch_size=8,
        warmup=2,
        log_every=1,
        lr=1e-4,
        duplicates="merge",
        device="cpu",
        threads=1,
    )
    weights = {}
    for gpus in (1, 2):
        (tmp_path / f"{gpus}").mkdir()
        weights[gpus] = train({**settings, "gpus": gpus}, tmp_path / f"{gpus}").model.state_dict()
    losses = [[r["total"] for r in read_log(tmp_path / f"{g}")] for g in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    start = load().model.state_dict()
    for k, w in weights[1].items():
        assert (w - weights[2][k]).norm() <= 0.05 * (w - start[k]).norm() + 1e-6, k


def test_two_processes_find_the_neighbours_that_one_does(tmp_path):
    settings = dict(method="plain", images=32, epochs=1, batch_size=8, lr=1e-4, device="cpu", threads=1)
    for gpus in (1, 2):
        (tmp_path / f"{gpus}").mkdir()
        train({**settings, "batches": "neighbours", "gpus": gpus}, tmp_path / f"{gpus}")
        assert not list((tmp_path / f"{gpus}").glob("embeddings*"))
    one, two = (np.load(tmp_path / name / "neighbours.npy") for name in "12")
    assert one.shape == (32, 3) and (one == two).all()


def test_a_rank_that_fails_is_named(tmp_path):
    with pytest.raises(UserError, match="no model"):
        train(dict(model="ViT-B-61", gpus=2, images=32, device="cpu"), tmp_path)


# Accumulation


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
        again, usual = [], method.objective.encode

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


def test_accumulation_under_bf16_and_with_a_batch_that_cannot_be_cut(samples, tmp_path):
    rows = {}
    for k in (1, 4):
        end = run(samples, tmp_path / f"{k}", replace(CFG, precision="bf16", accumulate=k))
        rows[k] = read_log(tmp_path / f"{k}")
        assert any(
            not torch.equal(v, load().model.state_dict()[n]) for n, v in end.items() if n.startswith("visual")
        ), "weights move: no cast was cached without its graph"
    assert [r["total"] for r in rows[1]] == pytest.approx([r["total"] for r in rows[4]], rel=0.05)
    assert [r["grad_norm"] for r in rows[1]] == pytest.approx([r["grad_norm"] for r in rows[4]], rel=0.2)
    with pytest.raises(UserError, match="not a multiple of 1 processes × accumulate 3"):
        run(samples, tmp_path / "no", replace(CFG, accumulate=3))


def test_what_is_no_number_is_caught_in_parts_too(samples):
    towers = load()
    method = c2lip(towers)
    before = {k: v.clone() for k, v in towers.model.state_dict().items()}
    batch = method.view([samples[i] for i in range(8)], 3)
    batch.images["image"][5] *= math.nan
    with pytest.raises(UserError, match="step 3: the contrastive loss is nan"):
        train_step(Step(towers, method, parts=4), make_optimizer(towers, method, CFG), batch, 3)
    assert equal(before, towers.model.state_dict())


# Towers, averages, patterns


def test_compiled_towers_train_alike(samples, tmp_path, monkeypatch):
    usual, calls = torch.nn.Module.compile, []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self: (calls.append(1), usual(self, backend="eager"))[1]
    )  # the path, without minutes of C++
    want, got = run(samples, tmp_path / "a"), run(samples, tmp_path / "b", replace(CFG, compiled=True))
    assert len(calls) == 9 and want.keys() == got.keys()
    for k in want:
        same = (want[k] - got[k]).abs() <= 1e-5 + 1e-5 * got[k].abs()
        if k.endswith(("qkv.bias", "in_proj_bias", ".kv.bias")):
            # a bias of all keys changes no attention: its gradient is rounding, which Adam makes steps of
            same[slice(0, 64) if k.endswith(".kv.bias") else slice(64, 128)] = True
        assert same.all(), k


def test_alpha_ends_a_run_on_the_way_back(samples, tmp_path):
    "The same training, ended at a share of the way from the first weights; stopped and resumed, the same bits"
    whole = run(samples, tmp_path / "whole")
    part = run(samples, tmp_path / "part", replace(CFG, alpha=0.25))
    first = load().model.state_dict()
    for name, value in part.items():
        assert torch.allclose(value.double(), 0.75 * first[name].double() + 0.25 * whole[name].double(), atol=1e-6)
    assert not torch.equal(part["logit_bias"], whole["logit_bias"])
    run(samples, tmp_path / "stopped", replace(CFG, alpha=0.25), stop_at=7)
    again = run(samples, tmp_path / "stopped", replace(CFG, alpha=0.25, resume=True))
    assert equal(part, again)


def test_the_pattern_of_what_is_trained(samples, tmp_path):
    before, after = (
        load().model.state_dict(),
        run(samples, tmp_path / "run", replace(CFG, trainable=r"logit_.*|visual\..*")),
    )
    moved = {k.split(".")[0] for k in before if not torch.equal(before[k], after[k])}
    assert moved == {"visual", "logit_scale", "logit_bias"}
    for pattern, said in (("vision.*", "matches no parameter"), ("(visual", "no regular expression")):
        with pytest.raises(UserError, match=said):
            run(samples, tmp_path / "none", replace(CFG, trainable=pattern))


# Looking at validation


def test_looking_at_validation_changes_nothing(tmp_path):
    settings = dict(
        method="c2lip",
        images=32,
        epochs=1,
        batch_size=8,
        warmup=2,
        lr=1e-3,
        log_every=1,
        device="cpu",
        threads=1,
        items=8,
        bench_images=24,
    )
    for name, more in (("without", {}), ("with", dict(evaluate_every=2, alarm=0.0))):
        (tmp_path / name).mkdir()
        train({**settings, **more}, tmp_path / name)
    weights = [(tmp_path / n / "model" / "open_clip_model.safetensors").read_bytes() for n in ("without", "with")]
    assert weights[0] == weights[1]
    looks = [r for r in read_log(tmp_path / "with") if "validation/zero-shot" in r]
    assert [r["step"] for r in looks] == [0, 2, 4] and {
        "validation/sugarcrepe average",
        "validation/retrieval i2t R@1",
    } <= looks[0].keys()
    assert plot_log(tmp_path / "with") is not None


def test_own_images_and_a_folder_are_looked_at_and_an_alarm_is_printed(tmp_path, capsys, monkeypatch):
    home = benchmark_folder("world", "validation", items=8, images=24)
    (data := tmp_path / "data").mkdir()
    for i, (_, image, caption) in enumerate(train_records(60)):
        image().save(data / f"{i}.png")
        (data / f"{i}.txt").write_text(caption)
    settings = dict(
        method="plain",
        data=str(data),
        epochs=1,
        batch_size=16,
        warmup=1,
        lr=1e-3,
        log_every=1,
        evaluate_every=1,
        hold_back=0.3,
        device="cpu",
        threads=1,
    )
    for name, validation in (("own", "auto"), ("folder", str(home))):
        (tmp_path / name).mkdir()
        train({**settings, "validation": validation}, tmp_path / name)
        look = read_log(tmp_path / name)[0]
        assert "validation/zero-shot" in look and ("validation/sugarcrepe average" in look) == (name == "folder")
    falling = iter(range(100, 0, -3))
    monkeypatch.setattr("c2lip.training.fit._summary", lambda table: {"zero-shot": float(next(falling))})
    (tmp_path / "alarm").mkdir()
    train({**settings, "epochs": 2}, tmp_path / "alarm")
    assert "ALARM: zero-shot has fallen 6.0 points" in capsys.readouterr().out


# Checkpoints


def test_chance_is_the_steps_own(samples, tmp_path):
    "Noise in a view: stopped and resumed in the same bits, and the caller's generator is left alone"

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
    assert not equal(want, run(samples, tmp_path / "plain"))
    run(samples, tmp_path / "stopped", stop_at=7, make=noisy)
    torch.manual_seed(99)
    assert equal(want, run(samples, tmp_path / "stopped", replace(CFG, resume=True), make=noisy))


def test_a_full_disk_stops_the_run_with_the_last_checkpoint_whole(samples, tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    usual, calls = fit_room.save_checkpoint, []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(*a):
        calls.append(1)
        if len(calls) > 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # as if the disk had no more room
        usual(*a)

    monkeypatch.setattr(fit_room, "save_checkpoint", save)
    try:
        with pytest.raises(
            UserError, match="step 6: the checkpoint cannot be written .*goes on from its last checkpoint"
        ):
            run(samples, tmp_path / "run")
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 3
    assert not (tmp_path / "run" / "checkpoint.tmp").exists()
    assert equal(run(samples, tmp_path / "straight"), run(samples, tmp_path / "run", replace(CFG, resume=True)))


def test_two_runs_do_not_write_into_one_folder(samples, tmp_path, monkeypatch):
    monkeypatch.setattr("c2lip.training.fit.sole_writer", partial(sole_writer, patience=0.5))
    code = """import filelock, sys, time
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)"""
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lock")], stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        with pytest.raises(UserError, match="another process is training in"):
            run(samples, tmp_path)
    finally:
        other.kill()
        other.wait()
    run(samples, tmp_path)


def test_a_line_of_the_log_says_all(samples, tmp_path, capsys):
    run(samples, tmp_path / "run")
    line = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("12/12"))
    for part in ("left", "contrastive", "npc", "xac", "total", "∇", "τ", "b ", "img/s", "data ", "GB"):
        assert part in line, (part, line)
    assert re.search(r"12/12 █+", line)
