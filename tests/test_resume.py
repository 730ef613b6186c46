"""Killed with SIGKILL at any moment and started again with the same settings, a run is bit-identical.

One process, forked from one that has imported the library (conftest), forks every run."""

import gc
import hashlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
from multiprocessing.connection import wait
from pathlib import Path

import tensorboard.summary.writer.record_writer  # noqa: F401 (once, for every fork)
import torch

from c2lip.concepts import noun_phrases
from c2lip.towers import load
from c2lip.training import checkpoint as checkpoint_room
from c2lip.training import fit as fit_room
from c2lip.training import run as run_room
from c2lip.training.log import Log, read_log
from c2lip.training.run import train

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
        wrap(Log, "record", strike)
    if place == "moving":
        # the old one has been moved away
        wrap(Path, "replace", lambda self, to: strike() if self.name == "checkpoint.tmp" else None)
    if place == "release":
        wrap(run_room, "save", lambda *a, **k: die())
    if place == "writing":
        wrap(torch, "save", lambda state, path: (Path(path).write_bytes(b"half a file"), strike()))
    if place == "written":
        wrap(checkpoint_room, "_digest", strike)  # the file is there without its digest
    if place == "time":
        threading.Timer(0.3 + 0.08 * step, die).start()


def one_rank(rank, ranks, folder, attempt, workers, strike):
    import torch.distributed as dist

    log = open(Path(folder) / f"rank{rank}.txt", "a")  # noqa: SIM115 (as long as the process)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet{attempt}", rank=rank, world_size=ranks)
    if strike and strike[0] == rank:
        arm(*strike[1:])
    train({**SETTINGS, "workers": workers, "gpus": ranks}, folder)


def start(ranks, folder, attempt, workers, strike=None):
    "Run to the end or to the first death, which ends all ranks; their exit codes"
    fork = multiprocessing.get_context("fork")
    jobs = [fork.Process(target=one_rank, args=(r, ranks, str(folder), attempt, workers, strike)) for r in range(ranks)]
    for j in jobs:
        j.start()
    left = set(jobs)
    while left:
        for sentinel in wait([j.sentinel for j in left], timeout=120):
            left -= {j for j in left if j.sentinel == sentinel}
        if any(j.exitcode for j in jobs):
            for j in left:
                j.kill()
    for j in jobs:
        j.join()
    return [j.exitcode for j in jobs]


def result(folder):
    "What a finished run is: the released weights, and what was logged of each step"
    rows = [(r["step"], r["total"], r["grad_norm"]) for r in read_log(folder)]
    return hashlib.sha256((folder / "model" / "open_clip_model.safetensors").read_bytes()).hexdigest(), rows


def killed_run(folder, ranks, workers, strikes):
    "Kill the run at each strike, let it end, and give its result and where it was killed"
    folder.mkdir()
    deaths = []
    for attempt, strike in enumerate(strikes):
        codes = start(ranks, folder, attempt, workers, strike)
        if codes[strike[0]] == -signal.SIGKILL:
            deaths.append(strike)
        elif not any(codes):  # it was done before the time came: back to the checkpoint before
            (folder / "model" / "open_clip_model.safetensors").unlink()
            (folder / "checkpoint.pt").unlink()
        else:
            raise AssertionError(f"{strike}: exit codes {codes}\n" + (folder / "rank0.txt").read_text()[-3000:])
    assert not any(start(ranks, folder, len(strikes), workers)), (folder / "rank0.txt").read_text()[-3000:]
    return result(folder), deaths


def main(ranks):
    "Kill runs of so many ranks; the straight run has no workers"
    torch.set_num_threads(1)
    load("base")
    noun_phrases("a red mug")
    gc.freeze()  # the collector of a fork would touch, and so copy, all that it shares
    total = 0
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp, "straight")
        folder.mkdir()
        assert not any(start(ranks, folder, 0, 0)), (folder / "rank0.txt").read_text()[-3000:]
        want = result(folder)
        assert [s for s, *_ in want[1]] == list(range(1, TOTAL + 1))
        for workers, strikes in KILLS[ranks].items():
            got, deaths = killed_run(Path(tmp, f"killed{workers}"), ranks, workers, strikes)
            assert got == want, f"{ranks} ranks, {workers} workers, killed at {deaths}: other weights or losses"
            total += len(deaths)
    print("kills:", total)
    gc.unfreeze()  # or libraries complain of leaks as this process ends


def one_and_two(log):
    multiprocessing.set_start_method(None, force=True)  # the platform's own, not that of this process
    sys.stdout = sys.stderr = open(log, "w")  # noqa: SIM115 (as long as the process)
    main(1)
    main(2)
    sys.stdout.flush()


def test_killed_runs_end_in_the_same_bits(tmp_path):
    process = multiprocessing.get_context("forkserver").Process(target=one_and_two, args=(tmp_path / "log",))
    process.start()
    process.join(500)
    process.kill()
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 0 and sum(map(int, re.findall("kills: (.*)", said))) >= 6, said[-4000:]
