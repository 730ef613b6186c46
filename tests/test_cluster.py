"""Several processes or machines train what one does; the end of one is the end of all, with its reason."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, free_port
from writing import write_captioned

from c2lip.core import UserError
from c2lip.core.files import write_json
from c2lip.lab.training import run as run_room
from c2lip.lab.training.config import complete
from c2lip.lab.training.log import read_log
from c2lip.lab.training.ranks import launch_ranks
from c2lip.lab.training.run import train
from c2lip.lab.world.captions import train_records
from c2lip.towers import load

SMALL = dict(method="c2lip", epochs=1, hold_back=0, batch_size=8, warmup=2, log_every=1, lr=1e-4, duplicates="merge")
SMALL |= dict(batches="random", device="cpu", threads=1)
LONG = {**SMALL, "epochs": 1000, "save_every": 10**6}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    "32 images of one's own with a table"
    rows = [(f"{key}.png", image(), dict(caption=caption)) for key, image, caption in train_records(32)]
    return write_captioned(tmp_path_factory.mktemp("own"), rows)


def ranks(folder):
    "Process ids of the ranks that train in `folder`, by rank"

    found = {}
    for p in Path("/proc").glob("[0-9]*"):
        try:
            command = (p / "cmdline").read_bytes()
            env = (p / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        env = dict(x.split(b"=", 1) for x in env if b"=" in x)
        if str(folder).encode() in command and b"RANK" in env and b"torch.distributed.run" not in command:
            found[int(env[b"RANK"])] = int(p.name)
    return found


def write_recipe(folder, settings):
    (folder / "r.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    return folder / "r.yaml"


def wait_for(what, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)


def steps(folder):
    return (folder / "metrics.jsonl").exists() and '"step": 6,' in (folder / "metrics.jsonl").read_text()


def test_a_killed_rank_ends_the_run_and_is_named(own, tmp_path, capfd):
    "In a run that has met a broken image, whose count is that of all ranks"
    (tmp_path / "broken.png").write_bytes(b"no")
    rows = list(map(json.loads, (own / "captions.jsonl").read_text().splitlines()))
    for i, row in enumerate(rows):
        row["image"] = str(own / row["image"]) if i != 9 else "broken.png"
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_dir = tmp_path / "run"
    found = []

    def run():
        try:
            train({**LONG, "data": str(tmp_path / "t.jsonl"), "gpus": 2}, run_dir)
        except UserError as e:
            found.append(str(e))

    job = threading.Thread(target=run)
    job.start()
    wait_for(lambda: steps(run_dir))
    os.kill(ranks(run_dir)[1], signal.SIGKILL)
    job.join(60)
    assert not job.is_alive()
    assert "rank 1 was killed by signal 9" in found[0]
    wait_for(lambda: not ranks(run_dir), 10)
    listed = sum(len((run_dir / name).read_text().splitlines()) for name in ("skipped.jsonl", "skipped-1.jsonl"))
    assert listed in (1, 2) and read_log(run_dir)[-1]["skipped"] == listed, "by the rank that met it, or by both"


def kernel(_, folders):
    train({**LONG, "data": folders.split("|")[0], "gpus": 2}, folders.split("|")[1])


def test_a_killed_kernel_takes_its_ranks_along(own, tmp_path):
    words = [sys.executable, "-m", "rank", "test_cluster", "kernel", "0", f"{own}|{tmp_path}"]
    job = subprocess.Popen(words, cwd=ROOT / "tests")
    wait_for(lambda: steps(tmp_path))
    job.kill()
    wait_for(lambda: not ranks(tmp_path), 20)


BROKEN = """
import os
import time

from c2lip.lab.training import run
from c2lip.lab.training import fit

step = fit.train_step


def broken(*args, **kw):
    if os.environ["RANK"] == "1" and args[3] == 3:
        print(f"raised at {time.time()}\\n", end="", flush=True)  # in one piece: two ranks print
        raise RuntimeError("a GPU fell off the bus")
    return step(*args, **kw)


fit.train_step = broken
run.train_from_terminal()
"""


def test_a_rank_that_raises_ends_the_run_with_its_own_traceback(own, tmp_path, capfd, monkeypatch):
    "While rank 0 is in the middle of an exchange"
    (tmp_path / "broken_run.py").write_text(BROKEN)  # in place of c2lip.lab.training.run
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    write_json(tmp_path / "ranks.json", {**LONG, "data": str(own), "gpus": 2})
    with pytest.raises(UserError, match="rank 1: RuntimeError: a GPU fell off the bus"):
        launch_ranks("broken_run", [tmp_path / "ranks.json", tmp_path / "run"], 2)

    end = time.time()
    out = capfd.readouterr().out
    assert "[rank 1] Traceback (most recent call last):" in out
    assert re.search(r'broken_run.py", line \d+, in broken', out)
    assert end - float(re.search(r"raised at ([\d.]+)", out)[1]) < 60


def start_machine(number, port, recipe, folder, data):
    "A torchrun of one process, as cluster.sbatch starts it on each of two machines"
    machine = f"--nnodes 2 --nproc-per-node 1 --node-rank {number} --master-addr 127.0.0.1 --master-port {port}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", *machine.split()]

    return subprocess.Popen(
        [*torchrun, "-m", "c2lip.lab.training.run", recipe, folder, f"data={data}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
    )


def test_two_machines_train_what_one_process_does(own, tmp_path):
    "Here both are on this machine. The neighbours are the same"
    settings = SMALL | {"batches": "neighbours"}
    recipe = write_recipe(tmp_path, settings)
    port = free_port()
    jobs = [start_machine(number, port, recipe, tmp_path / "two", own) for number in range(2)]
    output = [job.communicate(timeout=240)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(output)

    (tmp_path / "one").mkdir()
    one = train(complete(settings | {"data": str(own)}), tmp_path / "one").model.state_dict()
    neighbours = np.load(tmp_path / "one" / "neighbours.npy")
    assert neighbours.shape == (32, 3)
    assert (neighbours == np.load(tmp_path / "two" / "neighbours.npy")).all()

    losses = [[row["total"] for row in read_log(tmp_path / name)] for name in ("one", "two")]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    two = load(str(tmp_path / "two" / "model")).model.state_dict()
    before = load().model.state_dict()
    for name in one:
        moved = (one[name] - before[name]).norm()
        assert (one[name] - two[name]).norm() < 0.05 * (moved + 1e-6), name


def test_after_several_ranks_the_model_is_loaded_where_the_base_was(tmp_path, monkeypatch):
    monkeypatch.setattr(run_room, "launch_ranks", lambda *words: None)
    monkeypatch.setattr(run_room, "check_gpus", lambda gpus, device: 8)
    monkeypatch.setattr(run_room, "load", lambda name, device="cpu": (Path(name), device))
    monkeypatch.setattr(run_room, "pick_device", lambda name: f"where {name} is")
    assert train({**SMALL, "gpus": 8, "device": "auto"}, tmp_path) == (tmp_path / "model", "where auto is")


def test_slurm_s_file_may_be_submitted_again_before_the_first_checkpoint(own, tmp_path):
    "Its last line is run twice, the first time up to the settings; what it does not say is the recipe's"
    line = (ROOT / "data/recipes/cluster.sbatch").read_text().split("-m c2lip.lab.training.run ")[1].splitlines()[0]
    words = line.strip("'").split()
    assert words == ['"$RECIPE"', '"$RUN"', "resume=True"]
    recipe = write_recipe(tmp_path, SMALL | {"data": own})
    home = tmp_path / "run"
    home.mkdir()
    (home / "params.json").write_text(json.dumps(complete({"data": str(own)})))  # of a job that ended while it loaded
    run_room.train_from_terminal([str(recipe), str(home), words[-1]])
    assert read_log(home)[-1]["step"] == 4
