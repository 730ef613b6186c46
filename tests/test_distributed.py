"""W ranks give one process's loss and gradients: uneven phrase counts, a rank without a phrase, duplicates across ranks, every method."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from c2lip import losses, towers
from c2lip.core import Batch
from c2lip.methods import Objective
from c2lip.towers import average_gradients

B, D, M = 6, 8, 5
PHRASES = [[3, 5], [3], [], [], [7, 3, 9, 5], [9]]      # ids of each image's phrases: images 2 and 3 own none


class Toy(nn.Module):
    "Stands for the towers: features come from two matrices, so that gradients of weights can be compared"
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        make = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)
        self.image, self.text = nn.Parameter(make(D, D)), nn.Parameter(make(D, D))
        self.scale, self.bias = nn.Parameter(torch.tensor(9., dtype=torch.float64)), nn.Parameter(torch.tensor(-2., dtype=torch.float64))
        self.x, self.t, self.words = make(B, M, D), make(B, D), make(12, D)

    def features(self, rows):
        unit = nn.functional.normalize
        ids = [p for i in rows for p in PHRASES[i]]
        owner = torch.tensor([k for k, i in enumerate(rows) for _ in PHRASES[i]], dtype=torch.long)
        f = {"image": unit(self.x[rows].mean(1) @ self.image, dim=-1), "image_tokens": unit(self.x[rows] @ self.image, dim=-1),
             "caption": unit(self.t[rows] @ self.text, dim=-1), "phrase": unit(self.words[ids].reshape(-1, D) @ self.text, dim=-1), "scale": self.scale, "bias": self.bias}
        return f, Batch({"image": self.x[rows]}, {}, owner, torch.arange(len(ids)), torch.tensor(ids, dtype=torch.long))


def objective(name):
    if name == "clip": return Objective(lambda f, b, _: {"contrastive": losses.softmax_loss(f["image"], f["caption"], f["scale"], len(b.images["image"]))}, {"contrastive": 1.}, {"contrastive": set()}, ("image", "caption"))
    def c2lip(f, b, terms):
        signs, keep = losses.phrase_signs(b.owner, b.column, b.phrase_id, len(f["image"]), name)
        return losses.c2lip_losses(f["image"], f["caption"], f["phrase"][keep], f["image_tokens"], signs, f["scale"], f["bias"], 3., terms)
    return Objective(c2lip, {"contrastive": 1., "npc": .7, "xac": .3}, dict.fromkeys(("contrastive", "npc", "xac"), set()))


def one_step(name, rows):
    toy, goal = Toy(), objective(name)
    f, batch = toy.features(rows)
    f, batch = towers.gather(f, batch, goal.columns)
    loss = sum(goal.weights[k]*v for k, v in goal(f, batch).items())
    (loss*towers.world()[1]).backward()
    average_gradients(toy.parameters())
    return loss.detach(), [torch.zeros_like(p) if p.grad is None else p.grad for p in toy.parameters()]


NAMES = ("separate", "mask", "merge", "clip")


def rank_step(rank, shares, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(shares))
    for name in NAMES:
        loss, grads = one_step(name, shares[rank])
        dist.all_reduce(loss)
        if rank == 0: torch.save((loss, grads), f"{folder}/{name}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("shares", [[[0, 1, 2], [3, 4, 5]], [[4, 5], [2, 3], [0, 1]]], ids=["2 ranks", "3 ranks, one without a phrase"])
def test_ranks_equal_one_process(shares, tmp_path):
    mp.spawn(rank_step, (shares, str(tmp_path)), nprocs=len(shares))
    for name in NAMES:
        want_loss, want = one_step(name, [i for share in shares for i in share])
        loss, got = torch.load(tmp_path/f"{name}.pt", weights_only=True)
        assert torch.allclose(loss, want_loss, rtol=1e-10), name
        for p, (g, w) in zip(("image", "text", "scale", "bias"), zip(got, want)): assert torch.allclose(g, w, rtol=1e-9, atol=1e-12), (name, p)
