"""Killed with SIGKILL at any moment and started again with the same settings, a run is bit-identical."""

import hashlib
import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks

from c2lip.lab.training import fit as fit_room
from c2lip.lab.training import run as run_room
from c2lip.lab.training.log import Files, read_log
from c2lip.lab.training.run import train

SETTINGS = dict(method="c2lip", images=24, batches="random", batch_size=8, epochs=2, warmup=2, lr=1e-3, alpha=0.5)
SETTINGS |= dict(duplicates="merge", crop_scale=0.8, save_every=2, log_every=1, threads=1, device="cpu", resume=True)
TOTAL = 6  # steps
# Where a run dies, at or after a step, before it is started again: (rank, place, step), by ranks and workers
KILLS = {
    1: {0: [(0, "logging", 2), (0, "writing", 2), (0, "moving", 4), (0, "release", 6)]},
    2: {2: [(1, "gradient", 2), (0, "written", 3), (1, "time", 5)]},
}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def arm(place, step):
    "Let this process kill itself at `place`, at or after step `step`"
    now = {"step": 0}

    def wrap(owner, name, before):
        usual = getattr(owner, name)
        setattr(owner, name, lambda *a, **k: (before(*a, **k), usual(*a, **k))[1])

    def strike(*a, **k):
        if now["step"] >= step:
            die()

    def stepping(module, optimizer, batch, number, *a):
        now["step"] = number
        if place == "step":
            strike()

    wrap(fit_room, "train_step", stepping)
    if place == "gradient":
        wrap(torch.nn.utils, "get_total_norm", strike)  # gradients are complete
    if place == "logging":
        wrap(Files, "record", strike)
    if place == "moving":
        # the old one has been moved away
        wrap(Path, "replace", lambda self, to: strike() if str(to).endswith("checkpoint.pt") else None)
    if place == "release":
        wrap(run_room, "save", lambda *a, **k: die())
    if place == "writing":
        wrap(torch, "save", lambda state, path: (Path(path).write_bytes(b"half a file"), strike()))
    if place == "written":
        wrap(os, "fsync", strike)  # the file is there, under its temporary name
    if place == "time":
        threading.Timer(0.3 + 0.08 * step, die).start()


def one_rank(rank, folder):
    ranks, attempt, workers, strike = json.loads(Path(f"{folder}.json").read_text())
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}.meet{attempt}", rank=rank, world_size=ranks)
    if strike and strike[0] == rank:
        arm(*strike[1:])
    train({**SETTINGS, "workers": workers, "gpus": ranks}, folder)


def start(folder, ranks, *how):
    "Run to the end or to the first death, which ends all ranks; their exit codes"
    Path(f"{folder}.json").write_text(json.dumps([ranks, *how]))
    return on_ranks(one_rank, folder, ranks)


def result(folder):
    "What a finished run is: the released weights, and what was logged of each step"
    rows = [(r["step"], r["total"], r["grad_norm"]) for r in read_log(folder)]
    return hashlib.sha256((folder / "model" / "open_clip_model.safetensors").read_bytes()).hexdigest(), rows


def killed_run(folder, ranks, workers, strikes):
    "Kill the run at each strike, let it end, and give its result and where it was killed"
    folder.mkdir()
    deaths = []
    for attempt, strike in enumerate(strikes):
        codes = start(folder, ranks, attempt, workers, strike)
        if codes[strike[0]] == -signal.SIGKILL:
            deaths.append(strike)
        else:  # it was done before the time came: back to the checkpoint before
            assert not any(codes), f"{strike}: exit codes {codes}"
            (folder / "model" / "open_clip_model.safetensors").unlink()
            (folder / "checkpoint.pt").unlink()

    assert start(folder, ranks, len(strikes), workers, None) == [0] * ranks

    return result(folder), deaths


@pytest.mark.parametrize("ranks", KILLS)
def test_killed_runs_end_in_the_same_bits(ranks, tmp_path):
    "The straight run has no workers"
    (tmp_path / "straight").mkdir()
    assert start(tmp_path / "straight", ranks, 0, 0, None) == [0] * ranks
    want = result(tmp_path / "straight")
    assert [s for s, *_ in want[1]] == list(range(1, TOTAL + 1))
    for workers, strikes in KILLS[ranks].items():
        got, deaths = killed_run(tmp_path / f"killed{workers}", ranks, workers, strikes)
        assert got == want, f"{workers} workers, killed at {deaths}: other weights or losses"
        assert len(deaths) >= len(strikes) - 1, deaths
