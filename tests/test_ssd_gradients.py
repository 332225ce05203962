"""kernels.ssd under autograd: gradients against float64, torch.compile, checkpoints, what is kept, and bad input."""

import functools
import sys
import timeit

import pytest
import torch
from ssd_backward_cases import check, compare, make
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kernels import ssd, ssd_backward
from kernels.ssd import dropin
from kernels.ssd_backward import Gradients

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ALLOWED = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SHAPE, SHORT = (1, 70, 2, 24, 1, 40), (1, 20, 2, 16, 1, 16)
CHOICE = sys.modules["kernels.ssd_backward.choice"]


@pytest.fixture(autouse=True)
def by_quick_rungs(monkeypatch):
    """What runs under it all is tested elsewhere; here products of torch are quick."""
    monkeypatch.setattr(CHOICE, "FASTEST", ())
    monkeypatch.setattr(dropin, "fused", sys.modules["kernels.ssd.five"].five)


def combined(x, dt, A, B, C, **options):
    return ssd.mamba_chunk_scan_combined(x, dt, A, B, C, 64, **options)


FUNCTIONS = {"five": ssd.five, "mamba_chunk_scan_combined": combined}


def leaves_of(call):
    """The call with tensors that ask for gradients, and their names."""
    floats = [k for k, v in call.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return call | {k: call[k].detach().clone().requires_grad_() for k in floats}, floats


def through(function, dy, dfinal_states=None, **call):
    """Gradients as autograd gets them."""
    call, names = leaves_of(call)
    found = function(**call, return_final_states=dfinal_states is not None)
    results, given = ([found], [dy]) if dfinal_states is None else ([*found], [dy, dfinal_states])
    gradients = dict(zip(names, torch.autograd.grad(results, [call[k] for k in names], given)))
    return Gradients(*map(gradients.get, Gradients._fields))


# Right


@pytest.mark.parametrize(
    "name", ["a token less", "groups", "sequences", "few columns", "dt in float32", "dt as it is, below 0 too"]
)
def test_gradients_are_right(name):
    check(lambda dy, **call: through(ssd.five, dy, **call), name, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_in_each_dtype_with_everything(function, dtype):
    dy, call = make(SHAPE, dtype=dtype)
    compare("everything", through(function, dy, **call), dy, call, ALLOWED[dtype])


def test_fused_on_the_simt_machine():
    """Its forward in CUDA C++, and the gradients of the very same call."""
    dy, call = make((1, 70, 2, 64, 1, 64), "D, dt_bias, softplus", torch.float16)
    assert ssd.which(**{k: v for k, v in call.items() if k != "dt_softplus"})[0] == "fused"
    compare("fused", through(ssd.fused, dy, **call), dy, call, 3e-3)


def test_only_what_is_asked_for():
    """Some tensors ask, some do not; a gradient of final states alone; and one that comes as autograd expands it."""
    dy, call = make(SHORT, dtype=torch.float32)
    wanted = through(ssd.five, dy, **call)
    dfinal = call.pop("dfinal_states")
    asking = call | {"dt_bias": call["dt_bias"].requires_grad_()}
    y, final = ssd.five(**asking, return_final_states=True)
    assert y.requires_grad and final.requires_grad
    (found,) = torch.autograd.grad([y, final], [asking["dt_bias"]], [dy, dfinal])
    assert torch.equal(found, wanted.dt_bias)

    _, final = ssd.five(**asking, return_final_states=True)
    (found,) = torch.autograd.grad((final * dfinal).sum(), [asking["dt_bias"]])
    compared = through(ssd.five, 0 * dy, dfinal, **{k: v.detach() if k == "dt_bias" else v for k, v in call.items()})
    assert torch.allclose(found, compared.dt_bias, rtol=1e-6, atol=1e-7)

    (found,) = torch.autograd.grad(ssd.five(**asking).sum(), [asking["dt_bias"]])
    assert torch.equal(
        found,
        through(
            ssd.five, torch.ones_like(dy), **{k: v.detach() if k == "dt_bias" else v for k, v in call.items()}
        ).dt_bias,
    )


def test_tensors_that_lie_across():
    """mamba_chunk_scan_combined copies what does not fit, and its gradients are of what it was given."""
    dy, call = make((2, 40, 4, 16, 2, 16), dtype=torch.float32, begins=(0, 17))
    wanted = through(combined, dy, **call)
    across = {name: call[name].transpose(1, -1).contiguous().transpose(1, -1) for name in ("x", "B", "C", "z", "dt")}
    across |= {"seq_idx": call["seq_idx"].long(), "initial_states": call["initial_states"].mT.contiguous().mT}
    leaves = {
        k: v.requires_grad_()
        for k, v in (call | across).items()
        if isinstance(v, torch.Tensor) and v.is_floating_point()
    }
    dfinal = leaves.pop("dfinal_states").detach()
    call.pop("dfinal_states")
    found = combined(**call | across | leaves, return_final_states=True)
    for one, k in zip(torch.autograd.grad(found, list(leaves.values()), [dy, dfinal]), leaves):
        assert torch.equal(one, getattr(wanted, k)), k


def test_cu_seqlens_means_what_it_does_in_each_forward():
    dy, call = make((1, 50, 2, 16, 1, 16), "D, dt_bias, softplus", torch.float32, ends=(0, 17, 17, 50))
    compare("five", through(ssd.five, dy, **call), dy, call, 2e-5)
    found = through(combined, dy, **call)  # as mamba_ssm: it counts for states of sequences alone
    del call["cu_seqlens"]
    compare("combined", found, dy, call, 2e-5)


# Around it


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_training_step_compiles_whole(function, backend):
    dy, call = make(SHORT, dtype=torch.float32)
    wanted = through(function, dy, **call)
    compiled = torch.compile(lambda **call: function(**call), fullgraph=True, backend=backend)
    for found, other in zip(through(compiled, dy, **call), wanted):
        assert torch.equal(found, other)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_training_step_compiles_with_no_options(function):
    dy, call = make(SHORT, dtype=torch.float32)
    call = {name: call[name] for name in ("x", "dt", "A", "B", "C")}
    wanted = through(function, dy, **call)
    compiled = torch.compile(lambda **call: function(**call), fullgraph=True, backend="aot_eager")
    for found, other in zip(through(compiled, dy, **call), wanted):
        assert found is other is None or torch.equal(found, other)


def test_the_operators_states_of_sequences_have_no_gradient():
    _, call = make(SHORT, dtype=torch.float32)
    x, *rest = (call[name][:1] if call[name].ndim > 1 else call[name] for name in ("x", "dt", "A", "B", "C"))
    ends = torch.tensor([0, x.shape[1]], dtype=torch.int32)
    *_, states = torch.ops.matmul_to_mamba.ssd_five(
        x.requires_grad_(), *rest, cu_seqlens=ends, return_varlen_states=True
    )
    with pytest.raises(NotImplementedError, match="the states of sequences have no gradient"):
        states.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant):
    dy, call = make(SHORT, dtype=torch.float32)
    del call["dfinal_states"]
    wanted = through(combined, dy, **call)

    def again(x, **rest):
        if not reentrant:
            return checkpoint(lambda x: combined(x, **rest), x, use_reentrant=False)
        others = [k for k, v in rest.items() if isinstance(v, torch.Tensor)]  # which it tracks by position alone
        run = lambda x, *tensors: combined(x, **rest | dict(zip(others, tensors)))  # noqa: E731
        return checkpoint(run, x, *(rest[k] for k in others), use_reentrant=True)

    call, names = leaves_of(call)
    again(**call).backward(dy)
    for k in names:
        assert torch.equal(call[k].grad, getattr(wanted, k)), k


def test_who_looks_on_sees_operators():
    """Eager training goes past PyTorch's dispatcher; selective checkpoints, counters of flops and the like do not."""
    dy, call = make(SHORT, dtype=torch.float32)
    del call["dfinal_states"]
    wanted, seen = through(combined, dy, **call), []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def must_save(context, function, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if "mamba_chunk" in str(function) else CheckpointPolicy.PREFER_RECOMPUTE

    leaves, names = leaves_of(call)
    with Look():
        combined(**leaves).backward(dy)
    assert "matmul_to_mamba.mamba_chunk_scan_combined.default" in seen
    contexts = functools.partial(create_selective_checkpoint_contexts, must_save)
    others, names = leaves_of(call)
    run = lambda x: combined(**others | {"x": x}).square()  # noqa: E731
    checkpoint(run, others["x"], use_reentrant=False, context_fn=contexts).backward(dy)
    plain, _ = leaves_of(call)
    combined(**plain).square().backward(dy)
    for k in names:
        assert torch.equal(leaves[k].grad, getattr(wanted, k)) and torch.equal(others[k].grad, plain[k].grad), k


def test_autocast_and_a_layer_that_learns():
    """Half precision inside, float32 parameters outside: a step of gradient descent makes the loss smaller."""
    torch.manual_seed(0)
    d, H, P, N = 24, 2, 16, 16
    into, out = torch.nn.Linear(d, 2 * H * P + 2 * N + H), torch.nn.Linear(H * P, d)
    A_log, D, bias = (torch.nn.Parameter(torch.zeros(H)) for _ in range(3))
    inputs, targets = torch.randn(2, 30, d), torch.randn(2, 30, d)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            z, x, B, C, dt = into(inputs).split([H * P, H * P, N, N, H], -1)
            x, z, B, C = x.unflatten(-1, (H, P)), z.unflatten(-1, (H, P)), B[:, :, None], C[:, :, None]
            y = combined(x, dt, -A_log.exp(), B, C, D=D, z=z, dt_bias=bias, dt_softplus=True)
            assert y.dtype is torch.bfloat16
            return (out(y.flatten(2)).float() - targets).square().mean()

    learning = [*into.parameters(), *out.parameters(), A_log, D, bias]
    optimiser, losses = torch.optim.SGD(learning, 0.1), []
    for _ in range(5):
        losses.append(loss())
        optimiser.zero_grad()
        losses[-1].backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learning)
        optimiser.step()
    assert losses == sorted(losses, reverse=True)


# What it costs where nobody asks


def test_inputs_alone_are_kept_and_nothing_where_nobody_asks():
    dy, call = make(SHORT, dtype=torch.float32)
    del call["dfinal_states"]
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = combined(**call)
        assert not kept and not y.requires_grad and y.grad_fn is None
        leaves, names = leaves_of(call)
        with torch.no_grad():
            assert combined(**leaves).grad_fn is None
        assert not kept
        assert combined(**leaves).grad_fn is not None
    assert {t.data_ptr() for t in kept} == {leaves[k].data_ptr() for k in names}


@pytest.mark.parametrize("name", ["fused", "mamba_chunk_scan_combined"])
def test_prepared_calls_are_asked_before_anything_else(name, monkeypatch):
    """A call that is prepared ends in C: no look at gradients in Python, and no operator, comes before it."""
    function, seen = getattr(ssd, name), []
    calls = sys.modules["kernels.ssd.fused"].CALLS
    monkeypatch.setattr(calls, "run_tracked", lambda *given: seen.append(given) or ("y", "final", None))
    tensors = [object()] * 5  # nothing of them is read
    assert function(*tensors, chunk_size=64) == "y"
    assert function(*tensors, chunk_size=64, return_final_states=True) == ("y", "final")
    options, *rest = seen[1]
    assert options[:5] == (64, False, (0.0, float("inf")), True, False) and rest[3:8] == tensors
    assert len(rest) == 3 + 12  # outputs, and what Calls.preparing is given in kernels/ssd/fused.py


def test_the_question_costs_little():
    """All nine tensors are asked, where a call is not prepared: less than a microsecond."""
    dy, call = make(SHORT, dtype=torch.float32)
    tensors = [call[k] for k in Gradients._fields]

    def asked(x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_states=None):
        return x

    from lab import operators

    wrapped = operators._wrapped(asked, None, Gradients._fields, None)

    def seconds(f):
        return min(timeit.repeat("f(*t)", globals={"f": f, "t": tensors}, number=20_000, repeat=15)) / 20_000

    cost = seconds(wrapped) - seconds(asked)
    print(f"{cost * 1e9:.0f} ns")
    assert cost < 2e-6


# Bad input


def test_what_has_no_gradient_is_named_before_anything_runs(monkeypatch):
    dy, call = make((1, 50, 2, 16, 1, 16), "D", torch.float32, ends=(0, 17, 50))
    leaves, _ = leaves_of(call)
    monkeypatch.setattr(sys.modules["kernels.ssd.five"], "_run", None)  # nothing may run
    monkeypatch.setattr(sys.modules["kernels.ssd.five"], "float32", None)
    for name, function in FUNCTIONS.items():
        with pytest.raises(
            NotImplementedError, match=f"{name}: return_varlen_states must be False where a tensor asks"
        ):
            function(**leaves, return_varlen_states=True)
    with pytest.raises(NotImplementedError, match="five: out must be None where a tensor asks for a gradient"):
        ssd.five(**leaves, out=torch.empty(1, 50, 2, 16))
    with pytest.raises(TypeError, match="five: D must be"):
        ssd.five(**leaves | {"D": 3})


def test_they_are_taken_where_nobody_asks():
    dy, call = make((1, 50, 2, 16, 1, 16), "D", torch.float32, ends=(0, 17, 50))
    leaves, _ = leaves_of(call)
    with torch.no_grad():
        y, states = ssd.five(**leaves, return_varlen_states=True)
    assert states.shape[0] == 2 and not y.requires_grad
    out = torch.empty(1, 50, 2, 16)
    assert ssd.five(**call, out=out) is out


@pytest.mark.parametrize("name", ["x", "seq_idx", "z"])
def test_a_tensor_that_was_changed_in_place(name):
    dy, call = make(SHORT, dtype=torch.float32, begins=(0, 9))
    del call["dfinal_states"]
    leaves, _ = leaves_of(call)
    leaves["x"] = leaves["x"] * 1  # leaves may not be changed
    leaves["z"] = leaves["z"] * 1
    y = combined(**leaves)
    leaves[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_a_kernel_that_writes_in_place_is_noticed():
    dy, call = make(SHORT, dtype=torch.float32)
    del call["dfinal_states"]
    leaves, _ = leaves_of(call)
    z = leaves["z"] = torch.empty_like(call["z"])
    y = combined(**leaves)
    torch.ops.matmul_to_mamba.ssd_five_out(*(call[k] for k in ("x", "dt", "A", "B", "C")), out=z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_double_backward_says_that_it_is_not_there():
    dy, call = make(SHORT, dtype=torch.float32)
    del call["dfinal_states"]
    leaves, _ = leaves_of(call)
    (first,) = torch.autograd.grad(combined(**leaves).square().sum(), [leaves["x"]], create_graph=True)
    with pytest.raises(NotImplementedError, match="ssd_backward: gradients of gradients are not computed"):
        first.sum().backward()
    assert torch.isfinite(first).all()


@pytest.mark.parametrize("asks", [False, True])
def test_tangents_are_refused_and_not_lost(asks):
    """Those of forward-mode differentiation: by the functions, by the operator, and under torch.func.jvp."""
    dy, call = make(SHORT, dtype=torch.float32)
    del call["dfinal_states"]
    call["B"].requires_grad_(asks)
    with forward_ad.dual_level():
        assert torch.equal(combined(**call), combined(**call))  # nobody has one
        given = call | {"C": forward_ad.make_dual(call["C"], torch.ones_like(call["C"]))}
        for name, function in FUNCTIONS.items():
            with pytest.raises(NotImplementedError, match=f"{name}: tangents, of forward-mode differentiation"):
                function(**given)
        with pytest.raises(NotImplementedError, match="tangents|jvp"):  # PyTorch's own words where gradients are asked
            torch.ops.matmul_to_mamba.ssd_five(*(given[k] for k in ("x", "dt", "A", "B", "C")))
    with pytest.raises(NotImplementedError, match="five: tangents"):
        torch.func.jvp(lambda x: ssd.five(**call | {"x": x}), (call["x"],), (call["x"],))
    assert combined(**call).shape == dy.shape


def test_the_fake_refuses_what_the_operator_does():
    dy, call = make(SHORT, dtype=torch.float32)
    operator = torch.ops.matmul_to_mamba.ssd_backward_plain
    given = dy, *(call[k] for k in ("x", "dt", "A", "B", "C"))
    dfinal = call["dfinal_states"]
    for wrong, error, said in (
        (dfinal[:, :1].contiguous(), ValueError, "dfinal_states must have shape"),
        (dfinal.double(), TypeError, "dfinal_states must be of"),
        (dfinal.mT.contiguous().mT, ValueError, "dfinal_states must be contiguous"),
    ):
        with pytest.raises(error, match=said):
            operator(*given, dfinal_states=wrong)
        with FakeTensorMode() as mode, pytest.raises(error, match=said):
            operator(*map(mode.from_tensor, given), dfinal_states=mode.from_tensor(wrong))


def test_on_the_cpu_what_would_take_minutes_is_said(monkeypatch):
    """And done by torch's products in the kernels' place."""

    def few(*given, **options):
        raise AssertionError("this would have taken minutes")

    monkeypatch.setattr(CHOICE, "FASTEST", ((few, lambda *given, **options: ""),))
    CHOICE._say_once.cache_clear()
    dy, call = make((1, 600, 2, 16, 1, 16), "D", torch.float32)
    with pytest.warns(
        UserWarning, match="more than 512 tokens times heads would take a kernel minutes on the CPU.*plain runs"
    ):
        found = through(ssd.five, dy, **call)
    compare("long", found, dy, call, 2e-5)
    assert ssd_backward.which(dy, **call)[0] == "plain"
    short = {k: v[:, :9].contiguous() if v.ndim > 1 else v for k, v in call.items()}
    assert ssd_backward.which(dy[:, :9].contiguous(), **short) == ("few", "")


def test_a_rung_that_cannot_says_why_and_the_next_one_runs(monkeypatch):
    def fused(*given, **options):
        raise AssertionError

    monkeypatch.setattr(
        CHOICE, "FASTEST", ((fused, lambda problem, *given, **options: f"headdim is {problem.headdim}"),)
    )
    dy, call = make(SHORT, dtype=torch.float32)
    assert ssd_backward.which(dy, **call) == ("plain", "headdim is 16")
    CHOICE._say_once.cache_clear()
    with pytest.warns(UserWarning, match="headdim is 16. So plain runs, and takes longer"):
        ssd_backward.gradients(dy, **call)
