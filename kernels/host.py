"""Where the processor's time of a call goes: `python -m kernels.host`, on a card.

A table of calls, ours beside PyTorch's: µs of the processor, of which so many until the driver is asked ("ours alone":
a stand-in takes the launches and launches nothing). And where they go in one, y = gemv(W, x).
"""

import math
import sys

import torch

from kernels import attention, gemv, kv_cache, lowbit, matmul, ssd
from lab import as_called
from lab.prepared.native import without_driver

HALF = torch.float16


def half(*shape):
    return torch.randn(shape, device="cuda").to(HALF)


def problems():
    """{name: (our call, PyTorch's or None)} on small tensors, whose kernels the processor does not run away from."""
    out = {}
    for size in 2048, 4096:
        W, x = half(size, size), half(size)
        out[f"gemv {size}²"] = (lambda W=W, x=x: gemv.gemv(W, x)), (lambda W=W, x=x: torch.mv(W, x))
        y = torch.empty_like(x)
        ours, theirs = (lambda W=W, x=x, y=y: gemv.gemv(W, x, out=y)), (lambda W=W, x=x, y=y: torch.mv(W, x, out=y))
        out[f"gemv {size}², out="] = ours, theirs
    Wq = lowbit.quantize(W, 4, 128)
    out["int4 gemv 4096²"] = (lambda: lowbit.gemv(Wq, x)), (lambda: torch.mv(W, x))
    A, B = half(256, 256), half(256, 256)
    out["linear 256²"] = (lambda: matmul.linear(A, B)), (lambda: torch.nn.functional.linear(A, B))
    return out | decodes() | scans()


def decodes():
    """Decode attention: 1,024 tokens, 32 heads on 8."""
    q, k, v = half(1, 32, 128), half(1, 1024, 8, 128), half(1, 1024, 8, 128)
    into, lens = torch.empty_like(q), torch.full((1,), 1000, device="cuda", dtype=torch.int32)
    keys, values = kv_cache.quantize(k, 8, role="keys"), kv_cache.quantize(v, 8)
    queries, over, of = q[:, :, None], *(t.transpose(1, 2) for t in (k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return {
        "decode 1K": ((lambda: attention.decode(q, k, v)), lambda: attend(queries, over, of, enable_gqa=True)),
        "decode 1K, out=, kv_lens=": ((lambda: attention.decode(q, k, v, kv_lens=lens, out=into)), None),
        "decode 1K, int8": ((lambda: kv_cache.decode(q, keys, values)), None),
        "decode 1K, int8, out=": ((lambda: kv_cache.decode(q, keys, values, out=into)), None),
    }


def scans():
    """A layer of Mamba-2 with 24 heads, few tokens."""
    shape = (1, 256, 24, 64)
    call = {"x": half(*shape), "dt": torch.rand(shape[:3], device="cuda"), "A": -torch.rand(24, device="cuda")}
    call |= {"B": half(1, 256, 1, 128), "C": half(1, 256, 1, 128), "D": torch.rand(24, device="cuda")}
    call |= {"dt_bias": torch.rand(24, device="cuda"), "dt_softplus": True}
    into = {name: value for name, value in call.items()} | {"out": torch.empty_like(call["x"])}
    return {
        "SSD drop-in, 256 tokens": ((lambda: ssd.mamba_chunk_scan_combined(**call, chunk_size=256)), None),
        "SSD fused, out=": ((lambda: ssd.fused(**into)), None),
    }


def cost(calls):
    """{name: µs of the processor}."""
    return {name: 1e6 * timing.median for name, timing in as_called.host(calls).items()}


def parts():
    """[(what, µs)] of gemv, 2048², one after another, and the whole."""
    W, x, y, other = half(2048, 2048), half(2048), half(2048), half(1024)
    gemv.gemv(W, x), gemv.gemv(W, x, out=y)
    run, options = gemv.CALLS.run, ("gemv", False)
    assert run(options, None, W, x) is not None, "the call is not prepared"
    calls = {"inner": lambda: run(options, y, W, x), "making": lambda: run(options, None, W, x)}
    calls |= {"whole": lambda: gemv.gemv(W, x), "into": lambda: gemv.gemv(W, x, out=y)}
    calls |= {"unknown": lambda: run(options, y, W, other), "empty": lambda: None, "torch": lambda: W.new_empty(2048)}
    found = cost(calls)
    with without_driver(W.device.index):
        idle = cost(calls)
    return [
        ("Python: gemv and what it calls", idle["into"] - idle["inner"]),
        ("arguments: dtype, shape, strides, device, memory; the kind", found["unknown"] - found["empty"]),
        ("what was prepared: addresses, the stream", idle["inner"] - idle["unknown"]),
        ("the driver's launch", found["into"] - idle["into"]),
        ("y: memory, and its Python object", idle["making"] - idle["inner"]),
        ("all of it, y = gemv(W, x)", found["whole"] - found["empty"]),
        ("torch.empty(2048), beside it", found["torch"] - found["empty"]),
    ]


@torch.inference_mode()
def main():
    if not torch.cuda.is_available():
        sys.exit("kernels.host: needs an NVIDIA GPU")
    calls = problems()
    ours, theirs = ({name: pair[which] for name, pair in calls.items() if pair[which]} for which in (0, 1))
    cost(ours)  # a processor that has rested is slow at first
    taken, torchs = cost(ours), cost(theirs)
    with without_driver(torch.cuda.current_device()):
        alone = cost(ours)
    print("µs of processor time of a call      ours  ours alone  PyTorch's")
    for name in calls:
        print(f"  {name:<30} {taken[name]:7.2f} {alone[name]:11.2f} {torchs.get(name, math.nan):10.2f}")
    print("where it goes, gemv 2048²")
    for what, each in parts():
        print(f"  {what:<60} {each:6.2f}")


if __name__ == "__main__":
    main()
