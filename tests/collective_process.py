"""One of two processes that exchange: python collective_process.py RANK COUNT FILE cpu|cuda. Prints what it saw."""

import sys

import torch
import torch.distributed as dist

from kernels import collective
from kernels.collective import processes

rank, count, file, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
if kind == "cuda":
    torch.cuda.set_device(rank)
    torch.set_default_device("cuda")
backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[kind]
dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=count)
group = processes.Group(device=None if kind == "cuda" else "cpu")


def messages(n, seed, dtype=torch.bfloat16):
    draws = [torch.Generator().manual_seed(seed + r) for r in range(count)]
    return [torch.randn(n, generator=draw, device="cpu").to(dtype).to(group.device) for draw in draws]


def sum_of(xs):
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    return total.to(xs[0].dtype)


for n, rung in (37, "ll"), (300, "direct"), (290, "sentinel"), (301, "pull_once"), (80, "pull"), (403, "two_shot"):
    for e in range(3):
        xs = messages(n, 10 * e)
        got = xs[rank].clone()
        getattr(collective, rung)([got], group=group)
        group.synchronize()
        assert torch.equal(got, sum_of(xs)), rung
xs = messages(64, 7)
x = xs[rank].clone()
torch.compile(lambda x: torch.ops.matmul_to_mamba.all_reduce(x, "world"), fullgraph=True, backend="eager")(x)
assert torch.equal(x, sum_of(xs))
W, residual = messages(9 * 24, 3), messages(9, 5)[0]
parts = messages(24, 4)
(y,) = collective.product([W[rank].view(9, 24)], [parts[rank]], [residual], group=group)
rows = [(a.view(9, 24).float() @ b.float()) for a, b in zip(W, parts)]
assert torch.allclose(y.float(), residual.float() + sum(rows), atol=0.1, rtol=0.02)
try:
    torch.ops.matmul_to_mamba.all_reduce(x, "nobody")
except ValueError as error:
    assert "got 'nobody', there are: world" in str(error)
dist.barrier()
if rank == 0:  # the others do not come
    group.limit = 50
    try:
        collective.ll([torch.ones(8)], group=group)
        group.synchronize()
    except collective.PeerTimeout as error:
        assert "rank 0 waited for rank 1" in str(error)
        print("named", end=" ")
print("right", rank)
