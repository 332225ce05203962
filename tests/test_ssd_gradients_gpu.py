"""kernels.ssd under autograd on a card: large calls, torch.compile, CUDA graphs, memory, the host's time."""

import functools
import sys
import time
import warnings

import pytest
import torch
from ssd_backward_cases import CARD, CASES, check, compare, make
from torch.utils.checkpoint import checkpoint

from kernels import ssd, ssd_backward
from kernels.ssd import peers
from kernels.ssd_backward import Gradients

HERE = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = pytest.mark.skipif(not HERE, reason="needs an NVIDIA GPU")
MAMBA = "D, dt_bias, softplus"
SHAPE = 1, 515, 24, 64, 1, 128
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALLOWED = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def leaves_of(call):
    floats = [k for k, v in call.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return call | {k: call[k].detach().clone().requires_grad_() for k in floats}, floats


def combined(x, dt, A, B, C, **options):
    return ssd.mamba_chunk_scan_combined(x, dt, A, B, C, 256, **options)


def through(function, dy, dfinal_states=None, **call):
    call, names = leaves_of(call)
    found = function(**call, return_final_states=dfinal_states is not None)
    results, given = ([found], [dy]) if dfinal_states is None else ([*found], [dy, dfinal_states])
    gradients = dict(zip(names, torch.autograd.grad(results, [call[k] for k in names], given)))
    return Gradients(*map(gradients.get, Gradients._fields))


@pytest.mark.parametrize("name", CARD)
def test_right_on_large_calls(name):
    check(ssd_backward.gradients, name, torch.bfloat16, "cuda", again=True)


@pytest.mark.parametrize("name", ["2.7B, 2K", "sequences"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_right_in_other_dtypes(name, dtype):
    check(ssd_backward.gradients, name, dtype, "cuda", again=True)


@pytest.mark.parametrize("name", ["one token, everything", "a token more", "prime sizes", "sequences", "a huge step"])
def test_right_on_hostile_calls(name):
    """A few of those that tests of the rungs have all of."""
    check(ssd_backward.gradients, name, torch.float16, "cuda", cases=CASES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_under_autograd(dtype):
    for function in (combined, ssd.fused):
        for options in (MAMBA, MAMBA + ", z, initial_states, dfinal_states"):
            dy, call = make(SHAPE, options, dtype, "cuda")
            compare(options, through(function, dy, **call), dy, call, ALLOWED[dtype])


def test_compiled_checkpointed_and_in_a_graph():
    """The same bits as called plainly."""
    dy, call = make(SHAPE, MAMBA, torch.bfloat16, "cuda")
    wanted = through(combined, dy, **call)
    compiled = torch.compile(lambda **call: combined(**call), fullgraph=True)
    again = lambda **call: checkpoint(functools.partial(combined, **call), use_reentrant=False)  # noqa: E731
    for one, right in zip(through(compiled, dy, **call), wanted):
        assert right is None or torch.equal(one, right)
    leaves, names = leaves_of(call)
    again(**leaves).backward(dy)
    for k in names:
        assert torch.equal(leaves[k].grad, getattr(wanted, k)), k

    class Layer(torch.nn.Module):
        def forward(self, x, dt, A, B, C, D, dt_bias):
            return combined(x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True)

    names = "x", "dt", "A", "B", "C", "D", "dt_bias"
    leaves, _ = leaves_of(call)
    graphed = torch.cuda.make_graphed_callables(Layer(), tuple(leaves[k] for k in names))
    for _ in range(3):
        fresh, _ = leaves_of(call)
        y = graphed(*(fresh[k] for k in names))
        for k, one in zip(names, torch.autograd.grad(y, [fresh[k] for k in names], dy)):
            assert torch.equal(one, getattr(wanted, k)), k


def test_two_streams_at_once():
    dy, call = make(SHAPE, MAMBA, torch.bfloat16, "cuda")
    wanted, streams, found = through(combined, dy, **call), [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(through(combined, dy, **call))
    torch.cuda.synchronize()
    assert all(one is None or torch.equal(one, right) for each in found for one, right in zip(each, wanted))


def test_without_gradients_nothing_is_kept_and_the_host_does_no_more():
    dy, call = make(SHAPE, MAMBA, torch.bfloat16, "cuda")
    calls, leaves = sys.modules["kernels.ssd.fused"].CALLS, leaves_of(call)[0]
    combined(**call)
    kept = calls.kept
    with torch.no_grad():
        before = torch.cuda.memory_allocated()
        y = combined(**leaves)  # prepared, as tensors are of the same kind
        assert calls.kept == kept and y.grad_fn is None
        assert torch.cuda.memory_allocated() - before <= y.nbytes + 512

    def micros(run, times=300):
        torch.cuda.synchronize()
        found = []
        for _ in range(times):
            begin = time.perf_counter()
            run()
            found.append(time.perf_counter() - begin)
            torch.cuda.synchronize()
        return sorted(found)[times // 4] * 1e6

    raw = micros(lambda: calls.run_tracked(
        (256, True, (0.0, float("inf")), False, False, torch.float32, 127), None, None, None,
        *(call.get(k) for k in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")), None, None, None,
    ))  # fmt: skip
    whole = micros(lambda: combined(**call))
    print(f"in C {raw:.1f} µs, as called {whole:.1f} µs")
    assert whole < raw + 6


def test_peak_memory_of_a_layer():
    """What is kept between the two ways is the layer's inputs: nothing but y is new."""
    dy, call = make((1, 8192, 80, 64, 1, 128), MAMBA, torch.bfloat16, "cuda")
    leaves, names = leaves_of(call)
    for _ in range(3):  # a stream keeps up to 16 MiB for its prepared calls, from the second on
        combined(**leaves).backward(dy)
    for k in names:
        leaves[k].grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = combined(**leaves)
    assert torch.cuda.memory_allocated() - before <= y.nbytes + (1 << 20)


def test_what_runs_for_mamba2_says_nothing():
    """The 2.7B model's layer goes to the fastest rung, forward and backward."""
    dy, call = make((1, 256, 80, 64, 1, 128), MAMBA, torch.bfloat16, "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        through(combined, dy, **call)


def test_inside_a_layer_of_mamba_ssm(monkeypatch):
    """In the place of its own function: the same loss, and the same gradients of all weights and of the input."""
    if (modules := peers.layer()) is None:
        pytest.skip("needs mamba_ssm")
    for module in [found for name, found in sys.modules.items() if name.startswith("mamba_ssm.ops.triton")]:
        for value in vars(module).values():
            if hasattr(value, "configs") and hasattr(value, "cache"):  # tuned among many, which takes minutes
                monkeypatch.setattr(value, "configs", value.configs[-1:])
    torch.manual_seed(0)
    layer = modules.mamba2.Mamba2(
        256, d_state=128, headdim=64, use_mem_eff_path=False, device="cuda", dtype=torch.bfloat16
    )
    given, wanted = torch.randn(2, 300, 256, device="cuda", dtype=torch.bfloat16), None
    for function in (modules.mamba2.mamba_chunk_scan_combined, ssd.mamba_chunk_scan_combined):
        monkeypatch.setattr(modules.mamba2, "mamba_chunk_scan_combined", function)
        u = given.clone().requires_grad_()
        loss = layer(u).float().square().mean()
        found = [loss, *torch.autograd.grad(loss, [u, *layer.parameters()])]
        wanted = wanted or found
    for name, one, other in zip(("loss", "u", *dict(layer.named_parameters())), found, wanted):
        most = 6e-2 if name in ("A_log", "dt_bias") else 2e-2  # sums over all tokens, whose addends nearly cancel
        assert (one - other).float().norm() <= most * other.float().norm(), name
