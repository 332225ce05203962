"""What may go wrong around prepared calls (lab/prepared): threads, interrupts, options with a will of their own."""

import threading

import made_up_driver
import pytest
import torch

import lab.prepared
from kernels import gemv as topic
from lab import cuda
from lab.prepared import Calls, changing, native, supply
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
