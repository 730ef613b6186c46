"""C2LIP's losses and token projection against numbers of the public implementation (float64), and their properties."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent

from c2lip.encoding import encode, encode_texts
from c2lip.lab.data.loading import Samples
from c2lip.lab.world.captions import train_records
from c2lip.losses import c2lip_losses
from c2lip.methods.c2lip import c2lip
from c2lip.pooling import attn_pool, concept_similarity, project_tokens
from c2lip.towers import load

DATA = Path(__file__).parent / "data"
LEAVES = dict(image="image_features", caption="text_features", phrase="concept_features", image_tokens="image_tokens")
LEAVES |= dict(scale="logit_scale", bias="logit_bias")  # our name: the public one


@pytest.mark.parametrize("name", ["small", "one"])
def test_losses_equal_the_public_ones(name):
    golden = np.load(DATA / f"c2lip_loss_{name}.npz")
    leaves = {ours: torch.tensor(golden[f"in/{theirs}"], requires_grad=True) for ours, theirs in LEAVES.items()}
    losses = c2lip_losses(**leaves, owner=torch.tensor(golden["in/concept_image_ids"]))
    losses["total"] = losses["contrastive"] + losses["npc"] + 0.01 * losses["xac"]

    for ours in losses:
        theirs = "loss" if ours == "total" else f"{ours}_loss"
        np.testing.assert_allclose(losses[ours].item(), golden[theirs], rtol=1e-8)
        grads = torch.autograd.grad(losses[ours], list(leaves.values()), retain_graph=True, allow_unused=True)
        for leaf, g in zip(leaves, grads):
            want = golden[f"grad/{theirs}/{LEAVES[leaf]}"]
            got = np.zeros_like(want) if g is None else g.numpy()
            least = 1e-8 * max(abs(want).max(), 1e-6)
            np.testing.assert_allclose(got, want, rtol=1e-8, atol=least, err_msg=f"d {ours} / d {leaf}")


def test_token_projection_equals_the_public_one():
    golden = np.load(DATA / "token_projection_small.npz")
    heads = int(golden["num_heads"])
    norm = torch.nn.LayerNorm
    head = AttentionPoolLatent(32, num_heads=heads, mlp_ratio=4, norm_layer=norm).double()
    state = {k.removeprefix("state/"): torch.tensor(golden[k]) for k in golden.files if k.startswith("state/")}
    head.load_state_dict(state)
    head.norm.eps = 1e-5
    forward = type(head).forward
    pooled, tokens = project_tokens(head, torch.tensor(golden["x"]))
    np.testing.assert_allclose(pooled.detach().numpy(), golden["pooled"], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(tokens.detach().numpy(), golden["tokens"], rtol=1e-10, atol=1e-12)

    assert type(head).forward is forward and "forward" not in vars(head), "the module is untouched"


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=-1)


def embeddings(B, K, M, D):
    "Images, captions, phrases and visual tokens"
    return unit(B, D), unit(B, D, seed=1), unit(K, D, seed=2), unit(B, M, D, seed=3)


OWNER = torch.tensor([0, 0, 1, 2, 2, 2, 3])
TAU = torch.tensor(117.0)
BIAS = torch.tensor(-12.9)


def test_float32_loss_from_bfloat16_features():
    features = embeddings(4, 7, 9, 64)
    exact = c2lip_losses(*features, OWNER, TAU, BIAS)
    leaves = [x.bfloat16().requires_grad_() for x in features]
    half = c2lip_losses(*leaves, OWNER, TAU, BIAS)
    rounded = (x.detach().double() for x in leaves)  # the numbers that bfloat16 left, computed exactly
    same = c2lip_losses(*rounded, OWNER, TAU, BIAS)
    sum(half.values()).backward()
    for k in exact:
        assert half[k].dtype == torch.float32
        assert abs(half[k] - exact[k]) < 0.02 * exact[k], k
        assert abs(half[k] - same[k]) < (0.01 if k == "xac" else 1e-5) * same[k], k

    assert all(x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all() for x in leaves)


def test_an_autocast_that_is_on_does_not_reach_the_losses():
    values = []
    for on in (False, True):
        leaves = [x.float().requires_grad_() for x in embeddings(4, 7, 9, 64)]
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            losses = c2lip_losses(*leaves, OWNER, TAU, BIAS)
        sum(losses.values()).backward()
        values.append([*losses.values(), *(x.grad for x in leaves)])
    for a, b in zip(*values):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_gradients_at_the_scale_and_bias_of_a_pretrained_model():
    leaves = [x.requires_grad_() for x in (*embeddings(2, 3, 4, 6), TAU.double(), BIAS.double())]

    def losses(*x):
        return tuple(c2lip_losses(*x[:4], torch.tensor([0, 1, 1]), *x[4:], 5.0).values())

    assert torch.autograd.gradcheck(losses, leaves)


@pytest.mark.parametrize("gap", [0, 1e-7, 1e-2])
def test_tokens_that_nearly_cancel_stay_finite(gap):
    K = 60
    D = 16
    c = unit(K, D).float()
    t = unit(1, D, seed=1).float()
    V = F.normalize(torch.cat([t, -t + gap * unit(1, D, seed=2).float()]), dim=-1)[None].requires_grad_()
    s = concept_similarity(c, V)
    loss = c2lip_losses(t, t, c, V, torch.zeros(K, dtype=torch.long), torch.tensor(117.0), torch.tensor(-12.9))["xac"]
    loss.backward()
    assert loss.isfinite()
    assert V.grad.isfinite().all()
    assert s.isfinite().all()

    if gap >= 1e-2:
        exact = torch.einsum("bkd,kd->bk", attn_pool(c.double(), V.double()), c.double())
        assert torch.allclose(s.double(), exact, atol=1e-3)
    if gap == 0:
        assert s.abs().max() < 1.1


def test_a_weight_of_zero_computes_nothing(monkeypatch):
    samples = Samples(train_records(4), (towers := load()).preprocess)
    rows = [samples[i] for i in range(4)]
    seen = []
    monkeypatch.setattr("c2lip.encoding.project_tokens", None)  # who computes visual tokens calls it

    def counted(model, ids, *a, real=encode_texts, **kw):
        seen.append(len(ids))
        return real(model, ids, *a, **kw)

    monkeypatch.setattr("c2lip.encoding.encode_texts", counted)
    losses = {}
    for name, options in {"npc": dict(lambda_xac=0), "both": dict(lambda_npc=0, lambda_xac=0)}.items():
        method = c2lip(towers, concepts="encode", **options)
        features = encode(towers.model, batch := method.view(rows, 0), method.objective.needs)
        assert "image_tokens" not in features
        losses[name] = method.objective(features, batch)
    distinct = {p.text.lower() for r in rows for p in r.phrases}
    assert seen == [4, len(distinct), 4], "with both weights 0 the text tower sees captions only"
    assert set(losses["both"]) == {"contrastive"}
    assert set(losses["npc"]) == {"contrastive", "npc"}
    with pytest.raises(TypeError, match="not callable"):
        encode(towers.model, batch, {"image_tokens"})
