"""C2LIP's losses and token projection against numbers of the public implementation (float64), and their properties."""
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent

from c2lip.losses import c2lip_losses, phrase_signs
from c2lip.pooling import concept_similarity, project_tokens

DATA = Path(__file__).parent/"data"
LEAVES = {"image": "image_features", "caption": "text_features", "phrase": "concept_features", "image_tokens": "image_tokens", "scale": "logit_scale", "bias": "logit_bias"}


@pytest.mark.parametrize("name", ["small", "one"])
def test_losses_equal_the_public_ones(name):
    golden = np.load(DATA/f"c2lip_loss_{name}.npz")
    leaves = {ours: torch.tensor(golden[f"in/{theirs}"], requires_grad=True) for ours, theirs in LEAVES.items()}
    losses = c2lip_losses(**leaves, owner=torch.tensor(golden["in/concept_image_ids"]))
    losses["total"] = losses["contrastive"] + losses["npc"] + .01*losses["xac"]
    for ours, theirs in {"contrastive": "contrastive_loss", "npc": "npc_loss", "xac": "xac_loss", "total": "loss"}.items():
        np.testing.assert_allclose(losses[ours].item(), golden[theirs], rtol=1e-8)
        grads = torch.autograd.grad(losses[ours], list(leaves.values()), retain_graph=True, allow_unused=True)
        for (leaf, x), g in zip(leaves.items(), grads):
            want = golden[f"grad/{theirs}/{LEAVES[leaf]}"]
            got = np.zeros_like(want) if g is None else g.numpy()
            np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-8*max(abs(want).max(), 1e-6), err_msg=f"d {ours} / d {leaf}")


def test_token_projection_equals_the_public_one():
    golden = np.load(DATA/"token_projection_small.npz")
    head = AttentionPoolLatent(32, num_heads=int(golden["num_heads"]), mlp_ratio=4, norm_layer=torch.nn.LayerNorm).double()
    head.norm.eps = 1e-6 if _pooled_error(head, golden, 1e-6) < _pooled_error(head, golden, 1e-5) else 1e-5
    forward = type(head).forward
    pooled, tokens = project_tokens(head, torch.tensor(golden["x"]))
    np.testing.assert_allclose(pooled.detach().numpy(), golden["pooled"], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(tokens.detach().numpy(), golden["tokens"], rtol=1e-10, atol=1e-12)
    assert type(head).forward is forward and "forward" not in vars(head), "the module is untouched"


def _pooled_error(head, golden, eps):
    head.load_state_dict({k.removeprefix("state/"): torch.tensor(golden[k]) for k in golden.files if k.startswith("state/")})
    head.norm.eps = eps
    return np.abs(head(torch.tensor(golden["x"])).detach().numpy() - golden["pooled"]).max()


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_permutations_and_rotation_change_nothing():
    v, t, c, V, owner = unit(4, 8), unit(4, 8, seed=1), unit(7, 8, seed=2), unit(4, 5, 8, seed=3), torch.tensor([0, 0, 1, 2, 2, 2, 3])
    tau, b = torch.tensor(117.), torch.tensor(-12.9)
    want = c2lip_losses(v, t, c, V, owner, tau, b)
    images, phrases, tokens = torch.randperm(4), torch.randperm(7), torch.randperm(5)
    turn = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    for got in (c2lip_losses(v[images], t[images], c, V[images], images.argsort()[owner], tau, b),
                c2lip_losses(v, t, c[phrases], V, owner[phrases], tau, b),
                c2lip_losses(v, t, c, V[:, tokens], owner, tau, b), c2lip_losses(v @ turn, t @ turn, c @ turn, V @ turn, owner, tau, b)):
        for k in want: assert torch.allclose(got[k], want[k], rtol=1e-10), k


def test_bias_gradient_is_predicted_minus_true_matches():
    v, t, c, V, owner, b = unit(3, 8), unit(3, 8, seed=1), unit(4, 8, seed=2), unit(3, 5, 8, seed=3), torch.tensor([0, 0, 1, 1]), torch.tensor(-2., dtype=torch.float64, requires_grad=True)
    losses = c2lip_losses(v, t, c, V, owner, torch.tensor(9.), b)    # image 2 owns no phrase: negatives only
    similar = {"npc": v @ c.T, "xac": concept_similarity(c, V)}
    for k, s in similar.items():
        y = (owner == torch.arange(3)[:, None]).double()
        assert torch.allclose(torch.autograd.grad(losses[k], b, retain_graph=True)[0], ((9*s + b).sigmoid() - y).sum()/4)


def test_float32_loss_from_bfloat16_features():
    v, t, c, V, owner = unit(4, 64), unit(4, 64, seed=1), unit(7, 64, seed=2), unit(4, 9, 64, seed=3), torch.tensor([0, 0, 1, 2, 2, 2, 3])
    tau, b = torch.tensor(117.), torch.tensor(-12.9)
    exact = c2lip_losses(v, t, c, V, owner, tau, b)
    half = c2lip_losses(*(x.bfloat16() for x in (v, t, c, V)), owner, tau, b)
    for k in exact:
        assert half[k].dtype == torch.float32
        assert abs(half[k] - exact[k]) < .02*exact[k], k


def test_tokens_that_nearly_cancel_stay_finite():
    c, t = unit(3, 16).float(), unit(1, 16, seed=1).float()
    V = torch.cat([t, -t*(1 + 1e-7)])[None].requires_grad_()
    loss = c2lip_losses(t, t, c, V, torch.zeros(3, dtype=torch.long), torch.tensor(117.), torch.tensor(-12.9))["xac"]
    loss.backward()
    assert loss.isfinite() and V.grad.isfinite().all()


@pytest.mark.parametrize("chunk", [1, 40, 100])
def test_chunked_similarity_equals_whole(chunk):
    results = []
    for size in (2**23, chunk):
        c, V = unit(5, 8).requires_grad_(), unit(7, 6, 8, seed=1).requires_grad_()
        s = concept_similarity(c, V, 3., chunk_elements=size); (s*s).sum().backward(); results.append((s.detach(), c.grad, V.grad))
    for a, b in zip(*results): assert torch.allclose(a, b, rtol=1e-12)


def test_merged_phrases_are_one_column_with_all_their_images():
    v, c, tau, b = unit(3, 8), unit(2, 8, seed=1), torch.tensor(5.), torch.tensor(-1.)
    owner, column, ids = torch.tensor([0, 1, 1]), torch.arange(3), torch.tensor([4, 4, 8])
    signs, keep = phrase_signs(owner, column, ids, 3, "merge")
    phrase = torch.stack([c[0], c[0], c[1]])
    merged = c2lip_losses(v, v, phrase[keep], None, signs, tau, b, terms=["npc"])["npc"]
    z = torch.tensor([[1., -1], [1, 1], [-1, -1]])
    assert torch.allclose(merged, F.softplus(-z*(tau*v @ c.T + b)).sum()/2)
