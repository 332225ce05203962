"""Chapter 05's kernels on the SIMT machine: unchanged CUDA C++, small shapes that hurt."""

import numpy as np
import pytest
import torch

import ref.fusion as ref
from kernels import fusion
from kernels.fusion import launches
from lab.stream import still_running

pytest.importorskip("simt")

DTYPES = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # what one or two roundings of the result may cost
SHAPES = [(7, 1), (5, 7), (1, 33), (37, 130), (133, 8), (3, 136), (2, 264), (9, 2056)]  # rows, cols


def numbers(*shape, dtype=torch.float16, scale=1.0):
    """A random tensor of unit size between NaNs: one element too far, and the result is NaN."""
    count = int(np.prod(shape))
    home = torch.full((count + 64,), torch.nan, dtype=dtype)
    inside = home[32 : 32 + count].view(shape)
    inside.copy_(torch.randn(shape) * scale)
    return inside


def matrix(rows, cols, dtype):
    return numbers(rows, cols, dtype=dtype, scale=cols**-0.5)


def poisoned(count, dtype):
    """An output full of NaN, between guards."""
    home = torch.full((count + 64,), 1234.0, dtype=dtype)
    home[32 : 32 + count] = torch.nan
    return home, home[32 : 32 + count]


def check(function, reference, args, count, late=(0,)):
    """Run on poisoned output, hold against the reference, and see that nothing else was touched.

    late: which of the arguments a kernel ahead may still write when this one starts.
    """
    dtype = args[0].dtype
    home, out = poisoned(count, dtype)
    before = [a.clone() for a in args]
    still_running(writes=[args[i] for i in late] + [out])
    assert function(*args, out=out, pdl=True) is out
    close(out, reference(*(a.double().numpy() for a in args)), dtype)
    assert (home[:32] == 1234).all() and (home[-32:] == 1234).all()
    assert all(torch.equal(a, b) for a, b in zip(args, before))


def close(out, wanted, dtype, times=1):
    error = np.linalg.norm(out.double().numpy() - wanted)
    assert error <= times * DTYPES[dtype] * max(np.linalg.norm(wanted), wanted.size**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols", SHAPES)
def test_gemv_residual(rows, cols, dtype):
    args = matrix(rows, cols, dtype), numbers(cols, dtype=dtype), numbers(rows, dtype=dtype)
    check(fusion.gemv_residual, ref.gemv_residual, args, rows, late=(1, 2))
    check(fusion.down_residual, ref.down_residual, args, rows, late=(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols", SHAPES)
def test_norm_qkv(rows, cols, dtype):
    vectors = numbers(cols, dtype=dtype, scale=3), numbers(cols, dtype=dtype)
    args = *vectors, matrix(rows, cols, dtype), matrix(1, cols, dtype), matrix(rows + 2, cols, dtype)
    check(fusion.norm_qkv, ref.norm_qkv, args, 2 * rows + 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols", SHAPES)
def test_norm_glu(rows, cols, dtype):
    vectors = numbers(cols, dtype=dtype, scale=0.1), numbers(cols, dtype=dtype)
    check(fusion.norm_glu, ref.norm_glu, (*vectors, matrix(rows, cols, dtype), matrix(rows, cols, dtype)), rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 31, 33, 1025, 2050])
def test_the_pieces(count, dtype):
    a, b = numbers(count, dtype=dtype), numbers(count, dtype=dtype)
    check(fusion.rmsnorm, ref.rmsnorm, (a, b), count)
    check(fusion.add, np.add, (a, b), count, late=(0, 1))
    check(fusion.silu_mul, lambda gate, up: ref.silu(gate) * up, (a, b), count, late=(0, 1))


@pytest.mark.parametrize("cols", [4104, 16392, 32776])
def test_columns_that_need_several_words_a_thread(cols):
    """Past 512 · 8 columns: two words a thread, then five, partly idle; then nine, which are too many."""
    W, x, norm = matrix(2, cols, torch.float16), numbers(cols), numbers(cols)
    check(fusion.gemv_residual, ref.gemv_residual, (W, x, numbers(2)), 2, late=(1, 2))
    check(fusion.norm_qkv, ref.norm_qkv, (x, norm, W[:1], W[1:], W[:1]), 3)
    check(fusion.norm_glu, ref.norm_glu, (x, norm, W[:1], W[1:]), 1)


@pytest.fixture
def small_card(monkeypatch):
    """One multiprocessor, so that blocks own many groups and the ring goes round."""
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 1)
    launches.plan.cache_clear()
    yield
    launches.plan.cache_clear()


@pytest.mark.parametrize("rows, cols", [(16 * 4 * 9 + 3, 8), (99, 1160), (23, 4104)])
def test_more_rows_than_one_round_of_blocks(small_card, rows, cols):
    """A block's groups then lie in two matrices, too."""
    W, x, norm = matrix(rows, cols, torch.float16), numbers(cols), numbers(cols)
    grid, *_, rows_in_group, stages = launches.plan(x.device, rows, cols, 1)
    assert rows > grid * rows_in_group * stages
    check(fusion.gemv_residual, ref.gemv_residual, (W, x, numbers(rows)), rows, late=(1, 2))
    check(fusion.norm_qkv, ref.norm_qkv, (x, norm, W[: rows // 2], W[rows // 2 :], W[:1]), rows + 1)
    check(fusion.norm_glu, ref.norm_glu, (x, norm, W, W.flip(0)), rows)


@pytest.mark.parametrize("which", range(6))
def test_an_address_that_is_no_multiple_of_16_bytes(which):
    """Any one of the inputs, or the output."""

    def placed(i, *shape):
        count = int(np.prod(shape))
        home = numbers(count + 1)  # the guards of NaN are one element further away on one side
        home[0 if i == which else -1] = torch.nan
        return home[int(i == which) :][:count].view(shape)

    x, norm, q, k, v = (placed(i, *shape) for i, shape in enumerate([(64,), (64,), (5, 64), (3, 64), (5, 64)]))
    for function, reference, args in (
        (fusion.norm_qkv, ref.norm_qkv, (x, norm, q, k, v)),
        (fusion.norm_glu, ref.norm_glu, (x, norm, q, v)),
        (fusion.gemv_residual, ref.gemv_residual, (k, x, norm[:3])),
    ):
        wanted = reference(*(t.double().numpy() for t in args))
        out = placed(5, wanted.size)
        function(*args, out=out)
        close(out, wanted, torch.float16, times=2)


def test_a_large_gate_does_not_overflow():
    x, one = numbers(8), torch.ones(8).half()
    gate = torch.full((2, 8), 60.0).half() * torch.tensor([[1.0], [-1.0]]).half()
    out = fusion.norm_glu(x.abs() + 1, one, gate, torch.full((2, 8), 0.1).half())
    assert torch.isfinite(out).all() and out[0] > 100 and out[1].abs() < 1e-3


# The layer


def layer(hidden, kv_rows, ffn, dtype):
    vectors = [numbers(hidden, dtype=dtype) for _ in range(2)]
    shapes = [(hidden, hidden), (kv_rows, hidden), (kv_rows, hidden), (hidden, hidden)]
    q, k, v, o = (matrix(*shape, dtype) for shape in shapes)
    gate, up, down = (matrix(*shape, dtype) for shape in ((ffn, hidden), (ffn, hidden), (hidden, ffn)))
    return vectors[0], q, k, v, o, vectors[1], gate, up, down


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden, kv_rows, ffn", [(64, 16, 136), (8, 1, 8), (264, 7, 72), (33, 5, 70)])
def test_the_layer_in_all_its_steps(hidden, kv_rows, ffn, dtype):
    weights = layer(hidden, kv_rows, ffn, dtype)
    it = fusion.DecoderLayer(*weights)
    steps = [it.unfused, it.fused, it.one_launch] if hidden % 8 == 0 else [it.unfused, it.fused]
    for step in steps:
        for pdl in (False, True):  # again, so that what the first left behind shows
            x = numbers(hidden, dtype=dtype)
            y, qkv = ref.decoder_layer(*(t.double().numpy() for t in (x, *weights)))
            it.y.fill_(torch.nan), it.qkv.fill_(torch.nan)
            still_running(writes=(x,))
            assert step(x, pdl=pdl) is it.y
            close(it.y, y, dtype, times=3)
            close(it.qkv, qkv, dtype)


def test_the_barrier_is_ready_for_the_next_launch():
    it = fusion.DecoderLayer(*layer(64, 16, 136, torch.float16))
    x = numbers(64)
    first = it.one_launch(x).clone()
    for _ in range(3):
        it.y.fill_(torch.nan)
        assert torch.equal(it.one_launch(x), first)


def test_what_one_launch_cannot_do():
    it = fusion.DecoderLayer(*layer(33, 5, 70, torch.float16))
    with pytest.raises(ValueError, match="one_launch: hidden and ffn must be multiples of 8.*got hidden 33 and ffn 70"):
        it.one_launch(numbers(33))


@pytest.mark.parametrize("name", ["unfused", "fused", "one_launch", "unfused_feed_forward", "feed_forward"])
def test_a_layer_is_not_its_own_input(name):
    """Neither its output nor a buffer in between: x is read again after they have been written. Refused at once."""
    it = fusion.DecoderLayer(*layer(8, 1, 8, torch.float16))
    half = "feed_forward" in name
    written = [it.y, it.normed, it.product, it.gate, it.up, it.a] + ([] if half else [it.h, it.q, it.qkv[1:9]])
    before = [buffer.fill_(i) for i, buffer in enumerate((it.qkv, it.h, it.a, it.y))]
    for buffer in written:
        with pytest.raises(ValueError, match=f"^{name}: [xh] must not be a buffer that the layer writes to, got its "):
            getattr(it, name)(buffer)
    assert all((buffer == i).all() for i, buffer in enumerate(before))
    getattr(it, name)(it.h if half else numbers(8))


@pytest.mark.parametrize("name", ["unfused", "fused", "one_launch"])
def test_layers_in_a_row(name):
    """The second one's input is the first one's output, as in a model; then its second half alone, again."""
    weights = [layer(40, 3, 72, torch.float16) for _ in range(2)]
    first, second = (fusion.DecoderLayer(*w) for w in weights)
    x = numbers(40)
    y = getattr(second, name)(getattr(first, name)(x, pdl=True), pdl=True)
    wanted = x.double().numpy()
    for w in weights:
        wanted, _ = ref.decoder_layer(wanted, *(t.double().numpy() for t in w))
    close(y, wanted, torch.float16, times=5)
    close(second.feed_forward(second.h).clone(), y.double().numpy(), torch.float16, times=2)
    close(second.unfused_feed_forward(second.h), y.double().numpy(), torch.float16, times=2)


def test_a_run_that_was_interrupted_leaves_the_barrier_usable(monkeypatch):
    """On the SIMT machine: on a card nothing can stop a launch half-way."""
    it, x = fusion.DecoderLayer(*layer(64, 16, 136, torch.float16)), numbers(64)
    first = it.one_launch(x).clone()

    def interrupted(*args, **options):
        it.barrier.fill_(3)  # as if three blocks had come
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lab.cuda.Kernel.__call__", interrupted)
        it.one_launch(x)
    assert torch.equal(it.one_launch(x), first)


def test_work_counts_every_weight_once():
    it = fusion.DecoderLayer(*layer(8, 2, 24, torch.float16))
    weights = 8 * 8 * 2 + 2 * 8 * 2 + 3 * 8 * 24
    moved, flops = it.work()
    assert flops == 2 * weights and moved == 2 * (weights + 2 * 8 + 8 + 2 * 2 + 2 * 8)
    assert it.feed_forward_work() == (2 * (3 * 8 * 24 + 3 * 8), 2 * 3 * 8 * 24)


# Arguments


def good():
    return {"W": matrix(5, 8, torch.float16), "x": numbers(8), "residual": numbers(5)}


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"W": np.zeros((5, 8))}, TypeError, "W must be a torch tensor, got ndarray"),
        ({"x": torch.zeros(8)}, TypeError, "x must be of torch.float16 or torch.bfloat16, got torch.float32"),
        ({"W": torch.zeros(5, 8).bfloat16()}, TypeError, "W must be of torch.float16, like the first tensor, got"),
        ({"W": torch.zeros(5, 9).half()}, ValueError, r"W must have shape \(rows, 8\), none of it 0, got \(5, 9\)"),
        ({"W": torch.zeros(0, 8).half()}, ValueError, r"W must have shape \(rows, 8\), none of it 0, got \(0, 8\)"),
        ({"W": torch.zeros(8, 5).half().t()}, ValueError, "W must be contiguous, got shape"),
        ({"residual": torch.zeros(4).half()}, ValueError, r"residual must have shape \(5,\), none of it 0, got \(4,\)"),
        ({"residual": torch.zeros(5, device="meta").half()}, ValueError, "residual must be on cpu, like the first"),
        ({"x": torch.zeros(8, device="meta").half()}, ValueError, "x must be on the CPU or on a CUDA device, got"),
        (
            {"W": torch.zeros(5, 8).half().to_sparse()},
            ValueError,
            "W must be a dense tensor, got layout torch.sparse_coo",
        ),
        (
            {"x": torch.frombuffer(bytearray(17), dtype=torch.float16, offset=1)},
            ValueError,
            "x must be aligned to its element size",
        ),
        ({"out": torch.zeros(6).half()}, ValueError, r"out must have shape \(5,\)"),
        ({"out": torch.zeros(5).half().requires_grad_()}, ValueError, "out must not require gradients, got a tensor"),
    ],
)
def test_arguments_are_refused_by_name(change, error, message):
    out = torch.full((5,), 7.0).half()
    with pytest.raises(error, match="gemv_residual: " + message):
        fusion.gemv_residual(**({"out": out} | good() | change))
    assert (out == 7).all()


def test_out_must_lie_apart():
    args = good()
    with pytest.raises(ValueError, match="gemv_residual: out must not share memory with residual"):
        fusion.gemv_residual(**args, out=args["residual"])
    with pytest.raises(ValueError, match="norm_glu: W_up must have shape"):
        fusion.norm_glu(args["x"], args["x"], args["W"], args["W"][:3])
    with pytest.raises(ValueError, match="norm_qkv: Wv must have shape"):
        fusion.norm_qkv(args["x"], args["x"], args["W"], args["W"], torch.zeros(2, 9).half())
    with pytest.raises(ValueError, match="DecoderLayer: Wv must have shape"):
        weights = list(layer(8, 2, 8, torch.float16))
        weights[3] = weights[3][:1]
        fusion.DecoderLayer(*weights)


@pytest.mark.parametrize(
    "eps, error, message",
    [
        ("1e-5", TypeError, "eps must be a number, got str"),
        (None, TypeError, "eps must be a number, got NoneType"),
        (True, TypeError, "eps must be a number, got bool"),
        (torch.tensor(1e-5), TypeError, "eps must be a number, got Tensor"),
        (-1e-5, ValueError, "eps must be 0 or more, and finite, got -1e-05"),
        (float("nan"), ValueError, "eps must be 0 or more, and finite, got nan"),
    ],
)
def test_eps_is_refused_by_name(eps, error, message):
    x, W = numbers(8), matrix(5, 8, torch.float16)
    calls = {"rmsnorm": lambda: fusion.rmsnorm(x, x, eps), "norm_qkv": lambda: fusion.norm_qkv(x, x, W, W, W, eps)}
    calls["norm_glu"] = lambda: fusion.norm_glu(x, x, W, W, eps)
    calls["DecoderLayer"] = lambda: fusion.DecoderLayer(*layer(8, 1, 8, torch.float16), eps)
    for name, call in calls.items():
        with pytest.raises(error, match=f"^{name}: {message}$"):
            call()


def test_eps_is_added_to_the_mean_square():
    """It decides where x is small: a kernel that leaves it out, or adds it to the sum, is far off."""
    x, norm, W = numbers(72, scale=1e-3), numbers(72), matrix(6, 72, torch.float16)
    for eps in (3e-6, np.float32(1e-3)):
        for function, reference, args in (
            (fusion.rmsnorm, ref.rmsnorm, (x, norm)),
            (fusion.norm_qkv, ref.norm_qkv, (x, norm, W, W, W)),
            (fusion.norm_glu, ref.norm_glu, (x, norm, W, W)),
        ):
            wanted = reference(*(a.double().numpy() for a in args), float(eps))
            error = np.linalg.norm(function(*args, eps).double().numpy() - wanted)
            assert error <= 2e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", "attention_norm Wq Wk Wv Wo ffn_norm W_gate W_up W_down".split())
def test_a_layer_refuses_its_weights_by_name(name):
    weights = dict(zip(fusion.DecoderLayer.names, layer(8, 2, 24, torch.float16)))
    for value, error in ((None, TypeError), (torch.zeros(3, 3, 3).half(), ValueError), (torch.zeros(8, 8), TypeError)):
        with pytest.raises(error, match=f"^DecoderLayer: {name} must "):
            fusion.DecoderLayer(**(weights | {name: value}))


# What the machine counts


def test_no_kernel_races(monkeypatch, small_card):
    from lab import cuda

    launch = cuda.Kernel.__call__
    monkeypatch.setattr(
        cuda.Kernel,
        "__call__",
        lambda self, *args, pdl=False, **options: launch(self, *args, check_races=True, **options),
    )
    for hidden, kv_rows, ffn in ((264, 7, 72), (40, 1, 328)):
        it = fusion.DecoderLayer(*layer(hidden, kv_rows, ffn, torch.float16))
        it.unfused(numbers(hidden))
        it.fused(numbers(hidden))
        it.one_launch(numbers(hidden))
    fusion.DecoderLayer(*layer(37, 5, 70, torch.float16)).fused(numbers(37))  # a warp for a row
    x, norm, W = numbers(1160), numbers(1160), matrix(99, 1160, torch.float16)  # the ring goes round
    fusion.norm_qkv(x, norm, W, W[:2], W[:1])
    fusion.norm_glu(x, norm, W, W)
    fusion.gemv_residual(W, x, numbers(99))


def test_every_weight_is_asked_for_once(monkeypatch):
    """The fused kernels' global loads are the weights and what each block reads of x: no round trip of gate and up."""
    from lab import cuda

    reports, launch = [], cuda.Kernel.__call__
    monkeypatch.setattr(cuda.Kernel, "__call__", lambda *args, **options: reports.append(launch(*args, **options)))
    x, one, gate, up = numbers(512), numbers(512), matrix(64, 512, torch.float16), matrix(64, 512, torch.float16)
    fusion.norm_glu(x, one, gate, up)
    sectors = reports[0].counters["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"]
    blocks = 32  # two gates and two partners in each
    assert sectors == (gate.nbytes + up.nbytes + blocks * (x.nbytes + one.nbytes)) // 32
