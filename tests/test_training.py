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
import torch.distributed as dist
from conftest import on_ranks

from c2lip.core import Batch, Texts, UserError, seed_everything
from c2lip.core.files import sole_writer
from c2lip.data.loading import Samples
from c2lip.distributed import average_gradients
from c2lip.evaluation.folders import benchmark_folder
from c2lip.methods.c2lip import c2lip
from c2lip.methods.finetune import clip, siglip
from c2lip.release.run import train
from c2lip.towers import load
from c2lip.training import fit as fit_room
from c2lip.training.checkpoint import intact, load_checkpoint
from c2lip.training.config import Config
from c2lip.training.log import plot_log, read_log
from c2lip.training.step import backward, backward_in_parts, cut, parameter_groups, train_step
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


@pytest.mark.parametrize("lost", [False, True], ids=["table kept", "table lost"])
def test_a_stopped_run_on_neighbours_goes_on_bit_equal(samples, tmp_path, lost):
    cfg = replace(CFG, batches="neighbours")
    want = run(samples, tmp_path / "straight", cfg)
    run(samples, tmp_path / "stopped", cfg, stop_at=8)
    table = tmp_path / "stopped" / "neighbours.npy"
    kept = table.read_bytes()
    if lost:
        table.unlink()
    assert equal(want, run(samples, tmp_path / "stopped", replace(cfg, resume=True)))
    assert table.read_bytes() == kept
    assert not equal(want, run(samples, tmp_path / "random"))


def test_a_checkpoint_of_other_neighbours_is_refused(samples, tmp_path):
    cfg = replace(CFG, batches="neighbours")
    run(samples, tmp_path, cfg, stop_at=8)
    table = np.load(tmp_path / "neighbours.npy")
    np.save(tmp_path / "neighbours.npy", table[:, ::-1])
    with pytest.raises(UserError, match="neighbours"):
        run(samples, tmp_path, replace(cfg, resume=True))


def test_a_damaged_checkpoint_falls_back_to_the_one_before(samples, tmp_path, capsys):
    want = run(samples, tmp_path / "straight")
    run(samples, tmp_path / "stopped", stop_at=8)  # checkpoints of steps 3 and 6
    path = tmp_path / "stopped" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:5000])
    assert equal(want, run(samples, tmp_path / "stopped", replace(CFG, resume=True)))
    assert "damaged" in capsys.readouterr().out


def test_weights_of_zero_are_plain_fine_tuning_bit_for_bit(samples, tmp_path):
    assert equal(
        run(samples, tmp_path / "zero", make=lambda t: c2lip(t, 0, 0)), run(samples, tmp_path / "plain", make=siglip)
    )


def test_what_the_pattern_leaves_out_does_not_move(samples, tmp_path):
    def text_only(towers):
        method = c2lip(towers)
        method.trainable = r"text\..*"
        return method

    before, after = load().model.state_dict(), run(samples, tmp_path / "run", make=text_only)
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    assert moved and all(k.startswith("text.") for k in moved)
    with pytest.raises(UserError, match="matches no parameter"):

        def nothing(towers):
            method = c2lip(towers)
            method.trainable = "texts.*"
            return method

        run(samples, tmp_path / "run2", make=nothing)


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
    settings = dict(method="finetune", images=32, epochs=1, batch_size=8, lr=1e-4, device="cpu", threads=1)
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

WAYS = [(c2lip, dict(concepts=c, duplicates=d)) for c in ("pool", "encode") for d in ("separate", "mask", "merge")] + [
    (siglip, {}),
    (clip, {}),
]


def gradients(rank, ranks, parts):
    "For each way, this rank's gradients after averaging, in float64, and the losses"
    towers = load()
    towers.model.double()
    images = Samples(train_records(8), towers.preprocess, cache=True)
    own = [replace(images[i], image=images[i].image.double()) for i in range(8)][
        rank * 8 // ranks : (rank + 1) * 8 // ranks
    ]
    own[0].phrases = []  # an image may have none
    for make, options in WAYS:
        towers.model.zero_grad()
        method = make(towers, **options)
        exchange = average_gradients(towers.model.parameters(), most=2**18)
        if parts == 1:
            losses = backward(towers, method, own, 0, "cpu", exchange=exchange)
        else:
            losses = backward_in_parts(towers, method, own, 0, "cpu", parts=parts, exchange=exchange)
        named = [
            (n, p) for n, p in towers.model.named_parameters() if not n.endswith("pos_embed")
        ]  # timm resizes it in float32
        yield {k: v.detach() for k, v in losses.items()}, {n: p.grad.clone() for n, p in named if p.grad is not None}


def on_two_ranks(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = [list(gradients(rank, 2, parts)) for parts in (1, 3)]
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


def assert_same(want, got):
    for (make, options), (want_losses, want_grads), (got_losses, got_grads) in zip(WAYS, want, got, strict=True):
        for k in want_losses:
            assert torch.allclose(want_losses[k], got_losses[k], rtol=1e-12), (make, options, k)
        assert want_grads.keys() >= got_grads.keys()
        for k, w in want_grads.items():
            error = (w - got_grads[k]).norm() if k in got_grads else w.norm()
            assert error <= 1e-12 * max(1.0, w.norm()), (make, options, k, error)


@pytest.mark.parametrize("parts", [5])
def test_parts_give_the_whole_batchs_gradients(parts):
    assert_same(list(gradients(0, 1, 1)), list(gradients(0, 1, parts)))


def test_parts_on_two_ranks_too(tmp_path):
    on_ranks(on_two_ranks, tmp_path, 2)
    assert_same(*torch.load(tmp_path / "found.pt", weights_only=True))


def test_a_batch_is_cut_with_all_that_belongs_to_its_rows():
    spans = torch.tensor([[4, 1, 2], [0, 3, 5], [5, 0, 1], [2, 2, 3]])
    batch = Batch(
        {"image": torch.arange(6.0)},
        {
            "phrase": Texts(spans=spans, of="caption"),
            "caption": Texts(torch.arange(6), mask=torch.arange(6)),
            "negative": Texts(torch.arange(3), owner=torch.tensor([5, 0, 1])),
        },
        masks={"image": torch.arange(6)},
    )
    (a, ra), (b, rb) = cut(batch, 2)
    assert a.texts["caption"].ids.tolist() == [0, 1, 2] and b.texts["caption"].mask.tolist() == [3, 4, 5]
    assert b.texts["negative"].ids.tolist() == [1, 2] and b.masks["image"].tolist() == [3, 4, 5]
    assert a.texts["phrase"].spans.tolist() == [[0, 3, 5], [2, 2, 3]] and ra["phrase"].tolist() == [1, 3]
    assert b.texts["phrase"].spans.tolist() == [[1, 1, 2], [2, 0, 1]] and rb["phrase"].tolist() == [0, 2]


def test_parts_keep_less(samples):
    "Bytes that autograd holds at once for the backward pass"
    towers = load()
    method = c2lip(towers)
    part = [samples[i] for i in range(24)]

    def held(run):
        now, most = [0], [0]

        def pack(t):
            now[0] += t.nbytes
            most[0] = max(most[0], now[0])
            return t

        usual = torch.autograd.backward

        def counted(*a, **k):
            usual(*a, **k)
            now[0] = 0

        torch.autograd.backward = counted
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                run()
        finally:
            torch.autograd.backward = usual
        return most[0]

    whole = held(lambda: backward(towers, method, part, 0, "cpu"))
    assert held(lambda: backward_in_parts(towers, method, part, 0, "cpu", parts=6)) < whole / 3


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
    part = [samples[i] for i in range(8)]
    part[5] = replace(part[5], image=part[5].image * math.nan)
    optimizer = torch.optim.AdamW(parameter_groups(towers, method, CFG))
    with pytest.raises(UserError, match="step 3: the contrastive loss is nan"):
        train_step(towers, method, optimizer, part, 3, "cpu", accumulate=4)
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


def test_l2_sp_draws_every_weight_towards_the_first(samples, tmp_path):
    "All the way back after each step: nothing moves; a part of it: less moves; stopped and resumed, the same bits"
    first = load().model.state_dict()

    def distance(weights):
        return sum((weights[k].double() - first[k].double()).square().sum().item() for k in first) ** 0.5

    free = run(samples, tmp_path / "free")
    drawn = run(samples, tmp_path / "drawn", replace(CFG, l2_sp=100.0))
    held = run(samples, tmp_path / "held", replace(CFG, l2_sp=1e4, warmup=0, epochs=0.01))
    assert distance(held) == 0 < distance(drawn) < 0.9 * distance(free)
    run(samples, tmp_path / "stopped", replace(CFG, l2_sp=100.0), stop_at=7)
    again = run(samples, tmp_path / "stopped", replace(CFG, l2_sp=100.0, resume=True))
    assert equal(drawn, again)


def test_averaged_weights_are_released_and_resumed(samples, tmp_path):
    seen = []

    def follow(towers):
        method = c2lip(towers)
        view = method.view

        def noting(batch, step):
            seen.append(towers.model.logit_bias.item())
            return view(batch, step)

        method.view = noting
        return method

    cfg = replace(CFG, ema=0.6)
    want = run(samples, tmp_path / "straight", cfg, follow)
    bias = [
        *seen[1:],
        torch.load(tmp_path / "straight" / "checkpoint.pt", weights_only=True)["model"]["logit_bias"].item(),
    ]  # after each step
    average = bias[0]
    for b in bias[1:]:
        average = 0.6 * average + 0.4 * b
    assert want["logit_bias"].item() == pytest.approx(average, rel=1e-6) and average != bias[-1]
    run(samples, tmp_path / "stopped", cfg, stop_at=7)
    assert equal(want, run(samples, tmp_path / "stopped", replace(cfg, resume=True)))


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


def test_own_images_and_a_folder_are_looked_at_and_an_alarm_stops_the_run(tmp_path, capsys, monkeypatch):
    home = benchmark_folder("world", "validation", items=8, images=24)
    (data := tmp_path / "data").mkdir()
    for i, (_, image, caption) in enumerate(train_records(60)):
        image().save(data / f"{i}.png")
        (data / f"{i}.txt").write_text(caption)
    settings = dict(
        method="siglip",
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
    monkeypatch.setattr("c2lip.training.validation.summary", lambda table: {"zero-shot": float(next(falling))})
    (tmp_path / "alarm").mkdir()
    with pytest.raises(
        UserError, match="step 2: zero-shot has fallen more than 5 points; the run stopped, and .*weights of step 2"
    ):
        train({**settings, "epochs": 2, "stop_on_alarm": True}, tmp_path / "alarm")
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
            UserError, match="step 6: the checkpoint cannot be written .*goes on from its last checkpoint .step 3"
        ):
            run(samples, tmp_path / "run")
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (
        intact(tmp_path / "run" / "checkpoint.pt")
        and torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 3
    )
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
    for part in ("steps/s", "left", "contrastive", "npc", "xac", "total", "∇", "τ", "b ", "img/s", "data ", "GB"):
        assert part in line, (part, line)
    assert re.search(r"12/12 █+", line)
