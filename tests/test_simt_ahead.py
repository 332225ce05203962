"""Programmatic dependent launch on the SIMT machine: nothing is touched early that the launch ahead may still be at."""

import gc
import re
import sys
import threading

import numpy as np
import pytest
import torch

import simt
from lab import cuda
from lab.stream import STREAM, still_running

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")
F32 = np.float32
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
GO = 'asm volatile("griddepcontrol.launch_dependents;");'


def run(body, *args, ahead=None, grid=2, block=64, arch="sm_90", **how):
    """A kernel of float* x, w, y; i is the number of the thread."""
    source = f"""extern "C" __global__ void k(float* x, const float* w, float* y) {{
      int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
      {body} }}"""
    return simt.compile(source, arch=arch)["k"](grid, block, *args, ahead=ahead, **how)


def three():
    return np.ones(128, F32), np.full(128, 2, F32), np.zeros(128, F32)


def test_what_no_launch_writes_may_be_read_early():
    x, w, y = three()
    report = run(f"float a = w[i]; {WAIT} y[i] = a * x[i];", x, w, y, ahead=simt.Ahead(writes=(x,), reads=(y,)))
    assert (y == 2).all() and report.waited


@pytest.mark.parametrize(
    "early, ahead, text",
    [
        ("y[0] = x[i];", "x", r"reads x\[0\], which the launch ahead may still write"),
        ("if (i == 77) w = x, y[i] = w[i];", "x", r"reads x\[77\].*block \(1, 0, 0\), thread \(13, 0, 0\)"),
        ("y[i] = 1;", "reads y", r"writes y\[0\], which the launch ahead may still read: this thread has not waited"),
        ("y[i] = 1;", "y", r"writes y\[0\], which the launch ahead may still read or write"),
        ("atomicAdd(&y[t], 1.f);", "reads y", r"writes y\[0\]"),
        ("*(float4*)&y[4 * (t % 8)] = *(float4*)&w[0];", "y", r"writes 16 bytes from y\[0\] on"),
        ("unsigned s = (unsigned)__cvta_generic_to_shared(&tile[4 * t]);"
         'asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(s), "l"(x + 4 * (t % 8)));',
         "x", r"reads 16"),
    ],
)  # fmt: skip
def test_what_the_launch_ahead_is_at_may_not_be_touched_early(early, ahead, text):
    x, w, y = three()
    kind = {"reads": (y,)} if ahead == "reads y" else {"writes": ({"x": x, "y": y}[ahead],)}
    body = f"__shared__ __align__(16) float tile[256]; {early} {WAIT} y[i] = x[i];"
    with pytest.raises(simt.AsyncFault, match=rf"kernel k, line 3 .*{text}"):
        run(body, x, w, y, ahead=simt.Ahead(**kind))
    run(body, x, w, y, ahead=simt.Ahead(reads=(w, x)))  # which it may read as well


def test_a_wait_that_is_missing_or_comes_late_is_found():
    x, w, y = three()
    with pytest.raises(simt.AsyncFault, match=r"reads x\[0\].*\(griddepcontrol.wait\)"):
        run("y[i] = x[i];", x, w, y, ahead=simt.Ahead(writes=(x,)))
    with pytest.raises(simt.AsyncFault, match=r"reads x\[0\]"):
        run(f"float a = *(volatile float*)&x[i]; {WAIT} y[i] = a;", x, w, y, ahead=simt.Ahead(writes=(x,)))
    run("y[i] = x[i];", x, w, y)  # a launch of its own


@pytest.mark.parametrize(
    "body",
    [
        f"if (t < 32) {WAIT} __syncthreads(); y[i] = x[i];",
        f"if (t == 40) {WAIT} __syncthreads(); y[i] = x[i];",
        f"if (t % 32 == 3) {WAIT} __syncwarp(); y[i] = x[i];",
        f"if (t < 32) {{ {WAIT} asm volatile("
        '"bar.arrive 1, 64;" ::: "memory"); } else asm volatile("bar.sync 1, 64;" ::: "memory"); y[i] = x[i];',
        'asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p griddepcontrol.wait; }" :: "r"(t % 8)'
        ': "memory"); __syncwarp(); y[i] = x[i];',
    ],
)
def test_a_barrier_tells_the_others(body):
    x, w, y = three()
    run(body, x, w, y, ahead=simt.Ahead(writes=(x,)))
    assert (y == 1).all()


@pytest.mark.parametrize(
    "body, thread",
    [
        (f"if (t < 32) {WAIT} y[i] = x[i];", "(32, 0, 0)"),  # another warp's wait
        (f"__syncthreads(); if (t < 32) {WAIT} y[i] = x[i];", "(32, 0, 0)"),  # a barrier in front of it
        (f"if (t % 32 == 3) {WAIT} y[i] = x[i];", "(0, 0, 0)"),
        (f"if (t == 3) {WAIT} __syncwarp(); y[i] = x[i];", "(32, 0, 0)"),
        (f"if (blockIdx.x == 1) {WAIT} __syncthreads(); y[i] = x[i];", "block (0, 0, 0), thread (0, 0, 0)"),
    ],
)
def test_who_has_not_waited_knows_nothing(body, thread):
    x, w, y = three()
    with pytest.raises(simt.AsyncFault, match=rf"reads x.*{re.escape(thread)}"):
        run(body, x, w, y, ahead=simt.Ahead(writes=(x,)))


def test_a_block_of_odd_size_has_all_waited():
    x, w, y = three()
    run(f"{WAIT} y[i] = x[i];", x, w, y, grid=3, block=37, ahead=simt.Ahead(writes=(x, y)))
    assert y[:111].all()


def test_only_the_bytes_that_are_written_count():
    x, w, y = three()
    body = f"float a = x[2 * t]; {WAIT} y[i] = a + x[2 * t + 1];"
    run(body, x, w, y, ahead=simt.Ahead(writes=(x[1::2], w)))
    with pytest.raises(simt.AsyncFault, match=r"reads x\[126\]"):
        run(body, x, w, y, ahead=simt.Ahead(writes=(x[1::2], x[126:])))


def test_bulk_copies_count_too():
    x, w, y = three()
    body = r"""__shared__ __align__(16) float tile[64]; __shared__ unsigned long long barrier;
      unsigned b = (unsigned)__cvta_generic_to_shared(&barrier), s = (unsigned)__cvta_generic_to_shared(tile);
      if (t == 0) { asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(b)); }
      __syncthreads();
      if (t == 0) {
        WAIT_HERE
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 256;" :: "r"(b) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
                     :: "r"(s), "l"(x + 64 * blockIdx.x), "r"(b) : "memory");
      }
      int done = 0;
      while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(b) : "memory");
      y[i] = tile[t] + x[i];"""
    run(body.replace("WAIT_HERE", WAIT), x, w, y, ahead=simt.Ahead(writes=(x,)))  # the mbarrier tells the others
    assert (y == 2).all()
    with pytest.raises(simt.AsyncFault, match=r"a bulk copy reads 256 bytes from x\[0\] on, which the launch ahead"):
        run(body.replace("WAIT_HERE", ""), x, w, y, ahead=simt.Ahead(writes=(x,)))


def test_a_report_knows_what_the_next_launch_must_leave_alone():
    x, w, y = three()
    assert run("y[i] = x[i];", x, w, y).ahead is None  # it lets nobody start before it ends
    report = run(f"{GO} if (i < 64) y[i] = x[i];", x, w, y)
    assert not report.waited
    with pytest.raises(simt.AsyncFault, match=r"reads x\[0\]"):
        run(f"w[i] > 0 ? y[i] = x[i] : 0; {WAIT}", y, w, x, ahead=report.ahead)
    run(f"{WAIT} y[i] = x[i];", y, w, x, ahead=report.ahead)
    with pytest.raises(simt.AsyncFault, match=r"writes y\[64\], which the launch ahead may still read:"):
        run(f"if (i >= 64) y[i] = 1; {WAIT}", x, w, y, ahead=report.ahead)  # it has y, though it wrote the other half


@pytest.mark.parametrize("bad", [True, "x", (1,), np.ones(3)], ids=str)
def test_what_is_no_launch_ahead(bad):
    with pytest.raises(simt.LaunchError, match="ahead: expected a simt.Ahead, or None; got "):
        run("y[i] = x[i];", *three(), ahead=bad)
    with pytest.raises(TypeError, match="writes: expected a tuple of NumPy arrays"):
        simt.Ahead(writes=np.ones(3))
    with pytest.raises(TypeError, match="reads: expected a tuple of NumPy arrays"):
        simt.Ahead(reads=("x",))


# Launches with tensors, one after the other

CHAIN = f"""
extern "C" __global__ void doubled(const float* x, float* y) {{
  {GO} {WAIT} y[threadIdx.x] = 2 * x[threadIdx.x];
}}
extern "C" __global__ void early(const float* x, float* y) {{
  {GO} y[threadIdx.x] = 2 * x[threadIdx.x]; {WAIT}
}}
extern "C" __global__ void waits_first(const float* x, float* y) {{
  {WAIT} {GO} y[threadIdx.x] = 2 * x[threadIdx.x];
}}
extern "C" __global__ void never(const float* x, float* y) {{ {GO} }}
extern "C" __global__ void plain(const float* x, float* y) {{ y[threadIdx.x] = 2 * x[threadIdx.x]; }}
"""


@pytest.fixture
def chain():
    STREAM.clear()
    yield cuda.compile(CHAIN)
    STREAM.clear()


def tensors():
    return torch.ones(64), torch.zeros(64), torch.zeros(64)


def test_what_the_last_launch_wrote_waits(chain):
    a, b, c = tensors()
    chain.doubled(1, 64, a, b)
    with pytest.raises(simt.AsyncFault, match=r"kernel early, .*reads x\[0\]"):
        chain.early(1, 64, b, c, pdl=True)
    chain.doubled(1, 64, a, b)
    chain.doubled(1, 64, b, c, pdl=True)
    assert (c == 4).all()
    chain.doubled(1, 64, a, b)
    chain.early(1, 64, b, c)  # a plain launch starts when the one ahead has ended
    chain.plain(1, 64, a, b)
    chain.early(1, 64, b, c, pdl=True)  # and plain lets nobody start before
    with pytest.raises(simt.AsyncFault, match=r"writes y\[0\], which the launch ahead may still read or write"):
        chain.early(1, 64, a, c, pdl=True)
    chain.early(1, 64, b, c, pdl=True)  # after an error nothing is known


def test_a_launch_that_has_not_waited_answers_for_the_one_ahead(chain):
    a, b, c = tensors()
    chain.doubled(1, 64, a, b)
    chain.never(1, 64, torch.ones(64), torch.ones(64), pdl=True)
    with pytest.raises(simt.AsyncFault, match=r"reads x\[0\], which a launch further ahead may still write: the launch "
                       "ahead has not waited for it"):  # fmt: skip
        chain.doubled(1, 64, b, c, pdl=True)
    chain.doubled(1, 64, a, b)
    chain.never(1, 64, torch.ones(64), torch.ones(64))
    chain.doubled(1, 64, b, c, pdl=True)


def test_three_launches_may_run_at_once(chain):
    """The second lets the third start before it has waited for the first: that may still run."""
    a, b, c = tensors()
    for second in (chain.doubled, chain.early):
        chain.doubled(1, 64, a, b)
        second(1, 64, torch.ones(64), torch.ones(64), pdl=True)
        with pytest.raises(simt.AsyncFault, match=r"kernel early, .*reads x\[0\]"):
            chain.early(1, 64, b, c, pdl=True)
    chain.doubled(1, 64, a, b)
    for _ in range(3):  # and so on
        chain.doubled(1, 64, torch.ones(64), torch.ones(64), pdl=True)
    with pytest.raises(simt.AsyncFault, match=r"writes y\[0\]"):
        chain.early(1, 64, c, b, pdl=True)
    chain.doubled(1, 64, a, b)
    chain.doubled(1, 64, torch.ones(64), torch.ones(64), pdl=True)
    chain.doubled(1, 64, b, c, pdl=True)  # its wait is for both
    assert (c == 4).all()
    for second, dependent in ((chain.waits_first, True), (chain.doubled, False), (chain.plain, True)):
        chain.doubled(1, 64, a, b)
        chain.plain(1, 64, a, c)
        chain.doubled(1, 64, a, b)
        second(1, 64, torch.ones(64), torch.ones(64), pdl=dependent)
        if second is chain.plain:  # has not waited, so the first may run beyond its end
            with pytest.raises(simt.AsyncFault, match="further ahead"):
                chain.early(1, 64, b, c, pdl=True)
        else:
            chain.early(1, 64, b, c, pdl=True)
    chain.doubled(1, 64, a, b)


def test_memory_that_is_freed_is_forgotten(chain):
    a, b, c = tensors()
    chain.doubled(1, 64, a, b)
    address = b.data_ptr()
    assert STREAM.ahead(True).pieces and STREAM.ahead(False) is None
    with pytest.raises(simt.AsyncFault):
        chain.early(1, 64, b, c, pdl=True)
    chain.doubled(1, 64, a, b)
    del b
    gc.collect()
    assert all(piece.start != address for piece in STREAM.ahead(True).pieces)


def test_each_thread_has_launches_of_its_own(chain):
    a, b, c = tensors()
    chain.doubled(1, 64, a, b)
    other = threading.Thread(target=lambda: chain.early(1, 64, b, c, pdl=True))
    other.start()
    other.join()
    assert (c == 4).all()


def test_a_launch_that_is_taken_to_run(chain):
    a, b, c = tensors()
    still_running(writes=(a,))
    with pytest.raises(simt.AsyncFault, match=r"reads x\[0\]"):
        chain.early(1, 64, a, b, pdl=True)
    still_running(reads=[b[:32].view(4, 8).T])
    with pytest.raises(simt.AsyncFault, match=r"writes y\[0\], which the launch ahead may still read:"):
        chain.early(1, 64, a, b, pdl=True)
    for half in (torch.bfloat16, torch.float8_e4m3fn):
        still_running(writes=(torch.zeros(3).to(half),))
    for bad, got in ((3, "int"), ((3,), "int"), (a, "Tensor"), ((a.to("meta"),), "a tensor on meta")):
        with pytest.raises(TypeError, match=f"still_running: writes must be a tuple of CPU tensors, got {got}"):
            still_running(writes=bad)
