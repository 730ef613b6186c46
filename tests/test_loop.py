"""C2LIPLoss on two ranks under DDP equals one process: losses and gradients."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from small_models import small_siglip
from torch.nn.parallel import DistributedDataParallel
from transformers import SiglipModel

from c2lip import C2LIPLoss
from c2lip.concepts import noun_phrases
from c2lip.core import UserError
from c2lip.lab.world.captions import train_records
from c2lip.own_loop import towers_of
from c2lip.towers import load

CAPTIONS = [record[2] for record in train_records(6)]
PHRASES = [noun_phrases(caption) for caption in CAPTIONS]
IMAGES = torch.randn(6, 3, 96, 96, generator=torch.Generator().manual_seed(0))
# ranks of unequal phrase counts; in the second split a rank has no phrase at all
MAKERS = {"siglip": small_siglip, "clip": partial(load, "base_clip")}
SPLITS = {"": PHRASES, ", a rank without a phrase": [*PHRASES[:3], [], [], []]}
CASES = {kind + split: (MAKERS[kind], SPLITS[split]) for kind in MAKERS for split in SPLITS}
SHARES = [[0, 1, 2], [3, 4, 5]]


def step(case, rows, several):
    "Losses and gradients of some rows of the batch"
    make, phrases = CASES[case]
    towers = make()
    loss = C2LIPLoss(towers.model, towers.tokenizer, lambda_xac=0.5, xac_scale=3.0)
    module = DistributedDataParallel(loss) if several else loss
    losses = module(IMAGES[rows], [CAPTIONS[i] for i in rows], [phrases[i] for i in rows])
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
    assert on_ranks(run_rank, folder, 2) == [0, 0]
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


def test_a_wrapped_model_is_refused():
    towers = small_siglip()
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)  # only its type is looked at
    with pytest.raises(UserError, match="give the model itself"):
        towers_of(wrapped, towers.tokenizer)


def readme(word):
    "The block of README.md's code that holds a word"
    text = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if word in block]
    return code


def test_the_loop_of_the_readme():
    "README.md's loop runs as it is, given a model, its tokenizer and pairs"
    towers = small_siglip()
    before = towers.model.logit_bias.item()
    pairs = [{"image": image, "text": text} for image, text in zip(IMAGES, CAPTIONS)]
    exec(readme("C2LIPLoss"), {"model": towers.model, "tokenizer": towers.tokenizer, "pairs": pairs})
    assert towers.model.logit_bias.item() != before


def test_the_export_of_the_readme(tmp_path):
    "README.md's export runs as it is, but for the model and the folder"
    code = readme("to_hugging_face")
    (loaded,) = re.findall(r'# (SiglipModel\.from_pretrained\("my_siglip"\))', code)
    code = f"{code}\nfound = {loaded}"
    places = {f'"{name}"': repr(str(tmp_path / name)) for name in ("my_siglip", "my_vectors")}
    for there, here in {'load("runs/photos/model")': "towers", **places}.items():
        assert there in code
        code = code.replace(there, here)
    names = {"SiglipModel": SiglipModel, "towers": small_siglip()}
    exec(code, names)
    wanted = small_siglip().model.logit_scale

    assert torch.equal(names["found"].logit_scale.flatten(), wanted.detach().flatten())
