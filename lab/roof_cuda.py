"""The roof of an NVIDIA GPU, measured with PyTorch and one Triton kernel that only reads.

read    bytes/s of a kernel that reads 4 GB once and adds it up
copy    bytes/s of PyTorch's copy, read + written
flops   flop/s of an 8192 × 8192 × 8192 product of random float16 matrices, as PyTorch hands it to cuBLAS

Medians; of several shapes of the read kernel, the best.
"""

import time

import torch
import triton
import triton.language as tl

from lab.roof import Roof


@triton.jit
def _read_all(data, sums, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Each program reads STEPS blocks of BLOCK 32-bit words and stores their sum, so that no read can be dropped."""
    program = tl.program_id(0).to(tl.int64)
    at = data + program * BLOCK * STEPS + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        total += tl.load(at + step * BLOCK)
    tl.store(sums + program, tl.sum(total))


def _milliseconds(function, runs=20):
    """The median of `runs` calls, by the GPU's own clock, after some that wake the card up."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.2:
        function()
        torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for start, stop in events:
        start.record()
        function()
        stop.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(stop) for start, stop in events)[runs // 2]


def measure_gpu_roof():
    """Measure the current GPU and return its Roof. RuntimeError where there is no NVIDIA GPU."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise RuntimeError("there is no NVIDIA GPU that PyTorch can use on this machine")
    card = torch.cuda.get_device_name()
    print(f"measuring the roof of {card} ...")
    words = 1 << 30 if torch.cuda.mem_get_info()[0] > 12 << 30 else 1 << 28  # 4 GB, or 1 GB on a small card
    data = torch.randint(-(1 << 31), (1 << 31) - 1, (words,), dtype=torch.int32, device="cuda")
    read = 0.0
    for block, steps, warps in ((1024, 16, 8), (4096, 4, 4), (8192, 2, 8), (16384, 2, 16), (32768, 1, 16)):
        programs = words // (block * steps)
        sums = torch.empty(programs, dtype=torch.int32, device="cuda")
        taken = _milliseconds(lambda: _read_all[(programs,)](data, sums, block, steps, num_warps=warps))  # noqa: B023
        if int(sums.sum(dtype=torch.int64)) & 0xFFFFFFFF != int(data.sum(dtype=torch.int64)) & 0xFFFFFFFF:
            raise RuntimeError("the read kernel's sum is wrong, so its time means nothing")
        read = max(read, data.nbytes / taken * 1e3)
    to = torch.empty_like(data)
    copy = 2 * data.nbytes / _milliseconds(lambda: to.copy_(data)) * 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2))
    flops = 2 * 8192**3 / _milliseconds(lambda: a @ b) * 1e3
    print(f"  read {read / 1e9:,.0f} GB/s   copy {copy / 1e9:,.0f} GB/s   {flops / 1e12:,.0f} TFLOP/s")
    return Roof(card, read, copy, flops)
