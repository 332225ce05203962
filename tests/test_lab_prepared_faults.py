"""What may go wrong around prepared calls (lab/prepared): threads, interrupts, options with a will of their own."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import made_up_driver
import pytest
import torch

import lab.prepared
from kernels import gemv as topic
from lab import cuda, cuda_driver
from lab.prepared import Calls, changing, native, scratch, supply
from lab.prepared.recording import NOW

FILL = 'extern "C" __global__ void fill(float *y, int n) { y[threadIdx.x] = n; }'
COUNT = 'extern "C" __global__ void count(long long *counters, float *y) { y[0] = counters[0]; }'


@pytest.fixture
def driver(monkeypatch):
    yield made_up_driver.put_in(monkeypatch)
    topic.CALLS.clear()


def ways(driver):
    found = [launch.way for launch in driver.launches]
    driver.launches.clear()
    return found


def fill(calls, kernel, y, n, options=()):
    """A call that is prepared, and launches `kernel`."""
    if calls.run((n, *options), y) is None:
        with calls.preparing((n, *options), (y,), (y,), ()):
            kernel(1, 1, y, n)


def test_a_kind_is_kept_once_however_often_it_is_recorded(driver):
    """Threads that have no context yet are declined, and record their call anew."""
    calls, kernel, y = Calls("fill"), cuda.compile(FILL).fill, torch.empty(1)
    for n in range(1000):
        fill(calls, kernel, y, n)
    driver.device = 3  # where no launch is taken
    for _ in range(100):
        fill(calls, kernel, y, 7)
    driver.device = made_up_driver.DEVICE
    ways(driver)
    for n in range(1000):
        fill(calls, kernel, y, n)
    assert ways(driver) == ["prepared"] * 1000


def test_the_newest_of_a_kind_is_launched(driver):
    calls, module, y = Calls("fill"), cuda.compile(FILL), torch.empty(1)
    for n in (1, 2):
        with calls.preparing(("a",), (y,), (y,), ()):
            module.fill(n, 1, y, n)
    ways(driver)
    assert calls.run(("a",), y) is y
    (launch,) = driver.launches
    assert launch.values[1] == 2 and launch.shape[0] == 2


def test_a_recording_that_began_before_the_library_was_there_misses_nothing(driver, monkeypatch):
    W, x = torch.randn(6, 8), torch.randn(8)
    topic.gemv(W, x), topic.gemv(W, x)
    assert ways(driver) == ["checked", "prepared"]
    outer, found = Calls("outer"), []

    def thread():
        y = torch.empty(6)
        with outer.preparing((), (y,), (y,), (W, x)) as recording:
            monkeypatch.setattr(lab.prepared, "_loaded", loaded)  # another thread has loaded it
            topic.gemv(W, x, out=y)
            found.append(len(recording.launches))
        topic.gemv(W, x)

    loaded = lab.prepared._loaded
    monkeypatch.setattr(lab.prepared, "_loaded", [])
    one = threading.Thread(target=thread)
    one.start(), one.join()
    assert found == [1] and ways(driver) == ["checked", "prepared"]


class Meddler(int):
    """An option whose comparison does what it likes to the table."""

    does = None

    def __hash__(self):
        return int.__hash__(self)

    def __eq__(self, other):
        return self.does()


@pytest.mark.parametrize("answer", [True, False])
def test_options_that_clear_the_table_while_it_is_looked_through(driver, answer):
    """C holds on to the record, and does not go on from one that is no longer there."""
    calls, kernel, y = Calls("fill"), cuda.compile(FILL).fill, torch.empty(1)
    with calls.preparing((Meddler(3),), (y,), (y,), ()):
        kernel(1, 1, y, 3)
    assert not calls.kept  # no option that stays
    run, run_tracked, keep = native._library().prepared_table(1, 0)
    with calls.preparing((0,), (y,), (y,), ()) as recording:
        kernel(1, 1, y, 3)
    plan = recording.plan()

    def does():
        for n in range(1100):  # more than are kept: all are forgotten
            keep((n,), (False,), recording.tensors, plan, ())
        return answer

    Meddler.does = staticmethod(does)
    for _ in range(3):
        for _ in range(3):
            Meddler.does = staticmethod(lambda: False)
            keep((Meddler(3),), (False,), recording.tensors, plan, ())
        Meddler.does = staticmethod(does)
        assert run((Meddler(3),), y) is None
        keep((Meddler(3),), (False,), recording.tensors, plan, ())
    assert run((1099,), y) is y


def test_a_comparison_that_fails_leaves_no_error_behind(driver):
    run, run_tracked, keep = native._library().prepared_table(1, 0)
    kernel, y = cuda.compile(FILL).fill, torch.empty(1)
    with Calls("fill").preparing((0,), (y,), (y,), ()) as recording:
        kernel(1, 1, y, 3)

    def fails():
        raise error("no comparison")

    Meddler.does = staticmethod(fails)
    keep((Meddler(3),), (False,), recording.tensors, recording.plan(), ())
    error = ValueError
    assert run((Meddler(3),), y) is None
    error = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt, match="no comparison"):
        run((Meddler(3),), y)


def counted(calls, kernel, y, function, **how):
    if calls.run((), y) is None:
        with calls.preparing((), (y,), (y,), ()):
            kernel(1, 1, supply(function, **how), y)


def test_an_interrupt_within_a_supply_is_not_lost(driver):
    calls, kernel, y = Calls("counts"), cuda.compile(COUNT).count, torch.empty(1)
    raised = []

    def function():
        if raised:
            raise raised.pop()
        return torch.zeros(2, dtype=torch.int64)

    counted(calls, kernel, y, function)
    raised.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        counted(calls, kernel, y, function)
    raised.append(MemoryError())  # an error is left to the checked way, which meets it again or does not
    counted(calls, kernel, y, function)
    counted(calls, kernel, y, function)
    assert ways(driver) == ["checked", "checked", "prepared"]


def test_what_a_stream_has_is_asked_for_once(driver):
    calls, kernel, y = Calls("counts"), cuda.compile(COUNT).count, torch.empty(1)
    of_stream, asked = {}, []

    def function():
        asked.append(driver.stream)
        if driver.capturing:
            return torch.zeros(2, dtype=torch.int64)
        return of_stream.setdefault(driver.stream, torch.zeros(2, dtype=torch.int64))

    streams = [1, 1, 2, 1, 2, 3, 4, 5, 6, 5, 6, 1]
    for driver.stream in streams:
        counted(calls, kernel, y, function, of_stream=True)
    assert [launch.values[0] for launch in driver.launches] == [of_stream[s].data_ptr() for s in streams]
    assert ways(driver) == ["checked"] + ["prepared"] * (len(streams) - 1)
    assert asked == [1, 1, 2, 3, 4, 5, 6, 5, 6]  # no more than four are kept in mind
    asked.clear()
    driver.stream, driver.capturing = 1, 1
    counted(calls, kernel, y, function, of_stream=True), counted(calls, kernel, y, function, of_stream=True)
    assert asked == [1, 1] and of_stream[1].data_ptr() not in [launch.values[0] for launch in driver.launches]
    driver.capturing = 0
    counted(calls, kernel, y, function, of_stream=True)
    assert asked == [1, 1] and driver.launches[-1].values[0] == of_stream[1].data_ptr()


def test_a_number_that_changes(driver):
    kernel = cuda.compile('extern "C" __global__ void fill(int n, float *y, long long m) { y[0] = n; }').fill
    calls, y = Calls("numbers", numbers=2), torch.empty(1)

    def call(n, m):
        if calls.run((), y, n, m) is None:
            with calls.preparing((), (y,), (y,), ()):
                one, two = changing(n, m)
                kernel(1, 1, two, y, one)

    for n, m in [(5, 6), (7, -8), (2**31 - 1, -(2**31)), (0, 0)]:
        call(n, m)
        assert driver.launches[-1].values == [m, y.data_ptr(), n]
    assert ways(driver) == ["checked"] + ["prepared"] * 3
    call(2**40, 1)  # which 32 bits do not hold: looked at anew
    assert driver.launches[-1].values[2] == 2**40
    for wrong in (True, 2.0, "1", None, torch.tensor(1), 2**70):
        assert calls.run((), y, wrong, 1) is None
    assert ways(driver) == ["checked"]
    kernel = cuda.compile('extern "C" __global__ void fill(short a, float *y) { y[0] = a; }').fill
    with pytest.warns(RuntimeWarning, match="a, which changes, is no whole number"):
        with calls.preparing((1,), (y,), (y,), ()):
            kernel(1, 1, changing(3)[0], y)
    assert calls.run((1,), y, 3, 0) is None


def test_numbers_negated_only_when_they_are_read_are_refused_every_time(driver):
    """The memory of such a tensor holds the numbers with the other sign."""
    W, x, y = torch.randn(6, 8), torch.randn(8), torch.empty(6)
    negative = torch._neg_view(x)
    assert negative.is_neg() and negative.is_contiguous()
    for _ in range(3):
        for args, out in [((W, negative), None), ((torch._neg_view(W), x), None), ((W, x), torch._neg_view(y))]:
            with pytest.raises(ValueError, match="gemv: (W|x|out) must have its numbers in memory as they are"):
                topic.gemv(*args, out=out)
        topic.gemv(W, x), topic.gemv(W, x, out=y)
    kernel = cuda.compile('extern "C" __global__ void copy(const float *x, float *y) { y[0] = x[0]; }').copy
    for _ in range(2):
        kernel(1, 1, x, y)
        with pytest.raises(ValueError, match="copy: x must have its numbers in memory as they are"):
            kernel(1, 1, negative, y)


def test_a_disk_without_room_is_said_once_and_calls_go_the_checked_way(driver, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.undo()
    monkeypatch.setattr(native, "compile_c", full)
    monkeypatch.setattr(native, "of_driver", driver.addresses)
    for cached in (native._library, native.on_cards, lab.prepared._library, lab.prepared._warn):
        cached.cache_clear()
    calls, y = Calls("full"), torch.empty(1)
    with pytest.warns(RuntimeWarning, match="calls are not prepared.*No space left") as said:
        for _ in range(2):
            with calls.preparing((), (y,), (y,), ()) as recording:
                recording.launches.append(None)
    assert len(said) == 1 and not NOW.all and calls.run((), y) is None
    for cached in (native._library, native.on_cards, lab.prepared._library, lab.prepared._warn):
        cached.cache_clear()


def test_where_a_python_tensor_has_its_tensor_is_known_or_asked(driver):
    """Both ways see the same; what is not a tensor's place is not taken for one."""
    library = native._library()
    some = torch.empty(3), torch.nn.Parameter(torch.empty(2, 2)), torch.empty(5)[2:]
    W, x = torch.randn(6, 8), torch.randn(8)
    topic.gemv(W, x)
    ways(driver)
    assert library.prepared_settle(some) in (16, 24)  # known
    topic.gemv(W, x)
    assert library.prepared_settle((*some, Odd())) == 0  # asked
    topic.gemv(W, x)
    assert library.prepared_settle(some)
    assert ways(driver) == ["prepared"] * 2


class Odd:
    __slots__ = ("room", "more")
    _cdata = 12345


SPLIT = """
extern "C" __global__ void split(const float *x, float *part, double *more) { part[0] = x[0]; }
extern "C" __global__ void merge(const float *part, const double *more, float *y) { y[0] = part[0]; }
"""


def in_two(calls, module, x, y, floats, doubles=3):
    """Two launches with scratch memory between them."""
    if calls.run((floats,), y, x) is None:
        with calls.preparing((floats,), (y,), (y,), (x,)):
            part, more = scratch(x, floats, torch.float32), scratch(x, doubles, torch.float64)
            module.split(1, 1, x, part, more)
            module.merge(1, 1, part, more, y)


def places(driver):
    """Where the prepared launches since the last look had their scratch: (part, more) of each call."""
    found = [launch.values for launch in driver.launches if launch.way == "prepared"]
    driver.launches.clear()
    pairs = [(split[1], split[2]) for split in found[::2]]
    assert pairs == [(merge[0], merge[1]) for merge in found[1::2]]
    return pairs


def test_a_stream_keeps_its_scratch(driver):
    """Pieces that do not overlap, apart from those of other streams and of calls too large; a graph gets its own."""
    calls, module, x, y = Calls("scratch"), cuda.compile(SPLIT), torch.randn(3), torch.empty(3)
    in_two(calls, module, x, y, 1000)
    for driver.stream in (901, 902, 901, 902):
        in_two(calls, module, x, y, 1000)
    one, two, *again = places(driver)
    assert again == [one, two] and abs(one[0] - two[0]) >= 1 << 20
    assert one[1] - one[0] == 4096 and one[0] % 16 == 0  # 4000 bytes, in whole 512
    driver.stream = 901
    for floats in (1 << 20, 1 << 23):  # more than it had; more than a stream keeps
        in_two(calls, module, x, y, floats), in_two(calls, module, x, y, floats), in_two(calls, module, x, y, 1000)
    grown, after, large, small = places(driver)
    assert grown[0] == after[0] == small[0] != one[0] and large[0] != grown[0]
    assert large[1] - large[0] != grown[1] - grown[0] and grown[1] - grown[0] == 4 << 20
    driver.capturing = 1
    held = []

    def does(function, shape, values):
        if function.name == "split":
            held.append(torch.empty(1000))  # what the allocator would give next is taken

    driver.does = does
    in_two(calls, module, x, y, 1000), in_two(calls, module, x, y, 1000)
    assert all(abs(pair[0] - grown[0]) >= 8192 for pair in places(driver))


def test_two_calls_of_one_stream_at_a_time_have_scratch_of_their_own(driver):
    """As two threads have, whose launches come in turns: here the second call is made within the first one's launch."""
    calls, module, x = Calls("scratch"), cuda.compile(SPLIT), torch.randn(3)
    y = [torch.empty(3) for _ in range(3)]
    in_two(calls, module, x, y[0], 1000)
    driver.stream = 903
    in_two(calls, module, x, y[0], 1000)
    ((first, _),) = places(driver)
    inner = []

    def does(function, shape, values):
        if function.name == "split" and not inner:
            inner.append(None)
            one = threading.Thread(target=lambda: in_two(calls, module, x, y[1], 1000))
            one.start(), one.join()

    driver.does = does
    in_two(calls, module, x, y[0], 1000)
    seen = [launch.values[1] for launch in driver.launches if launch.kernel == "split"]
    assert first in seen and len({*seen}) == 2
    driver.does, driver.launches[:] = lambda *args: None, []
    in_two(calls, module, x, y[0], 1000)
    assert places(driver)[0][0] == first


def in_threads(*functions):
    """What they return, one after another, each in a thread of its own."""
    with contextlib.ExitStack() as alive:  # all threads, until the last is done
        threads = [alive.enter_context(ThreadPoolExecutor(1)) for _ in functions]
        return [thread.submit(function).result() for thread, function in zip(threads, functions)]


def test_threads_whose_default_streams_have_one_handle_share_nothing(driver):
    """cu_stream_per_thread: one handle for a stream of each thread. What runs there runs at a time."""
    calls, module, x, y = Calls("scratch"), cuda.compile(SPLIT), torch.randn(3), torch.empty(3)
    driver.stream = cuda_driver.PER_THREAD

    def scratches():
        driver.launches.clear()
        for _ in range(3):
            in_two(calls, module, x, y, 1000)
        first, *others = {place for place, _ in places(driver)}
        assert not others
        return first

    in_two(calls, module, x, y, 1000)
    first, second = in_threads(scratches, scratches)
    third = in_threads(scratches)[0]  # a thread that comes later, while what the first has launched may run yet
    assert min(abs(a - b) for a, b in [(first, second), (second, third), (third, first)]) >= 1 << 20

    counts, kernel, of_stream = Calls("counts"), cuda.compile(COUNT).count, {}
    asked = []

    def function():
        asked.append(threading.get_ident())
        return of_stream.setdefault(cuda_driver.own_stream(-1), torch.zeros(2, dtype=torch.int64))

    def counters():
        driver.launches.clear()
        for _ in range(3):
            counted(counts, kernel, y, function, of_stream=True)
        (found,) = {launch.values[0] for launch in driver.launches}
        assert {launch.way for launch in driver.launches} == {"prepared"} and len(driver.launches) == 3
        return found

    counted(counts, kernel, y, function, of_stream=True)
    asked.clear()
    first, second = in_threads(counters, counters)
    assert first != second and len(asked) == len({*asked}) == 2  # each asks once
    assert len(of_stream) == 3 and {first, second} < {tensor.data_ptr() for tensor in of_stream.values()}


def test_outputs_are_made_past_the_dispatcher_only_where_nobody_wants_to_be_asked(driver, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    made = []

    def maker(tensor):
        function, how = known(tensor)

        def counting(*args):
            made.append(args)
            return function(*args)

        return counting, how

    known = native.maker
    monkeypatch.setattr(native, "maker", maker)
    W, x = torch.randn(6, 8), torch.randn(8)
    topic.gemv(W, x)

    def call():
        made.clear()
        assert topic.CALLS.run(("gemv", False), None, W, x).shape == (6,)
        return len(made)

    assert call() == 1 and made == [((6,), (1,), torch.float32)]
    for mode in (Watch, FakeTensorMode):
        with mode():
            assert call() == 0
    asked = []
    torch.func.grad(lambda v: (asked.append(call()), v.sum())[1])(torch.ones(3))
    torch.func.vmap(lambda v: (asked.append(call()), v.sum())[1])(torch.ones(2, 3))
    assert asked == [0, 0] and call() == 1
    with torch.inference_mode():
        assert topic.gemv(W, x).is_inference()
    y = topic.gemv(W, x)
    assert type(y) is torch.Tensor and not y.is_inference() and not y.requires_grad
    assert ways(driver)[1:] == ["prepared"] * 8


def test_an_interrupt_while_memory_is_made_is_not_lost(driver, monkeypatch):
    calls, module, x, y = Calls("scratch"), cuda.compile(SPLIT), torch.randn(3), torch.empty(3)
    in_two(calls, module, x, y, 1000)

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    driver.stream = 904
    monkeypatch.setattr(native, "ThreadPoolExecutor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_two(calls, module, x, y, 1000)
    monkeypatch.undo()
