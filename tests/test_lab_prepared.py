"""Calls that are prepared once for each kind (lab/prepared), on a card that is this CPU."""

import random
import threading

import made_up_driver
import numpy as np
import pytest
import torch

from kernels import gemv as topic
from lab import as_called, cuda
from lab.prepared import Calls, native, scratch, supply

gemv = topic.gemv


@pytest.fixture
def driver(monkeypatch):
    """A made-up driver, which multiplies where gemv is launched."""

    def does(function, shape, values):
        if function.name != "gemv":
            return
        W, x, y, rows, cols = values
        dtype = driver.dtype
        W, x = made_up_driver.array(W, (rows, cols), dtype), made_up_driver.array(x, (cols,), dtype)
        made_up_driver.array(y, (rows,), dtype).copy_((W.double() @ x.double()).to(dtype))

    driver = made_up_driver.put_in(monkeypatch)
    driver.does, driver.dtype = does, torch.float32
    topic.CALLS.clear()
    yield driver
    topic.CALLS.clear()


def ways(driver):
    """How the launches since the last look were made."""
    found = [launch.way for launch in driver.launches]
    driver.launches.clear()
    return found


def tensors(rows=6, cols=8, dtype=torch.float32):
    return torch.randn(rows, cols).to(dtype), torch.randn(cols).to(dtype)


def test_the_second_call_of_a_kind_is_prepared_and_launches_the_same(driver):
    W, x = tensors()
    first = gemv(W, x)
    again = gemv(W, x)
    one, two = driver.launches
    assert (one.way, two.way) == ("checked", "prepared")
    assert torch.equal(first, again) and first.data_ptr() != again.data_ptr()
    assert one.values[:2] == two.values[:2] and one.values[3:] == two.values[3:] and one.shape == two.shape
    assert two.values[2] == again.data_ptr() and one.stream == two.stream == driver.stream
    assert type(again) is torch.Tensor and again.shape == (6,) and again.is_contiguous() and not again.requires_grad


def test_other_tensors_of_the_kind_are_read_and_written(driver):
    gemv(*tensors())
    out = torch.empty(6)
    for _ in range(5):
        W, x = tensors()
        torch.testing.assert_close(gemv(W, x), W @ x)
        assert gemv(W, x, out=out) is out
        torch.testing.assert_close(out, W @ x)
    assert ways(driver) == ["checked", "prepared", "checked"] + ["prepared"] * 8


def test_what_belongs_to_the_kind(driver):
    """A call that differs in anything is looked at anew, and then is prepared too."""
    W, x = tensors()
    wide, long = torch.randn(6, 9), torch.randn(9)
    off = torch.randn(49)[1:].view(6, 8)  # at an address of other alignment
    cases = [
        lambda: gemv(W, x),
        lambda: gemv(W, x, pdl=True),
        lambda: gemv(W, x, pdl=1),  # an option is compared with its class
        lambda: topic.rows(W, x),
        lambda: gemv(W[:5], x),
        lambda: gemv(wide, long),
        lambda: gemv(off, x),
        lambda: gemv(W, x, out=torch.empty(6)),
    ]
    for case in cases:
        case(), case()
        assert ways(driver) == ["checked", "prepared"]
    for case in cases:
        case()
        assert ways(driver) == ["prepared"]
    driver.dtype = torch.float16
    halves = W.half(), x.half()
    gemv(*halves), gemv(*halves)
    assert ways(driver) == ["checked", "prepared"]


def test_parameters_are_tensors(driver):
    W, x = tensors()
    gemv(W, x)
    with torch.no_grad():
        y = gemv(torch.nn.Parameter(W), torch.nn.Parameter(x))
    assert ways(driver) == ["checked", "prepared"] and type(y) is torch.Tensor and not y.requires_grad
    torch.testing.assert_close(y, W @ x)


class Subclass(torch.Tensor):
    pass


def wrong_calls(W, x, out):
    """Calls that are refused: (arguments, options)."""
    freed = torch.randn(W.shape)
    freed.untyped_storage().resize_(0)
    odd = torch.frombuffer(bytearray(4 * W.numel() + 1), dtype=torch.float32, offset=1, count=W.numel())
    return [
        ((W, x[:-1]), {}),
        ((W, x.double()), {}),
        ((W.double(), x), {}),
        ((W.t(), x), {}),
        ((W.t().contiguous().t(), x), {}),
        ((W, torch.randn(2 * len(x))[::2]), {}),
        ((W, x[None]), {}),
        ((W.to_sparse(), x), {}),
        ((W.to("meta"), x), {}),
        ((W, x.to("meta")), {}),
        ((W, x.tolist()), {}),
        ((W, None), {}),
        ((None, x), {}),
        ((W, x), {"out": out[:-1]}),
        ((W, x), {"out": out.double()}),
        ((W, x), {"out": torch.empty(len(out), requires_grad=True)}),
        ((W, x), {"out": torch.empty(2 * len(out))[::2]}),
        ((W, x), {"out": W.view(-1)[: len(out)]}),
        ((W, x), {"out": [0.0] * len(out)}),
        ((torch.ones(W.shape, dtype=torch.int64), x), {}),
        ((odd.view_as(W), x), {}),
        ((freed, x), {}),
    ]


def refusal(arguments, options):
    with pytest.raises((TypeError, ValueError)) as caught:
        gemv(*arguments, **options)
    return type(caught.value), str(caught.value)


def test_right_and_wrong_calls_alternate(driver):
    """What is refused on the first call is refused in the same words on the second of its kind and on the hundredth."""
    W, x = tensors()
    out = torch.full((6,), 7.0)
    said = [refusal(*call) for call in wrong_calls(W, x, out)]
    assert not driver.launches and bool((out == 7).all())
    gemv(W, x), gemv(W, x, out=out), gemv(W.double().float(), x)
    chance = random.Random(3)
    for _ in range(300):
        W, x = tensors()
        if chance.random() < 0.5:
            given = out if chance.random() < 0.5 else None
            torch.testing.assert_close(gemv(W, x, out=given), W @ x)
            assert ways(driver)[-1] == "prepared"
            continue
        out.fill_(7)
        driver.launches.clear()
        before = W.clone(), x.clone()
        number = chance.randrange(len(said))
        found = refusal(*wrong_calls(W, x, out)[number])
        assert found[0] is said[number][0] and without_addresses(found[1]) == without_addresses(said[number][1])
        assert not driver.launches and bool((out == 7).all())
        assert torch.equal(before[0], W) and torch.equal(before[1], x)


def without_addresses(text):
    return " ".join(word for word in text.split() if not word.startswith("0x"))


def test_a_tensor_that_changes_in_place_is_seen(driver):
    """The same Python object, with other memory, shape, strides or dtype."""
    W, x = torch.randn(8, 8), torch.randn(8)
    gemv(W, x), gemv(W, x)
    W.t_()
    assert refusal((W, x), {})[0] is ValueError
    W.t_()
    W.data = torch.randn(8, 8)
    torch.testing.assert_close(gemv(W, x), W @ x)
    W.resize_(4, 8)
    assert gemv(W, x).shape == (4,)
    W.data = torch.randn(8, 8, dtype=torch.float64)
    assert refusal((W, x), {})[0] is TypeError
    W.data = torch.randn(8, 8)
    W.untyped_storage().resize_(4 * 63)
    assert "memory" in refusal((W, x), {})[1]


def test_subclasses_and_modes_go_the_checked_way(driver):
    from torch._subclasses.fake_tensor import FakeTensorMode

    W, x = tensors()
    gemv(W, x), gemv(W, x)
    ways(driver)
    gemv(W.as_subclass(Subclass), x)
    assert ways(driver) == ["checked"]
    with FakeTensorMode() as mode:  # an operator of torch.library then, which launches nothing
        assert gemv(mode.from_tensor(W), mode.from_tensor(x)).shape == (len(W),)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        torch.func.vmap(lambda v: gemv(W, v))(torch.randn(3, 8))
    assert not ways(driver)
    with torch.inference_mode():
        torch.testing.assert_close(gemv(W, x), W @ x)
        assert ways(driver) == ["prepared"]


def test_another_card_or_no_context_is_left_to_the_checked_way(driver):
    W, x = tensors()
    gemv(W, x)
    driver.device = 3
    gemv(W, x)
    driver.device, driver.status = made_up_driver.DEVICE, 201
    gemv(W, x)
    driver.status = 0
    gemv(W, x)
    assert ways(driver) == ["checked"] * 3 + ["prepared"]


def test_threads_launch_what_is_theirs(driver):
    """The driver's part of a launch leaves Python's lock: other threads come in between."""
    gemv(*tensors())
    wrong = []

    def run(seed):
        for turn in range(60):
            W, x = tensors()
            if not torch.allclose(gemv(W, x), W @ x, atol=1e-5):
                wrong.append(seed)
            if turn % 20 == 19:
                topic.CALLS.clear()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_kinds_are_bounded_and_records_freed(driver):
    calls = Calls("bounded")
    kernel = cuda.compile('extern "C" __global__ void fill(float *y, int n) { y[threadIdx.x] = n; }').fill
    for turn in range(1100):
        out = torch.empty(1)
        with calls.preparing((turn,), (out,), (out,), ()):
            kernel(1, 1, out, turn)
    assert calls.kept == 1100
    driver.launches.clear()
    assert calls.run((1099,), out) is out and driver.launches[0].values == [out.data_ptr(), 1099]
    assert calls.run((5,), out) is None


TWO = """
extern "C" __global__ void split(const float *x, float *partial, float *sums, int n) { partial[0] = x[0]; sums[0] = 1; }
extern "C" __global__ void merge(const float *sums, const long long *counters, float *y, float *z, float a)
{ y[0] = a; }
"""


def two_launches(calls, module, x, y, z, counters, scale):
    if (found := calls.run((scale,), y, z, x)) is not None:
        return found
    given, y = (y, z), x.new_empty(3) if y is None else y
    with calls.preparing((scale,), given, (y, z), (x,)):
        partial = scratch(x, 10, torch.float32)
        sums = partial[8:]
        module.split(4, 64, x, partial, sums, 5, shared=128)
        module.merge((2, 3), 32, sums, supply(counters), y, z, scale, pdl=True, cluster=(2, 1, 1))
    return y, z


def test_two_launches_with_scratch_supplies_and_two_outputs(driver):
    calls, module = Calls("two", outs=2), cuda.compile(TWO)
    held = [torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)]
    now = []
    for way, counters in ("checked", held[0]), ("prepared", held[0]), ("prepared", held[1]):
        x, now[:] = torch.randn(6), [counters]
        y, z = two_launches(calls, module, x, None, None, lambda: now[0], 0.5)
        split, merge = driver.launches
        assert (split.way, merge.way) == (way, way)
        assert z is None and y.shape == (3,) and merge.values[2:4] == [y.data_ptr(), 0]
        assert split.values[0] == x.data_ptr() and split.values[2] == split.values[1] + 32 == merge.values[0]
        assert split.values[3] == 5 and merge.values[4] == 0.5
        assert split.shape == (4, 1, 1, 64, 1, 1, 128) and merge.shape == (2, 3, 1, 32, 1, 1, 0)
        assert not split.pdl and merge.pdl and split.cluster is None and merge.cluster == (2, 1, 1)
        assert merge.values[1] == counters.data_ptr()
        driver.launches.clear()
    z = torch.empty(1)
    for way in ("checked", "prepared"):
        found = two_launches(calls, module, x, None, z, lambda: held[0], 0.5)
        assert found[1] is z and ways(driver) == [way, way]
    assert two_launches(calls, module, x, x[:3], None, lambda: held[0], 0.5) and ways(driver) == ["checked"] * 2


def test_an_argument_that_is_not_the_calls_is_not_prepared_and_said(driver):
    calls = Calls("foreign")
    kernel = cuda.compile('extern "C" __global__ void copy(const float *x, float *y) { y[0] = x[0]; }').copy
    y, hidden = torch.empty(1), torch.empty(1)
    with pytest.warns(RuntimeWarning, match="foreign: not prepared.*x is no tensor of the call"):
        with calls.preparing((), (y,), (y,), ()):
            kernel(1, 1, hidden, y)
    assert calls.run((), y) is None


def test_an_option_that_can_change_is_not_prepared(driver):
    """The value of a tensor, say: what was noted would be launched with the old one."""
    calls = Calls("changing")
    kernel = cuda.compile('extern "C" __global__ void fill(float *y, float a) { y[0] = a; }').fill
    y, scale = torch.empty(1), torch.tensor(2.0)
    for option, taken in ((scale,), None), (([1],), None), ((np.float32(2), (1, "a"), torch.float16), y):
        with calls.preparing(option, (y,), (y,), ()):
            kernel(1, 1, y, float(scale))
        assert calls.run(option, y) is taken
    assert calls.run((np.float32(2), (True, "a"), torch.float16), y) is None
    assert calls.run((np.float32(2), (1, "a", 1), torch.float16), y) is None


def test_a_call_that_is_tracked_is_left_to_those_who_track(driver):
    W, x = tensors()
    gemv(W, x)
    ways(driver)
    run, run_tracked, options = topic.CALLS.run, topic.CALLS.run_tracked, ("gemv", False)
    asking = W.clone().requires_grad_()
    assert run_tracked(options, None, W, x) is not None and run(options, None, asking, x) is not None
    assert run_tracked(options, None, asking, x) is None
    with torch.no_grad():
        assert run_tracked(options, None, asking, x) is not None
    assert ways(driver) == ["prepared"] * 3


def test_two_arguments_that_are_one_are_told_apart_later(driver):
    """Of k = v it is not known which of the two a launch was given."""
    calls = Calls("same")
    kernel = cuda.compile(
        'extern "C" __global__ void copy(const float *k, const float *v, float *y) { y[0] = k[0]; }'
    ).copy

    def call(k, v, y):
        if calls.run((), y, k, v) is None:
            with calls.preparing((), (y,), (y,), (k, v)):
                kernel(1, 1, k, v, y)

    k, v, y = torch.empty(4), torch.empty(4), torch.empty(4)
    for pair in (k, k), (k, v), (v, k), (v, v):
        call(*pair, y)
        assert driver.launches[-1].values == [pair[0].data_ptr(), pair[1].data_ptr(), y.data_ptr()]
    assert ways(driver) == ["checked", "checked", "prepared", "prepared"]


def test_a_recording_sees_the_launches_of_what_is_prepared_itself(driver):
    outer = Calls("outer")
    W, x = tensors()
    gemv(W, x), gemv(W, x)
    ways(driver)
    for _ in range(2):
        y = torch.empty(6)
        if outer.run((), y, W, x) is None:
            with outer.preparing((), (y,), (y,), (W, x)):
                gemv(W, x, out=y)
        torch.testing.assert_close(y, W @ x)
    assert ways(driver) == ["checked", "prepared"]


def test_no_compiler_is_said_once_and_calls_go_the_checked_way(driver, monkeypatch):
    import lab.prepared

    def none():
        raise lab.prepared.native.Unprepared("there is no compiler")

    monkeypatch.undo()
    monkeypatch.setattr(lab.prepared.native, "on_cards", none)
    lab.prepared._library.cache_clear(), lab.prepared._warn.cache_clear()
    with pytest.warns(RuntimeWarning, match="calls are not prepared.*no compiler"):
        assert lab.prepared._library() is None
    lab.prepared._library.cache_clear()


def test_what_a_call_costs_without_the_driver(driver):
    """A prepared call is a few µs of Python and C; made-up launches are not asked, and come back."""
    W, x = tensors()
    y = gemv(W, x)
    gemv(W, x, out=y)
    ways(driver)
    with native.without_driver(made_up_driver.DEVICE):
        taken = as_called.host({"gemv": lambda: gemv(W, x, out=y)}, seconds=0, least_rounds=5, card=False)["gemv"]
        assert 0 < taken.median < 200e-6
        assert gemv(W, x, out=y) is y and not driver.launches
    gemv(W, x, out=y)
    assert ways(driver) == ["prepared"]
