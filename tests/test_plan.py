"""The plan of a run: its bytes are those of autograd, of the weights and of the optimiser."""

import math
from dataclasses import replace

import pytest
import torch
from small_models import small_siglip

from c2lip.core import UserError
from c2lip.lab.relatives import build
from c2lip.lab.training.config import Config, read_settings
from c2lip.lab.training.plan import count, counting_saved, eight_samples, plan
from c2lip.lab.training.step import autocast_of, make_optimizer, train_step
from c2lip.methods import Step
from c2lip.towers import load

TOWERS = {"SigLIP's": small_siglip, **{name: lambda name=name: load(name) for name in ("base", "base_clip")}}
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

    step = Step(towers, made, 1, autocast_of(cfg, "cpu"))
    with counting_saved(towers.model.parameters()) as saved:
        losses = step(batch)
    planned = count(towers, made, cfg, 8).activations
    assert planned == pytest.approx(saved.total(), rel=0.02), losses
    # of SigLIP's two blocks of text the last keeps little anyway
    assert count(towers, made, replace(cfg, recompute=True), 8).activations < 0.85 * planned


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
    assert needed.weights == sum(p.nbytes for p in towers.model.parameters()) / 1e9
    assert needed.moments == sum(x.nbytes for x in held) / 1e9
    assert needed.gradients == sum(x.nbytes for x in gradients) / 1e9


def test_parts_gpus_and_recompute():
    recipe = read_settings("data/recipes/cc3m_siglip.yaml") | {"model": "base"}
    changes = ({}, {"gpus": 4}, {"accumulate": 4}, {"recompute": True})
    eight, four, parts, recomputed = (plan(recipe | change) for change in changes)
    assert 1.9 < four.activations / eight.activations < 2.1
    assert 1.9 < four.hours / eight.hours < 2.1 and eight.images == 2_823_019  # CC3M's, which are not here
    assert eight.hours == pytest.approx(5 * 2_823_019 / eight.images_per_s / 3600)
    assert 4 * recipe["gpus"] < eight.cores == math.ceil(eight.images_per_s / 190)
    for smaller in (parts, recomputed):
        assert smaller.activations < 0.5 * eight.activations and smaller.hours > eight.hours
    with pytest.raises(UserError, match="gpu is one of A40"):
        plan({}, "A41")
    with pytest.raises(UserError, match="images that clic makes .* without --gpu measures them"):
        plan({"method": "clic", "model": "base"})


@pytest.mark.parametrize("recipe", ["c2lip_siglip2", "c2lip_siglip2_baseline"])
def test_a_dry_run_of_the_real_shapes(recipe, caplog):
    "SigLIP 2 has a vocabulary of 256,000: 375 million weights, and the memory of one A40; no log warns of them"
    needed = plan(read_settings(f"data/recipes/{recipe}.yaml"))
    assert 1.49 < needed.weights < 1.51
    assert needed.moments == pytest.approx(2 * needed.weights, 1e-4)
    assert 10 < needed.memory < 48
    assert not caplog.records
