"""W ranks under DistributedDataParallel give one process's loss and gradients.

Uneven phrase counts, a rank without a phrase and duplicates across ranks are among the cases; every method with the
towers, in parts and with patterns of what is trained, is in test_methods."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from c2lip.core import Batch, Texts
from c2lip.losses import c2lip_losses, phrase_signs, softmax_loss
from c2lip.methods import Objective, Step
from c2lip.methods.c2lip import softmax_c2lip_losses

B, D, M = 6, 8, 5
PHRASES = [[3, 5], [3], [], [], [7, 3, 9, 5], [9]]  # ids of each image's phrases: images 2 and 3 own none


class Toy(nn.Module):
    "Towers of two matrices; the last one is never used"

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)

        def make(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.scale = nn.Parameter(torch.tensor(9.0, dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))
        self.image, self.text, self.unused = (nn.Parameter(make(D, D)) for _ in range(3))
        self.x, self.t, self.words = make(B, M, D), make(B, D), make(12, D)


class ToyObjective(Objective):
    def encode(self, model, batch):
        unit, rows = partial(nn.functional.normalize, dim=-1), batch.images["image"]
        return {
            "image": unit(model.x[rows].mean(1) @ model.image),
            "image_tokens": unit(model.x[rows] @ model.image),
            "caption": unit(model.t[rows] @ model.text),
            "phrase": unit(model.words[batch.texts["phrase"].number].reshape(-1, D) @ model.text),
            "scale": model.scale,
            "bias": model.bias,
        }


def batch_of(rows):
    ids = [p for i in rows for p in PHRASES[i]]
    owner = torch.tensor([k for k, i in enumerate(rows) for _ in PHRASES[i]], dtype=torch.long)
    distinct = list(dict.fromkeys(ids))
    column = torch.tensor([distinct.index(p) for p in ids], dtype=torch.long)
    number = torch.tensor(distinct, dtype=torch.long)
    return Batch({"image": torch.tensor(rows)}, {"phrase": Texts(owner=owner, column=column, number=number)})


def clip_loss(image, caption, f, rows):
    return softmax_loss(image, caption, f["scale"], rows)


def objective(name):
    weights = {"contrastive": 1.0, "npc": 0.7, "xac": 0.3}
    if name == "clip":

        def clip(f, b, terms):
            return {"contrastive": clip_loss(f["image"], f["caption"], f, b.rows)}

        return ToyObjective(clip, {"contrastive": 1.0}, columns=("image", "caption"))
    if name.startswith("softmax"):
        losses = partial(softmax_c2lip_losses, duplicates=name.split()[1], xac_scale=3.0)
        return ToyObjective(losses, weights, columns=("image", "caption", "phrase"))

    def c2lip(f, b, terms):
        phrase = b.texts["phrase"]
        signs, keep = phrase_signs(phrase.owner, phrase.column, phrase.number, b.rows, name)
        return c2lip_losses(
            f["image"], f["caption"], f["phrase"][keep], f["image_tokens"], signs, f["scale"], f["bias"], 3.0, terms
        )

    return ToyObjective(c2lip, weights)


def one_step(name, rows, several=False):
    toy = Toy()
    step = Step(SimpleNamespace(model=toy), SimpleNamespace(objective=objective(name)))
    module = DistributedDataParallel(step, find_unused_parameters=True) if several else step
    total = module(batch_of(rows))["total"]
    total.backward()
    return total.detach(), [p.grad for p in toy.parameters()]


NAMES = ("separate", "mask", "merge", "clip", "softmax separate", "softmax mask", "softmax merge")
SHARES = {"2 ranks": [[0, 1, 2], [3, 4, 5]], "3 ranks, one without a phrase": [[4, 5], [2, 3], [0, 1]]}


def run_rank(rank, folder):
    "A step of every method, the mean of the losses and this rank's gradients kept"
    torch.set_num_threads(1)
    for number, shares in enumerate(SHARES.values()):
        if rank >= len(shares):
            continue  # sits out
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet{number}", rank=rank, world_size=len(shares))
        found = {}
        for name in NAMES:
            loss, grads = one_step(name, shares[rank], several=True)
            dist.all_reduce(loss)
            found[name] = loss / len(shares), grads
        torch.save(found, f"{folder}/{number}-{rank}.pt")
        if len(shares) == 2:
            torch.save(sent_rows(shares[rank]), f"{folder}/sent-{rank}.pt")
        dist.destroy_process_group()


def sent_rows(rows):
    "Shapes of what a rank sends to the others before the loss"
    shapes, usual = [], dist.all_gather

    def counted(parts, x):
        shapes.append(tuple(x.shape))
        return usual(parts, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", counted)
        one_step("merge", rows, several=True)
    return shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(run_rank, folder, 3)
    return folder


@pytest.mark.parametrize("number", range(len(SHARES)), ids=list(SHARES))
def test_ranks_equal_one_process(number, folder):
    shares = list(SHARES.values())[number]
    for rank in range(len(shares)):
        found = torch.load(folder / f"{number}-{rank}.pt", weights_only=True)
        for name in NAMES:
            want_loss, want = one_step(name, [i for share in shares for i in share])
            loss, got = found[name]
            assert torch.allclose(loss, want_loss, rtol=1e-10), name
            for p, g, w in zip(("scale", "bias", "image", "text", "unused"), got, want):
                if w is None:
                    assert g is None, (name, p)
                else:
                    assert torch.allclose(g, w, rtol=1e-9, atol=1e-12), (name, p)


def test_visual_tokens_stay_where_they_are(folder):
    "Sent are numbers of rows, captions and phrases of width D, and the numbers of the mentions"
    for rank in (0, 1):
        counts, rows, numbers = torch.load(folder / f"sent-{rank}.pt", weights_only=True)
        assert len(counts) == len(numbers) == 1 and rows == (3 + 4, D)  # the other rank's four phrases are padded to
