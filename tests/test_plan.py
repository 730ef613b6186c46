"""The plan of a run: its bytes are those of autograd, of the weights and of the optimiser."""

import json

import pytest
import torch
from small_models import small_siglip

from c2lip.core import UserError
from c2lip.lab.dev.command import main
from c2lip.lab.relatives import build
from c2lip.lab.training.config import Config, read_settings
from c2lip.lab.training.plan import Saved, count, eight_samples, plan
from c2lip.lab.training.step import autocast_of, make_optimizer, train_step
from c2lip.methods import Step
from c2lip.towers import load

TOWERS = {"SigLIP's": small_siglip, **{name: lambda name=name: load(name) for name in ("base", "base_clip", "tuned")}}
METHODS = {
    "plain": {"method": "plain"},
    "encode": {"lambda_npc": 1, "lambda_xac": 1},
    "pool": {"lambda_npc": 1, "lambda_xac": 1, "concepts": "pool", "duplicates": "separate"},
    "negclip": {"method": "negclip"},
}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TOWERS)
def test_activations_are_what_autograd_saves(name, method, precision):
    towers = TOWERS[name]()
    cfg = Config.of(METHODS[method] | {"precision": precision})
    made = build(cfg.method, towers, cfg.options)
    batch = made.view(eight_samples(towers), 1)
    towers.model.train()

    saved = Saved(towers.model)
    step = Step(towers, made, 1, autocast_of(cfg, "cpu"))
    with saved.counting():
        losses = step(batch)
    planned = count(towers, made, cfg, 8)
    assert planned.activations == pytest.approx(saved.total, rel=0.02), losses
    assert planned.recomputed < 0.7 * planned.activations


@pytest.mark.parametrize("trainable", [".*", "visual.*"])
def test_parameters_and_moments_are_exact(trainable):
    towers = load("base")
    cfg = Config.of({"method": "plain", "trainable": trainable, "lr": 1e-3})
    method = build("plain", towers)
    optimizer = make_optimizer(towers, method, cfg)
    train_step(Step(towers, method), optimizer, method.view(eight_samples(towers), 1), 1)
    held = [x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    gradients = [p.grad for p in towers.model.parameters() if p.grad is not None]

    needed = plan({"method": "plain", "model": "base", "trainable": trainable})
    assert needed["weights, GB"] == sum(p.nbytes for p in towers.model.parameters()) / 1e9
    assert needed["moments, GB"] == sum(x.nbytes for x in held) / 1e9
    assert needed["gradients, GB"] == sum(x.nbytes for x in gradients) / 1e9


def test_a_plan_in_the_terminal(capsys):
    words = ["plan", "cc3m_siglip", "-p", "model", "base", "--gpu", "A40", "--json"]
    found = []
    for more in ([], ["--gpus", "4"], ["-p", "accumulate", "4"], ["-p", "recompute", "True"], ["--rate", "100"]):
        assert main([*words, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    eight, four, parts, recomputed, measured = found

    assert 1.9 < four["activations, GB"] / eight["activations, GB"] < 2.1
    assert four["between ranks, GB a step"] < eight["between ranks, GB a step"]
    assert parts["activations, GB"] < 0.5 * eight["activations, GB"] > recomputed["activations, GB"]
    assert parts["hours"] > eight["hours"]
    assert measured["hours"] == pytest.approx(5 * 2_823_019 / 800 / 3600)
    assert measured["cores that read"] == 5
    with pytest.raises(UserError, match="gpu is one of A40"):
        plan({}, "A41")
    with pytest.raises(UserError, match="images that clic makes"):
        plan({"method": "clic", "model": "base"})


@pytest.mark.parametrize("recipe", ["c2lip_siglip2", "c2lip_siglip2_baseline"])
def test_a_dry_run_of_the_real_shapes(recipe, caplog):
    "SigLIP 2 has a vocabulary of 256,000: 375 million weights, and the memory of one A40; no log warns of them"
    needed = plan(read_settings(f"data/recipes/{recipe}.yaml"), "A40")
    assert 1.49 < needed["weights, GB"] < 1.51
    assert needed["moments, GB"] == pytest.approx(2 * needed["weights, GB"], 1e-4)
    assert 10 < needed["memory, GB"] < 48
    assert not caplog.records
