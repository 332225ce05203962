"""Where the processor's time of a call goes: `python -m kernels.host`, on a card.

A table of calls, ours beside PyTorch's, and one of the parts of a prepared call.
"""

import math
import sys

import torch

from kernels import gemv, lowbit, matmul, ssd
from lab import host
from lab.prepared.native import without_driver


def problems():
    """{name: (our call, PyTorch's)} on small matrices, whose kernels the processor does not run away from."""
    out = {}
    for size in 2048, 4096:
        W, x = torch.randn(size, size).to("cuda", torch.float16), torch.randn(size).to("cuda", torch.float16)
        out[f"gemv {size}²"] = (lambda W=W, x=x: gemv.gemv(W, x)), (lambda W=W, x=x: torch.mv(W, x))
        y = torch.empty_like(x)
        ours, theirs = (lambda W=W, x=x, y=y: gemv.gemv(W, x, out=y)), (lambda W=W, x=x, y=y: torch.mv(W, x, out=y))
        out[f"gemv {size}², out="] = ours, theirs
    Wq = lowbit.quantize(W, 4, 128)
    out["int4 gemv 4096²"] = (lambda: lowbit.gemv(Wq, x)), (lambda: torch.mv(W, x))
    call = ssd_call()
    out["SSD, 256 tokens"] = (lambda: ssd.mamba_chunk_scan_combined(**call)), None
    A, B = (torch.randn(256, 256).to("cuda", torch.float16) for _ in range(2))
    out["linear 256²"] = (lambda: matmul.linear(A, B)), (lambda: torch.nn.functional.linear(A, B))
    return out


def ssd_call():
    """A layer of Mamba-2 with 24 heads, few tokens."""
    shape, half = (1, 256, 24, 64), torch.float16
    call = {"x": torch.randn(shape, device="cuda", dtype=half), "dt": torch.rand(shape[:3], device="cuda")}
    call |= {"A": -torch.rand(24, device="cuda"), "D": torch.rand(24, device="cuda"), "chunk_size": 256}
    call |= {name: torch.randn(1, 256, 1, 128, device="cuda", dtype=half) for name in "BC"}
    return call | {"dt_bias": torch.rand(24, device="cuda"), "dt_softplus": True}


def parts():
    """[(what, µs)] of gemv, 2048², one after another, and the whole."""
    W, x = torch.randn(2048, 2048).to("cuda", torch.float16), torch.randn(2048).to("cuda", torch.float16)
    y, other = torch.empty_like(x), torch.randn(1024).to("cuda", torch.float16)
    gemv.gemv(W, x), gemv.gemv(W, x, out=y)
    run, options = gemv.CALLS.run, ("gemv", False)
    assert run(options, None, W, x) is not None, "the call is not prepared"
    whole, into = host.cost(lambda: gemv.gemv(W, x)), host.cost(lambda: gemv.gemv(W, x, out=y))
    inner, unknown = host.cost(lambda: run(options, y, W, x)), host.cost(lambda: run(options, y, W, other))
    empty = host.cost(lambda: None)
    with without_driver(W.device.index):
        idle = host.cost(lambda: run(options, y, W, x))
        making = host.cost(lambda: run(options, None, W, x))
    return [
        ("Python: gemv and what it calls", into - inner),
        ("arguments: dtype, shape, strides, device, memory; the kind", unknown - empty),
        ("what was prepared: addresses, the stream", idle - unknown),
        ("the driver's launch", inner - idle),
        ("y: memory, and its Python object", making - idle),
        ("all of it, y = gemv(W, x)", whole - empty),
        ("torch.empty(2048), beside it", host.cost(lambda: W.new_empty(2048)) - empty),
    ]


@torch.inference_mode()
def main():
    if not torch.cuda.is_available():
        sys.exit("kernels.host: needs an NVIDIA GPU")
    print("µs of processor time of a call      ours  PyTorch's")
    calls = problems()
    for ours, _ in calls.values():  # a processor that has rested is slow at first
        ours(), host.cost(ours)
    for name, (ours, theirs) in calls.items():
        print(f"  {name:<30} {host.cost(ours):7.2f} {host.cost(theirs) if theirs else math.nan:7.2f}")
    print("where it goes, gemv 2048²")
    for what, taken in parts():
        print(f"  {what:<60} {taken:6.2f}")


if __name__ == "__main__":
    main()
