"""Prepared calls on a card: in graphs, on streams, from threads, on memory that comes and goes, beside wrong calls."""

import gc
import random
import threading

import pytest
import torch

from kernels import attention, kv_cache, lowbit, matmul
from kernels import gemv as topic
from kernels.lowbit.gemv import CALLS as LOWBIT
from kernels.ssd.fused import CALLS as SSD
from lab import as_called, cuda_driver

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")
gemv = topic.gemv


@pytest.fixture(autouse=True)
def nothing_prepared():
    for calls in (topic.CALLS, LOWBIT, matmul.CALLS):
        calls.clear()


def tensors(rows=512, cols=1024, device="cuda"):
    W = torch.randn(rows, cols, device=device, dtype=torch.float16) / 32
    return W, torch.randn(cols, device=device, dtype=torch.float16)


def right(y, W, x):
    torch.testing.assert_close(y.double(), W.double() @ x.double(), atol=4e-3, rtol=4e-3)


def test_calls_are_prepared_and_right():
    for turn in range(20):
        W, x = tensors()
        right(gemv(W, x), W, x)
        right(gemv(W, x, pdl=turn % 2 == 0), W, x)
    assert topic.CALLS.kept <= 3


def test_prepared_and_checked_calls_agree_bit_for_bit():
    Wq = lowbit.quantize(torch.randn(1024, 2048, device="cuda", dtype=torch.float16), 4, 128)
    A, B = torch.randn(96, 4096, device="cuda").half(), torch.randn(136, 4096, device="cuda").half()
    cases = [(LOWBIT, lambda m=m: lowbit.gemv(Wq, torch.ones(m, 2048, device="cuda").half())) for m in (1, 4, 16)]
    cases += [(matmul.CALLS, lambda n=n: matmul.linear(A[:n], B)) for n in (1, 33, 96)]
    for calls, call in cases:
        first = call()
        assert calls.kept
        for _ in range(3):
            assert torch.equal(call(), first)
        calls.clear()
        assert torch.equal(call(), first)


def test_in_graphs():
    W, x = tensors()
    Wq = lowbit.quantize(torch.randn(1024, 4096, device="cuda", dtype=torch.float16), 4, 128)
    v = torch.randn(16, 4096, device="cuda").half()
    for pdl in False, True:
        gemv(W, x, pdl=pdl), lowbit.gemv(Wq, v, pdl=pdl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ys = [gemv(W, x, pdl=pdl) for pdl in (False, True)]
        zs = [lowbit.gemv(Wq, v, pdl=pdl) for pdl in (False, True)]
    for _ in range(3):
        x.copy_(torch.randn_like(x)), v.copy_(torch.randn_like(v))
        graph.replay()
        for y in ys:
            right(y, W, x)
        for z, pdl in zip(zs, (False, True)):
            assert torch.equal(z, lowbit.gemv(Wq, v, pdl=pdl))
    del graph, ys, zs
    gc.collect()
    right(gemv(W, x), W, x)


def test_first_call_in_a_graph():
    """The call that is noted may be one that is captured."""
    W, x = tensors(640, 768)
    topic._launch("gemv", W, x, torch.empty(640, device="cuda", dtype=torch.float16), False)  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gemv(W, x)
        z = gemv(W, x)
    graph.replay()
    right(y, W, x), right(z, W, x), right(gemv(W, x), W, x)
    assert topic.CALLS.kept == 1


def test_on_the_stream_that_is_current():
    """A call comes after what its stream does, not after what another does."""
    W, x = tensors()
    gemv(W, x)
    for stream in torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream():
        torch.cuda.synchronize()
        fresh = torch.randn_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late = x.clone()
            late.copy_(fresh)
            y = gemv(W, late)
            assert not stream.query()
        stream.synchronize()
        right(y, W, fresh)


def test_two_streams_at_a_time():
    W, x = tensors()
    gemv(W, x)
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for turn in range(200):
        with torch.cuda.stream(streams[turn % 2]):
            v = torch.full_like(x, turn / 100)
            results.append((v, gemv(W, v)))
    torch.cuda.synchronize()
    for v, y in results:
        right(y, W, v)


def test_from_two_threads():
    wrong = []

    def run(seed):
        chance = random.Random(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(300):
                W, x = tensors(chance.choice((64, 128)), chance.choice((256, 512)))
                y = gemv(W, x)
                if turn % 10 == 0 and not torch.allclose(y.double(), W.double() @ x.double(), atol=1e-2):
                    wrong.append((seed, turn))
                if turn % 100 == 99:
                    topic.CALLS.clear()
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_whose_default_streams_have_one_handle():
    """cu_stream_per_thread: the scratch memory of decode belongs to each thread's stream, not to the handle."""
    k, v = torch.randn(2, 1, 32768, 8, 128, device="cuda").half()
    q = torch.randn(2, 1, 32, 128, device="cuda").half()
    wanted = [attention.decode(one, k, v) for one in q]
    outs, together = torch.zeros(2, 200, 1, 32, 128, device="cuda").half(), threading.Barrier(2, timeout=60)
    torch.cuda.synchronize()

    def run(number):
        with torch.cuda.stream(torch.cuda.ExternalStream(cuda_driver.PER_THREAD)):
            for turn, out in enumerate(outs[number]):
                attention.decode(q[number], k, v, out=out)
                if not turn:  # of its kind and in this thread the first, which may take memory from PyTorch
                    torch.cuda.synchronize()
                    together.wait()
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, wanted[number]) for number in range(2) for out in outs[number])


def test_memory_that_is_freed_and_used_again():
    """Other tensors at the addresses of earlier ones: of the same kind, and of kinds that are refused."""
    W, x = tensors()
    gemv(W, x)
    place, shape = W.data_ptr(), W.shape
    for turn in range(50):
        del W
        if turn % 2:
            W = torch.randn(shape, device="cuda", dtype=torch.float16) / 32
            right(gemv(W, x), W, x)
            continue
        W = torch.randn(shape[0] // 2, shape[1], device="cuda", dtype=torch.float32)
        with pytest.raises(TypeError, match="gemv: x must be of torch.float32, like the first tensor"):
            gemv(W, x)
    assert place


def test_right_and_wrong_calls_alternate():
    W, x = tensors()
    out = torch.full((512,), 7, device="cuda", dtype=torch.float16)
    freed = torch.randn_like(W)
    freed.untyped_storage().resize_(0)
    wrong = [
        ((W, x[:-1]), {}, ValueError, "x must have shape"),
        ((W, x.float()), {}, TypeError, "x must be of torch.float16"),
        ((W, x.cpu()), {}, ValueError, "x must be on cuda:0"),
        ((W.cpu(), x), {}, ValueError, "x must be on cpu"),
        ((W.t().contiguous().t(), x), {}, ValueError, "W must be contiguous"),
        ((W[:, ::2], x[::2]), {}, ValueError, "W must be contiguous"),
        ((W.to_sparse(), x), {}, ValueError, "W must be a dense tensor"),
        ((freed, x), {}, ValueError, "W must have memory"),
        ((W, x), {"out": out[1:]}, ValueError, "out must have shape"),
        ((W, x), {"out": W[0, :512]}, ValueError, "out must not share memory with W"),
        ((W, x), {"out": out.clone().requires_grad_()}, ValueError, "out must not require gradients"),
        ((W, x), {"out": out.cpu()}, ValueError, "out must be on cuda:0"),
    ]
    chance = random.Random(1)
    for _ in range(200):
        right(gemv(W, x), W, x)
        y = torch.empty_like(out)
        assert gemv(W, x, out=y) is y
        args, options, kind, text = chance.choice(wrong)
        with pytest.raises(kind, match=f"gemv: {text}"):
            gemv(*args, **options)
    torch.cuda.synchronize()
    assert bool((out == 7).all())


def test_outputs_are_memory_of_their_own():
    W, x = tensors()
    ys = [gemv(W, x) for _ in range(30)]
    assert len({y.data_ptr() for y in ys}) == 30
    del ys
    before = torch.cuda.memory_allocated()
    for _ in range(300):
        gemv(W, x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(HERE and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_cards():
    for turn in range(6):
        for device in 0, 1:
            with torch.cuda.device(turn % 2):
                W, x = tensors(device=f"cuda:{device}")
                y = gemv(W, x)
                assert y.device.index == device and torch.cuda.current_device() == turn % 2
                right(y, W, x)


def test_a_prepared_call_costs_a_fraction_of_the_checked_one():
    W, x = tensors(64, 64)
    gemv(W, x)
    prepared = as_called.host({"gemv": lambda: gemv(W, x)})["gemv"].median
    topic.CALLS.run = topic.CALLS.run_tracked = lambda *args: None
    checked = as_called.host({"gemv": lambda: gemv(W, x)}, seconds=0)["gemv"].median
    assert prepared < checked / 2, (prepared, checked)


def test_modes_see_what_is_allocated():
    """Under a mode that watches, calls are as ever; under one that fakes tensors, nothing is launched for them."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    W, x = tensors()
    gemv(W, x)
    with Watch():
        y = gemv(W, x)
    right(y, W, x)
    with FakeTensorMode(), pytest.raises((RuntimeError, TypeError, ValueError, AssertionError)):
        gemv(W, x)
    right(gemv(W, x), W, x)


@pytest.mark.skipif(not HERE or torch.cuda.get_device_capability() != (9, 0), reason="needs a card of 9.0")
def test_ssd_on_streams_and_in_graphs():
    """Its counters differ from stream to stream, and are a graph's own."""
    from kernels.ssd import mamba_chunk_scan_combined as ssd

    def call(seed):
        torch.manual_seed(seed)
        both = torch.randn(1, 700, 8 * 64 + 2 * 128, device="cuda").half()
        x, B, C = both.split([8 * 64, 128, 128], dim=-1)
        rest = [x.unflatten(-1, (8, 64)), torch.rand(1, 700, 8, device="cuda"), -torch.rand(8, device="cuda")]
        return *rest, B[:, :, None], C[:, :, None], 256

    calls = [call(seed) for seed in range(3)]
    SSD.clear()
    wanted = []
    for each in calls:
        wanted.append(ssd(*each, return_final_states=True))
        SSD.clear()
    ssd(*calls[0], return_final_states=True)
    torch.cuda.synchronize()
    streams, found, graphs = [torch.cuda.Stream() for _ in range(2)], [], []
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 2]):
            found.append((turn % 3, ssd(*calls[turn % 3], return_final_states=True)))
    for index, each in enumerate(calls):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            found.append((index, ssd(*each, return_final_states=True)))
    for turn in range(9):
        with torch.cuda.stream(streams[turn % 2]):
            graphs[turn % 3].replay()
    torch.cuda.synchronize()
    for index, (y, final) in found:
        assert torch.equal(y, wanted[index][0]) and torch.equal(final, wanted[index][1])
    assert SSD.kept == 1


def attend(q, k, v):
    """Decode attention in double precision."""
    group = q.shape[1] // k.shape[2]
    k, v = (t.double().repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bhd,bthd->bht", q.double(), k) * q.shape[2] ** -0.5
    return torch.einsum("bht,bthd->bhd", scores.softmax(-1), v)


def decode_problem(kv_len=2000, batch=1):
    shape = batch, kv_len, 8, 128
    return [torch.randn(s, device="cuda", dtype=torch.float16) for s in ((batch, 32, 128), shape, shape)]


def test_decode_shares_its_scratch_with_nobody_who_runs_beside_it():
    """Its two launches share memory that the stream keeps: threads on one stream, streams of their own, and a graph."""
    problems = [decode_problem(n, b) for n, b in ((2000, 1), (4097, 1), (700, 3))]
    wanted = [attend(*problem) for problem in problems]
    for problem in problems:
        attention.decode(*problem), attention.decode(*problem)
    before, wrong = torch.cuda.memory_allocated(), []

    def run(seed):
        chance = random.Random(seed)
        stream = torch.cuda.Stream() if seed % 2 else torch.cuda.default_stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(200):
                number = chance.randrange(3)
                found = attention.decode(*problems[number])
                if (found.double() - wanted[number]).abs().max() > 2e-3:
                    wrong.append((seed, number))
            stream.synchronize()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.cuda.memory_allocated() - before <= 4 * (16 << 20)  # what three streams keep, and the default one
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(problems[0][0])
    with torch.cuda.graph(graph):
        attention.decode(*problems[0], out=out)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.default_stream())
    for _ in range(50):  # the graph beside calls of its kind
        with torch.cuda.stream(side):
            graph.replay()
        found = attention.decode(*problems[1])
        torch.cuda.synchronize()
        assert (out.double() - wanted[0]).abs().max() < 2e-3 and (found.double() - wanted[1]).abs().max() < 2e-3


def test_a_cache_that_grows_is_read_to_its_end():
    """kv_len is a number of the prepared call: codes that are appended count at once."""
    q, k, v = decode_problem(300)
    keys, values = kv_cache.quantize(k, 8, role="keys", capacity=600), kv_cache.quantize(v, 8, capacity=600)
    kept = set()
    for _ in range(70):
        new = torch.randn(2, 1, 1, 8, 128, device="cuda", dtype=torch.float16)
        keys.append(new[0]), values.append(new[1])
        found, wanted = kv_cache.decode(q, keys, values), attend(q, keys.dequantize(), values.dequantize())
        assert (found.double() - wanted).abs().max() < 4e-3
        kept.add(kv_cache.decoding.CALLS.kept)
    assert len(kept) <= 6 + 2  # a kind for each 16 tokens, and whenever the largest scale passes a power of two
