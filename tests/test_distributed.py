"""W ranks give one process's loss and gradients, for every method; and what they send.

Uneven phrase counts, a rank without a phrase and duplicates across ranks are among the cases."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from c2lip.core import Batch, Texts
from c2lip.distributed import MESSAGE_BYTES, average_gradients, gather, rank_and_world_size
from c2lip.losses import c2lip_losses, phrase_signs, softmax_loss
from c2lip.methods import Objective
from c2lip.methods.c2lip import softmax_c2lip_losses

B, D, M = 6, 8, 5
MATRIX_BYTES = 8 * D * D  # of a toy's weights: a message for each matrix
PHRASES = [[3, 5], [3], [], [], [7, 3, 9, 5], [9]]  # ids of each image's phrases: images 2 and 3 own none


class Toy(nn.Module):
    "Stands for the towers: features come from two matrices, so that gradients of weights can be compared"

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)

        def make(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.scale, self.bias = (  # first, as in open_clip's models
            nn.Parameter(torch.tensor(9.0, dtype=torch.float64)),
            nn.Parameter(torch.tensor(-2.0, dtype=torch.float64)),
        )
        self.image, self.text = nn.Parameter(make(D, D)), nn.Parameter(make(D, D))
        self.x, self.t, self.words = make(B, M, D), make(B, D), make(12, D)

    def features(self, rows):
        unit = nn.functional.normalize
        ids = [p for i in rows for p in PHRASES[i]]
        owner = torch.tensor([k for k, i in enumerate(rows) for _ in PHRASES[i]], dtype=torch.long)
        f = {
            "image": unit(self.x[rows].mean(1) @ self.image, dim=-1),
            "image_tokens": unit(self.x[rows] @ self.image, dim=-1),
            "caption": unit(self.t[rows] @ self.text, dim=-1),
            "scale": self.scale,
            "bias": self.bias,
        }
        distinct = list(dict.fromkeys(ids))
        column = torch.tensor([distinct.index(p) for p in ids], dtype=torch.long)
        f["phrase"] = unit(self.words[distinct].reshape(-1, D) @ self.text, dim=-1)
        phrase = Texts(owner=owner, column=column, number=torch.tensor(distinct, dtype=torch.long))
        return f, Batch({"image": self.x[rows]}, {"phrase": phrase})


def clip_loss(image, caption, f, rows):
    return softmax_loss(image, caption, f["scale"], rows)


def objective(name):
    if name == "clip":
        return Objective(
            lambda f, b, _: {"contrastive": clip_loss(f["image"], f["caption"], f, b.rows)},
            {"contrastive": 1.0},
            columns=("image", "caption"),
        )

    if name.startswith("softmax"):
        return Objective(
            partial(softmax_c2lip_losses, duplicates=name.split()[1], xac_scale=3.0),
            {"contrastive": 1.0, "npc": 0.7, "xac": 0.3},
            columns=("image", "caption", "phrase"),
        )

    def c2lip(f, b, terms):
        phrase = b.texts["phrase"]
        signs, keep = phrase_signs(phrase.owner, phrase.column, phrase.number, b.rows, name)
        return c2lip_losses(
            f["image"], f["caption"], f["phrase"][keep], f["image_tokens"], signs, f["scale"], f["bias"], 3.0, terms
        )

    return Objective(c2lip, {"contrastive": 1.0, "npc": 0.7, "xac": 0.3})


def one_step(name, rows, most=MATRIX_BYTES):
    toy, goal = Toy(), objective(name)
    f, batch = toy.features(rows)
    f, batch = gather(f, batch, goal.columns)
    loss = sum(goal.weights[k] * v for k, v in goal(f, batch).items())
    with average_gradients(toy.parameters(), most):
        (loss * rank_and_world_size()[1]).backward()
    return loss.detach(), [torch.zeros_like(p) if p.grad is None else p.grad for p in toy.parameters()]


NAMES = ("separate", "mask", "merge", "clip", "softmax separate", "softmax mask", "softmax merge")
SHARES = {"2 ranks": [[0, 1, 2], [3, 4, 5]], "3 ranks, one without a phrase": [[4, 5], [2, 3], [0, 1]]}


def ranks_step(rank, shares, folder):
    "What one rank does: a step of every method, the sum of the losses and rank 0's gradients kept"
    for name in NAMES:
        loss, grads = one_step(name, shares[rank])
        dist.all_reduce(loss)
        if rank == 0:
            torch.save((loss, grads), f"{folder}/{name}.pt")
        _, in_one_message = one_step(name, shares[rank], MESSAGE_BYTES)
        for g, one in zip(grads, in_one_message):
            torch.testing.assert_close(g, one, rtol=1e-12, atol=1e-14)


def averaged_half_weights(rank):
    "Gradients of weights in bfloat16 beside norms in float32, as pure_bf16 has them, after the exchange"
    weights = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(3))]
    for p in weights:
        p.grad = torch.full_like(p, rank)
    with average_gradients(weights):
        pass
    return [p.grad for p in weights]


def told_exchange(rank):
    "What happens in a pass over four layers, of which rank 1 uses the first three: layers done, bytes sent"
    layers = [nn.Parameter(torch.full((4, 4), 2.0 + i)) for i in range(4)]
    told = []
    for i, p in enumerate(layers):
        p.register_post_accumulate_grad_hook(lambda _, i=i: told.append(f"layer {i}"))
    send = dist.all_reduce

    def telling(x, **words):
        told.append(x.nbytes)
        return send(x, **words)

    with pytest.MonkeyPatch.context() as patch, average_gradients(layers, most=layers[0].nbytes):
        patch.setattr(dist, "all_reduce", telling)
        x = torch.ones(4)
        for p in layers[: 4 - rank]:
            x = p * x
        x.sum().backward()
    return told, [p.grad for p in layers]


def failed_exchange(rank):
    "Whether a pass that raises leaves a hook behind, or sends anything"
    weight = nn.Parameter(torch.ones(3))
    with contextlib.suppress(ZeroDivisionError), average_gradients([weight]):
        1 / 0  # noqa: B018
    (weight * (rank + 1)).sum().backward()
    return weight.grad


def run_rank(rank, folder):
    torch.set_num_threads(1)
    for number, shares in enumerate(SHARES.values()):
        if rank >= len(shares):
            continue  # sits out
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet{number}", rank=rank, world_size=len(shares))
        Path(f"{folder}/{number}").mkdir(exist_ok=True)
        ranks_step(rank, shares, f"{folder}/{number}")
        torch.save(averaged_half_weights(rank), f"{folder}/{number}/half-{rank}.pt")
        if len(shares) == 2:
            torch.save(told_exchange(rank), f"{folder}/told-{rank}.pt")
            torch.save(failed_exchange(rank), f"{folder}/failed-{rank}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(run_rank, folder, 3)
    return folder


def equals_one_process(folder, shares):
    for name in NAMES:
        want_loss, want = one_step(name, [i for share in shares for i in share])
        loss, got = torch.load(folder / f"{name}.pt", weights_only=True)
        assert torch.allclose(loss, want_loss, rtol=1e-10), name
        for p, (g, w) in zip(("scale", "bias", "image", "text"), zip(got, want)):
            assert torch.allclose(g, w, rtol=1e-9, atol=1e-12), (name, p)


@pytest.mark.parametrize("number", range(len(SHARES)), ids=list(SHARES))
def test_ranks_equal_one_process(number, folder):
    equals_one_process(folder / str(number), list(SHARES.values())[number])


def test_gradients_keep_their_weights_type(folder):
    for rank in (0, 1):
        half, whole = torch.load(folder / "0" / f"half-{rank}.pt", weights_only=True)
        assert (half.dtype, whole.dtype) == (torch.bfloat16, torch.float32)
        assert half.tolist() == [0.5] * 2 and whole.tolist() == [0.5] * 3


def test_gradients_are_sent_while_the_pass_goes_on(folder):
    (first, want), (second, got) = (torch.load(folder / f"told-{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first == ["layer 3", 64, "layer 2", 64, "layer 1", 64, "layer 0", 64]
    assert second == ["layer 2", "layer 1", "layer 0", 64, 64, 64, 64], "the first message waits for layer 3 in vain"
    for a, b in zip(want, got):
        assert torch.equal(a, b)
    assert want[3].abs().max() > 0, "rank 1 had none: half of the other's"


def test_a_pass_that_raises_sends_nothing(folder):
    for rank in (0, 1):
        assert torch.load(folder / f"failed-{rank}.pt", weights_only=True).tolist() == [rank + 1.0] * 3


# Two network namespaces joined by one cable: two machines, as far as the network is concerned.

SIZES = 48, 192, 64, 256  # B, K, M, D of each rank; in bytes: tokens 3.1 MB, captions and phrases 0.25 MB


@pytest.fixture
def cable():
    "Names of two namespaces with the addresses 10.213.7.1 and .2 on a cable called wire"
    names = [f"c2lip{os.getpid()}{side}" for side in "ab"]

    def ip(*words):
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)

    if shutil.which("ip") is None:
        pytest.skip("no network namespaces here: there is no command ip")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.213.7.{i + 1}/24", "dev", "wire")
            for device in ("lo", "wire"):
                ip("-n", name, "link", "set", device, "up")
            ip("netns", "exec", name, "true")
    except (subprocess.SubprocessError, OSError) as e:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip(f"no network namespaces here: {(getattr(e, 'stderr', '') or str(e)).strip()}")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Traffic(TorchDispatchMode):
    "Counts the bytes that this of two ranks sends in collective calls"

    def __init__(self):
        super().__init__()
        self.sent = {"gather": 0, "sum": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind, c10d = func.overloadpacket, torch.ops.c10d
        if kind == c10d.allgather_:
            self.sent["gather"] += sum(x.nbytes for x in args[1])
        elif kind == c10d.allreduce_:
            self.sent["sum"] += sum(x.nbytes for x in args[0])
        elif kind == c10d.alltoall_base_:
            self.sent["sum"] += args[1].nbytes // 2
        elif func.namespace == "c10d":
            assert kind == c10d.barrier, func.name()
        return func(*args, **(kwargs or {}))


def exchange(n_b, n_k, n_m, n_d):
    "Gather random features as a step does, forward and backward: the bytes that this rank sends"
    features = {
        "image": torch.randn(n_b, n_d, requires_grad=True),
        "caption": torch.randn(n_b, n_d, requires_grad=True),
        "phrase": torch.randn(n_k, n_d, requires_grad=True),
        "image_tokens": torch.randn(n_b, n_m, n_d, requires_grad=True),
        "scale": torch.tensor(10.0),
        "bias": torch.tensor(-10.0),
    }
    phrases = Texts(owner=torch.arange(n_k) % n_b, column=torch.arange(n_k), number=torch.arange(n_k))
    batch = Batch({"image": torch.zeros(n_b, 1)}, {"phrase": phrases})
    with Traffic() as counter:
        gathered, _ = gather(features, batch, ("caption", "phrase"))
        (gathered["caption"].sum() + gathered["phrase"].sum()).backward()
    return counter.sent


def sent_on_the_wire():
    return int(Path("/sys/class/net/wire/statistics/tx_bytes").read_text())


def run_in_namespace(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://10.213.7.1:29513", rank=rank, world_size=2)
    ranks_step(rank, SHARES["2 ranks"], folder)
    exchange(4, 4, 2, 8)  # connections are made
    dist.barrier()
    before = sent_on_the_wire()
    counted = exchange(*SIZES)
    dist.barrier()
    wire = sent_on_the_wire() - before
    if rank == 0:
        torch.save((counted, wire), f"{folder}/bytes.pt")
    dist.destroy_process_group()


def test_two_machines_equal_one_process_and_send_no_visual_tokens(cable, tmp_path):
    env = os.environ | {
        "GLOO_SOCKET_IFNAME": "wire",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(open(tmp_path / f"{rank}.log", "w", encoding="utf8")) for rank in range(2)]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, str(rank), str(tmp_path)],
                env=env,
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
            )
            for rank, name in enumerate(cable)
        ]
        end = time.monotonic() + 240
        while time.monotonic() < end and any(r.poll() is None for r in ranks) and not any(r.poll() for r in ranks):
            time.sleep(0.2)  # a rank that fails leaves the other waiting
        for r in ranks:
            r.kill()
            r.wait()
    assert [r.returncode for r in ranks] == [0, 0], "".join(
        (tmp_path / f"{rank}.log").read_text(encoding="utf8") for rank in range(2)
    )
    equals_one_process(tmp_path, SHARES["2 ranks"])

    counted, wire = torch.load(tmp_path / "bytes.pt", weights_only=True)
    n_b, n_k, n_m, n_d = SIZES
    rows, numbers = 4 * (n_b + n_k) * n_d, 8 * (4 + 3 * n_k)  # features; sizes, and owner, column and number of phrases
    assert counted == {"gather": rows + numbers, "sum": rows}
    assert wire == pytest.approx(2 * rows + numbers, rel=0.1), "the network card counts the same, and its headers"
    assert wire < 4 * n_b * n_m * n_d / 3, "the visual tokens alone would be more than three times as much, one way"


if __name__ == "__main__":
    run_in_namespace(int(sys.argv[1]), sys.argv[2])
