"""Runs that stop, go on, freeze, split over processes or meet a NaN end as they should."""
import math
from dataclasses import replace

import pytest
import torch

from c2lip import scenes, training
from c2lip.core import UserError, seed_everything
from c2lip.data import Samples
from c2lip.methods import c2lip, siglip
from c2lip.towers import load

CFG = training.Config(epochs=2, batch_size=8, warmup=2, log_every=1, save_every=3, lr=1e-3)


@pytest.fixture(scope="module")
def samples(): return Samples(scenes.train_records(48), load().preprocess, cache=True)


def fit(samples, folder, cfg=CFG, make=c2lip, stop_at=None):
    "Train a fresh base; `stop_at` ends the run the hard way after so many steps"
    folder.mkdir(exist_ok=True)
    seed_everything(0)
    towers = load()
    method = make(towers)
    if stop_at:
        view, method.view = method.view, None
        def stopping(batch, step):
            if step > stop_at: raise KeyboardInterrupt
            return view(batch, step)
        method.view = stopping
    try: training.fit(towers, method, samples, cfg, folder)
    except KeyboardInterrupt: pass
    return towers.model.state_dict()


def equal(a, b): return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("stop_at", [1, 4, 7, 11])
def test_a_stopped_run_goes_on_bit_equal(samples, tmp_path, stop_at):
    want = fit(samples, tmp_path/"straight")
    fit(samples, tmp_path/"stopped", stop_at=stop_at)
    got = fit(samples, tmp_path/"stopped", replace(CFG, resume=True))
    assert equal(want, got)
    rows = lambda name: [(r["step"], r["total"]) for r in training.read_log(tmp_path/name)]
    assert rows("straight") == rows("stopped"), "the log has every step once"


def test_a_damaged_checkpoint_falls_back_to_the_one_before(samples, tmp_path, capsys):
    want = fit(samples, tmp_path/"straight")
    fit(samples, tmp_path/"stopped", stop_at=8)          # checkpoints of steps 3 and 6
    path = tmp_path/"stopped"/"checkpoint.pt"
    path.write_bytes(path.read_bytes()[:5000])
    assert equal(want, fit(samples, tmp_path/"stopped", replace(CFG, resume=True)))
    assert "damaged" in capsys.readouterr().out


def test_weights_of_zero_are_plain_fine_tuning_bit_for_bit(samples, tmp_path):
    assert equal(fit(samples, tmp_path/"zero", make=lambda t: c2lip(t, 0, 0)), fit(samples, tmp_path/"plain", make=siglip))


def test_what_the_pattern_leaves_out_does_not_move(samples, tmp_path):
    def text_only(towers): method = c2lip(towers); method.trainable = r"text\..*"; return method
    before, after = load().model.state_dict(), fit(samples, tmp_path/"run", make=text_only)
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    assert moved and all(k.startswith("text.") for k in moved)
    with pytest.raises(UserError, match="matches no parameter"):
        def nothing(towers): method = c2lip(towers); method.trainable = "texts.*"; return method
        fit(samples, tmp_path/"run2", make=nothing)


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_weights(samples, tmp_path):
    def spoiled(towers):
        method = c2lip(towers); losses = method.objective.losses; calls = []
        def spoil(f, batch, terms):
            calls.append(1); found = losses(f, batch, terms)
            return {**found, "npc": found["npc"]*math.nan} if len(calls) == 5 else found
        method.objective.losses = spoil
        return method
    with pytest.raises(UserError, match="step 5: the npc loss is nan.*weights of step 4"): fit(samples, tmp_path/"run", make=spoiled)
    state = torch.load(tmp_path/"run"/"checkpoint.pt", weights_only=True)
    assert state["step"] == 4 and all(v.isfinite().all() for v in state["model"].values())


def test_a_checkpoint_with_code_in_it_is_refused(samples, tmp_path):
    import pickle
    class Evil:
        def __reduce__(self): return (open, (str(tmp_path/"gone"), "w"))
    (tmp_path/"run").mkdir()
    (tmp_path/"run"/"checkpoint.pt").write_bytes(pickle.dumps({"step": Evil()}))
    towers = load(); method = c2lip(towers)
    assert training.load_checkpoint(tmp_path/"run", towers, method, torch.optim.AdamW(towers.model.parameters())) == 0
    assert not (tmp_path/"gone").exists()


def test_two_processes_train_what_one_does(tmp_path):
    settings = dict(method="c2lip", pictures=32, epochs=1, batch_size=8, warmup=2, log_every=1, lr=1e-4, duplicates="merge", device="cpu", threads=1)
    weights = {}
    for gpus in (1, 2):
        (tmp_path/f"{gpus}").mkdir()
        weights[gpus] = training.train({**settings, "gpus": gpus}, tmp_path/f"{gpus}").model.state_dict()
    losses = [[r["total"] for r in training.read_log(tmp_path/f"{g}")] for g in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    start = load().model.state_dict()
    for k, w in weights[1].items():
        assert (w - weights[2][k]).norm() <= .05*(w - start[k]).norm() + 1e-6, k


def test_a_rank_that_fails_is_named(tmp_path):
    with pytest.raises(UserError, match="no model"):
        training.train(dict(model="ViT-B-61", gpus=2, pictures=32, device="cpu"), tmp_path)
