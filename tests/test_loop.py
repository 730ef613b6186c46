"""C2LIPLoss on two ranks under DDP equals one process: losses and gradients."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from torch.nn.parallel import DistributedDataParallel
from transformers import SiglipModel

from c2lip import C2LIPLoss
from c2lip.concepts import noun_phrases
from c2lip.core import Sample, UserError
from c2lip.methods import Step
from c2lip.methods.c2lip import c2lip
from c2lip.release.foreign import towers_of
from c2lip.release.transformers import SMALL_SIDE, small_clip, small_siglip
from c2lip.world_captions import train_records

CAPTIONS = [record[2] for record in train_records(6)]
PHRASES = [noun_phrases(caption) for caption in CAPTIONS]
# ranks of unequal phrase counts; in the second split a rank has no phrase at all
CASES = {
    "siglip": (small_siglip, PHRASES),
    "clip": (small_clip, PHRASES),
    "siglip, a rank without a phrase": (small_siglip, [*PHRASES[:3], [], [], []]),
    "clip, a rank without a phrase": (small_clip, [*PHRASES[:3], [], [], []]),
}
SHARES = [[0, 1, 2], [3, 4, 5]]


def step(case, rows, several):
    "Losses and gradients of some rows of the batch"
    make, phrases = CASES[case]
    towers = make()
    images = torch.randn(6, 3, SMALL_SIDE, SMALL_SIDE, generator=torch.Generator().manual_seed(0))
    loss = C2LIPLoss(towers.model, towers.tokenizer, lambda_xac=0.5, xac_scale=3.0)
    module = DistributedDataParallel(loss) if several else loss
    losses = module(images[rows], [CAPTIONS[i] for i in rows], [phrases[i] for i in rows])
    losses["total"].backward()
    values = torch.stack([value.detach() for value in losses.values()])
    return values, {name: p.grad for name, p in loss.named_parameters()}


def run_rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for number, case in enumerate(CASES):
        values, grads = step(case, SHARES[rank], several=True)
        torch.save((values, grads), f"{folder}/{number}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop")
    on_ranks(run_rank, folder, 2)
    return folder


@pytest.mark.parametrize("number", range(len(CASES)), ids=list(CASES))
def test_two_ranks_equal_one_process(number, folder):
    want, want_grads = step(list(CASES)[number], SHARES[0] + SHARES[1], several=False)
    ranks = [torch.load(folder / f"{number}-{rank}.pt", weights_only=True) for rank in range(2)]
    mean = (ranks[0][0] + ranks[1][0]) / 2
    assert torch.allclose(mean, want, rtol=1e-5)
    assert not torch.allclose(ranks[0][0], ranks[1][0]), "each rank has its own share"
    for _, grads in ranks:
        for name, gradient in want_grads.items():
            largest = gradient.abs().max().item()
            assert torch.allclose(grads[name], gradient, rtol=1e-4, atol=1e-5 * largest + 1e-7), name


def test_a_wrapped_model_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        towers = small_clip()
        with pytest.raises(UserError, match="give the model itself"):
            towers_of(DistributedDataParallel(towers.model), towers.tokenizer)
    finally:
        dist.destroy_process_group()


def test_the_trainer_takes_a_model_without_a_logit_bias():
    "A batch encoded in parts has the same gradients"
    images = torch.randn(6, 3, SMALL_SIDE, SMALL_SIDE, generator=torch.Generator().manual_seed(0))
    samples = [Sample(str(i), images[i], CAPTIONS[i], PHRASES[i]) for i in range(6)]
    gradients = []
    for parts in (1, 2):
        towers = small_clip()
        method = c2lip(towers)
        Step(towers, method, parts)(method.view(samples, 0))["total"].backward()
        gradients.append([p.grad for p in towers.model.parameters()])
    for whole, parts in zip(*gradients):
        assert torch.allclose(whole, parts, rtol=1e-3, atol=1e-5 * whole.abs().max().item() + 1e-7)


def test_the_loop_of_the_readme():
    "README.md's loop runs as it stands, given a model, its tokenizer and pairs"
    text = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "C2LIPLoss" in block]
    towers = small_siglip()
    before = towers.model.logit_bias.item()
    pairs = [(torch.randn(3, SMALL_SIDE, SMALL_SIDE), caption) for caption in CAPTIONS]
    exec(code, {"model": towers.model, "tokenizer": towers.tokenizer, "pairs": pairs})
    assert towers.model.logit_bias.item() != before


def test_the_export_of_the_readme(tmp_path):
    "README.md's export runs as it stands, but for the model and the folder"
    text = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "to_hugging_face" in block]
    (loaded,) = re.findall(r'# (SiglipModel\.from_pretrained\("my_siglip"\))', code)
    code = f"{code}\nfound = {loaded}"
    for said, here in (('load("runs/photos/model")', "towers"), ('"my_siglip"', repr(str(tmp_path)))):
        assert said in code
        code = code.replace(said, here)
    names = {"SiglipModel": SiglipModel, "towers": small_siglip()}
    exec(code, names)
    wanted = small_siglip().model.logit_scale
    assert torch.equal(names["found"].logit_scale.flatten(), wanted.detach().flatten())
