"""The GEMV ladder on a card: right on hostile and on large shapes, in graphs, and in chains of dependent launches."""

import shutil
import subprocess

import numpy as np
import pytest
import torch
from guarded_tensors import FENCE, between, fences_stand

import ref.gemv
from kernels import gemv
from lab import results

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")

NAMES = [rung.name for rung in gemv.RUNGS]
DTYPES = list(gemv.DTYPES)
SIZES = [1, 7, 31, 33, 97, 257]
SHAPES = [(rows, cols) for rows in SIZES for cols in SIZES]
SHAPES += [(5, 516), (3, 1032), (7, 2056), (9, 4096), (3, 4099), (2, 4104), (3, 14336), (2, 40001), (100003, 5)]
CALLS = [*((name, False) for name in NAMES), *((rung.name, True) for rung in gemv.DEPENDENT)]  # rung, pdl


def run(name, *args, **options):
    return getattr(gemv, name)(*args, **options)


def problem(rows, cols, dtype, skip=0):
    """W and x between NaNs, out full of NaN between fences. Done when it returns: a dependent launch may read W."""
    W, x = (between(torch.randn(shape).to("cuda", dtype), skip=skip) for shape in ((rows, cols), (cols,)))
    out = between(torch.full((rows,), torch.nan, dtype=dtype, device="cuda"), FENCE, skip)
    torch.cuda.synchronize()
    return W, x, out


def close(out, W, x):
    """Near the reference: by the norm, two roundings of the dtype or what sums in fp32 lose."""
    wanted = ref.gemv.gemv(W.double().cpu().numpy(), x.double().cpu().numpy())
    allowed = max(torch.finfo(out.dtype).eps, 1e-5)
    error = np.linalg.norm(out.double().cpu().numpy() - wanted)
    assert error <= allowed * max(np.linalg.norm(wanted), np.sqrt(wanted.size * max(1, len(x)))), error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, pdl", CALLS)
def test_right_on_hostile_shapes(name, pdl, dtype):
    for rows, cols in SHAPES:
        W, x, out = problem(rows, cols, dtype)
        before = W.clone(), x.clone()
        torch.cuda.synchronize()
        assert run(name, W, x, out=out, pdl=pdl) is out
        close(out, W, x)
        assert fences_stand(out)
        assert torch.equal(W, before[0]) and torch.equal(x, before[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_ring_is_right(dtype):
    """On shapes that ring.cu is for, from one group of rows a block to dozens, with a ragged end."""
    for cols in (4096, 4104, 6144, 8192, 11008, 14336, 16384):
        for rows in (1057, 2003, 4096, 5555, 14337, 40001):
            W, x, out = problem(rows, cols, dtype)
            W[3, -1] = torch.inf
            torch.cuda.synchronize()
            wanted = torch.mv(W.double(), x.double())
            wanted[3] = 0
            torch.cuda.synchronize()
            for name in ("ring", "gemv"):
                run(name, W, x, out=out.fill_(torch.nan), pdl=True)
                assert out[3].isinf() and fences_stand(out)
                out[3] = 0
                assert (out.double() - wanted).norm() <= torch.finfo(dtype).eps * wanted.norm(), (name, rows, cols)


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_begin_at_any_element(dtype, pdl):
    """W at each place in a word, x at another; from short rows to those of several goes, a ragged last group."""
    for number, cols in enumerate(
        (511, 512, 1024, 1025, 1031, 2047, 2050, 4096, 4097, 4099, 4100, 5119, 8191, 14337, 40001)
    ):
        for rows in (1, 9, 131, 1057, 4097):
            W, _, out = problem(rows, cols, dtype, skip=(number + rows) % 8)
            _, x, _ = problem(1, cols, dtype, skip=number % 3)
            W[rows // 2, -1], W[rows - 1, 0] = torch.inf, torch.nan
            torch.cuda.synchronize()
            wanted = torch.mv(W.double(), x.double())
            torch.cuda.synchronize()
            gemv.gemv(W, x, out=out, pdl=pdl)
            finite = wanted.isfinite()
            assert torch.equal(out.isfinite(), finite) and torch.equal(out.isnan(), wanted.isnan()), (rows, cols)
            off, size = (out.double() - wanted)[finite], wanted[finite]
            allowed = max(torch.finfo(dtype).eps, 1e-5)
            assert off.norm() <= allowed * max(float(size.norm()), cols**0.5), (rows, cols)
            assert fences_stand(out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, pdl", CALLS)
def test_right_at_any_alignment(name, pdl, dtype):
    for skip in (1, 2, 3, 4):
        for rows, cols in ((9, 264), (33, 4096)):
            W, x, out = problem(rows, cols, dtype, skip)
            close(run(name, W, x, out=out, pdl=pdl), W, x)
            assert fences_stand(out)


@pytest.mark.parametrize("name, pdl", CALLS)
def test_empty_shapes(name, pdl):
    for dtype in DTYPES:
        zeros = torch.zeros(5, dtype=dtype, device="cuda")
        assert run(name, zeros[:0].view(0, 5), zeros, pdl=pdl).shape == (0,)
        assert run(name, zeros[:0].view(5, 0), zeros[:0], out=zeros + 1, pdl=pdl).tolist() == [0] * 5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, pdl", CALLS)
def test_nan_and_infinity_stay_in_their_rows(name, pdl, dtype):
    for cols in (67, 4096):
        W, x, out = problem(37, cols, dtype)
        W[3, -1], W[20, 0], W[36, 33] = torch.nan, torch.inf, -torch.inf
        x.fill_(1)
        torch.cuda.synchronize()
        run(name, W, x, out=out, pdl=pdl)
        assert out[3].isnan() and out[20] == torch.inf and out[36] == -torch.inf
        rest = [row for row in range(37) if row not in (3, 20, 36)]
        close(out[rest], W[rest], x)
        W.fill_(-1)
        x[5] = torch.inf
        torch.cuda.synchronize()
        assert (run(name, W, x, out=out, pdl=pdl) == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_card_and_the_machine_agree(name, dtype):
    """Bit for bit: the machine adds in the same order and rounds as the card does."""
    for rows, cols in ((33, 97), (7, 516), (37, 1289), (3, 4099)):
        W, x, out = problem(rows, cols, dtype)
        assert torch.equal(run(name, W, x, out=out).cpu(), run(name, W.cpu(), x.cpu()))


@pytest.mark.parametrize("name", NAMES)
def test_counters_take_cuda_tensors(name):
    W, x, _ = problem(33, 256, torch.float16)
    assert gemv.counters(name, W, x).counters == gemv.counters(name, W.cpu(), x.cpu()).counters


@pytest.mark.parametrize("cols", [32768, 32767])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_more_than_two_to_the_31_elements(dtype, cols):
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB of free memory on the card")
    rows = (1 << 31) // cols + 37
    W, x = torch.empty(rows, cols, dtype=dtype, device="cuda"), torch.randn(cols, device="cuda").to(dtype)
    W[:32].normal_()
    for first in range(32, rows, 32):  # each block of rows in another order than its neighbours
        W[first : first + 32] = W[:32].roll(first // 32 % 31, 0)[: rows - first]
    wanted = torch.mv(W[:32].double(), x.double())
    wanted = torch.cat([wanted, *(wanted.roll(first // 32 % 31, 0) for first in range(32, rows, 32))])[:rows]
    torch.cuda.synchronize()
    for name, pdl in CALLS:
        out = torch.full((rows,), torch.nan, dtype=dtype, device="cuda")
        torch.cuda.synchronize()
        off = run(name, W, x, out=out, pdl=pdl).double() - wanted
        assert off.norm() <= torch.finfo(dtype).eps * wanted.norm(), name


def test_more_than_two_to_the_31_rows():
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free memory on the card")
    rows = (1 << 31) + 5
    W = torch.zeros(rows, 1, dtype=torch.float16, device="cuda")
    W[0], W[-1] = 1, 2
    for name, pdl in CALLS:
        out = torch.full((rows,), torch.nan, dtype=torch.float16, device="cuda")
        run(name, W, torch.ones(1, dtype=torch.float16, device="cuda"), out=out, pdl=pdl)
        assert out[0] == 1 and out[-1] == 2 and int(out.count_nonzero()) == 2, name
        del out


@pytest.mark.parametrize("name, pdl", CALLS)
def test_on_the_current_stream(name, pdl):
    W, x, out = problem(1000, 512, torch.float16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            x.normal_()  # just before, on the same stream
            run(name, W, x, out=out, pdl=pdl)
            copy = out.clone()  # just after
        kept = x.clone()
    stream.synchronize()
    close(copy, W, kept)


@pytest.mark.parametrize("name, pdl", CALLS)
@pytest.mark.parametrize("cols", [1032, 1031])
def test_a_graph_follows_its_inputs(name, pdl, cols):
    W, x, out = problem(257, cols, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the first call in this shape: code is loaded during the capture
        run(name, W, x, out=out, pdl=pdl)
    for _ in range(3):
        W.normal_(), x.normal_(), out.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        close(out, W, x)


# Chains of dependent launches: each result is the next x, and buffers are written again while caches still hold them.


def rotation(n, dtype):
    """An orthogonal matrix: values neither grow nor die, and an error stays."""
    return torch.linalg.qr(torch.randn(n, n, device="cuda"))[0].to(dtype).contiguous()


def chain(matrices, buffers, pdl, wait):
    for number, W in enumerate(matrices):
        gemv.gemv(W, buffers[number % len(buffers)], out=buffers[(number + 1) % len(buffers)], pdl=pdl)
        if wait:
            torch.cuda.synchronize()


@pytest.mark.parametrize("in_graph", [False, True], ids=["as called", "in a graph"])
@pytest.mark.parametrize("n", [64, 512, 1029, 2048, 4096, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chain_of_dependent_launches(dtype, n, in_graph):
    """Two buffers: a launch writes what the one before it reads, and what the next one but one left in the caches."""
    for buffers in (2, 3):
        matrices = [rotation(n, dtype) for _ in range(3)] * 40
        start = torch.randn(n, device="cuda").to(dtype)
        apart = [start.clone() for _ in range(buffers)]
        chain(matrices, apart, pdl=True, wait=True)
        together = [start.clone() for _ in range(buffers)]
        torch.cuda.synchronize()
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                chain(matrices, together, pdl=True, wait=False)
        for _ in range(10):
            for buffer in together:
                buffer.copy_(start)
            graph.replay() if in_graph else chain(matrices, together, pdl=True, wait=False)
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(apart, together))


@pytest.mark.parametrize("cols", [4096, 4099, 1029])
def test_a_dependent_launch_sees_what_an_ordinary_kernel_wrote(cols):
    W, x, out = problem(4096, cols, torch.float16)
    for value in range(1, 30):
        x.fill_(0)
        x[:8] = value  # by kernels that know nothing of dependent launches
        gemv.gemv(W, x, out=out, pdl=True)
        last = out * 2  # and one of those behind it
        torch.cuda.synchronize()
        assert torch.equal(last, out * 2)
        close(out, W, x)


@pytest.mark.parametrize("name", NAMES)
def test_devices_must_agree(name):
    W, x, out = problem(5, 8, torch.float32)
    with pytest.raises(ValueError, match=f"{name}: x must be on cuda:0, like the first tensor, got one on cpu"):
        run(name, W, x.cpu())
    with pytest.raises(ValueError, match=f"{name}: out must be on cuda:0, like the first tensor, got one on cpu"):
        run(name, W, x, out=out.cpu())
    with pytest.raises(ValueError, match=f"{name}: x must be on cpu, like the first tensor, got one on cuda:0"):
        run(name, W.cpu(), x)
    with pytest.raises(ValueError, match=f"{name}: out must not share memory with x"):
        run(name, between(torch.ones(8, 8, device="cuda")), x, out=x)
    assert (out.isnan()).all()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_whole_program_compiles_and_runs(tmp_path):
    source, program = results.ROOT / "kernels/gemv/program.cu", tmp_path / "program"
    subprocess.run(["nvcc", "-O3", "-arch=native", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("4096 x 4096: relative error "), done
