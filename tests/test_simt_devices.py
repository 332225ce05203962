"""Several devices on the SIMT machine: turns, addresses, bytes over the link, scopes, races between launches, deadlock.

The kernels exchange numbers as cards do: by flags, by words that carry their flag, by a barrier at both ends.
"""

import functools

import numpy as np
import pytest

import simt

SOURCE = r"""
#ifndef SCOPE
#define SCOPE "sys"
#endif
#ifdef RELAXED
#define RELEASE "st.relaxed."
#else
#define RELEASE "st.release."
#endif
__device__ unsigned load_acquire(const unsigned *p) {
    unsigned v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ void store_release(unsigned *p, unsigned v) {
    asm volatile(RELEASE SCOPE ".global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
/* out = x + the peer's x by a buffer that the peer reads. flags[0]: begin, flags[1]: end. */
extern "C" __global__ void pull(const float *x, float *mine, const float *theirs, unsigned *flags,
                                unsigned *their_flags, float *out, int n, unsigned e) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, at = BUFFERS == 2 && e % 2 ? n + i : i;
    if (i < n) mine[at] = x[i];
    __syncthreads();
#ifndef NO_FLAG
    if (threadIdx.x == 0) {
        store_release(their_flags + 2 * blockIdx.x, e);
        while (load_acquire(flags + 2 * blockIdx.x) < e);
    }
    __syncthreads();
#endif
    if (i < n) out[i] = x[i] + theirs[at];
#ifdef END
    __syncthreads();
    if (threadIdx.x == 0) {
        store_release(their_flags + 2 * blockIdx.x + 1, e);
        while (load_acquire(flags + 2 * blockIdx.x + 1) < e);
    }
#endif
}
/* words of (number, data), which need no fence */
typedef unsigned long long u64;
__device__ void send(u64 *to, u64 word) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ u64 look(const u64 *at) {
    u64 word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
    return word;
}
struct Boxes { u64 *of[3]; };
extern "C" __global__ void push(const float *x, Boxes boxes, float *out, int n, int rank, unsigned e) {
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        for (int r = 0; r < 3; r++)
            if (r != rank) send(boxes.of[r] + rank * n + i, (u64)e << 32 | __float_as_uint(x[i]));
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float sum = 0;
        for (int r = 0; r < 3; r++) {
            u64 word = __float_as_uint(x[i]);
            if (r != rank)
                do word = look(boxes.of[rank] + r * n + i); while (word >> 32 != e);
            sum += __uint_as_float((unsigned)word);
        }
        out[i] = sum;
    }
}
__device__ unsigned tickets;
extern "C" __global__ void count(unsigned *counter, unsigned *own) {
    if (threadIdx.x == 0) own[0] = atomicAdd(&tickets, 1u);
#ifdef NEAR
    atomicAdd(counter, 1u);
#else
    atomicAdd_system(counter, 1u);
#endif
}
"""


@functools.cache
def module(*options):
    return simt.compile(SOURCE, options or ("-DBUFFERS=2",))


class Pair:
    """Two devices, what they exchange, and the launches of `pull`."""

    def __init__(self, *options, n=100, **more):
        self.n, self.blocks = n, -(-n // 64)
        self.pull = module(*options)["pull"]
        self.x = [np.random.default_rng(d).standard_normal(n).astype(np.float32) for d in (0, 1)]
        self.buffer = [np.zeros(2 * n, np.float32) for _ in (0, 1)]
        self.flags = [np.zeros(2 * self.blocks, np.uint32) for _ in (0, 1)]
        self.out = [[np.full(n, np.nan, np.float32) for _ in range(3)] for _ in (0, 1)]
        self.devices = simt.Devices(2, **more)
        for d in (0, 1):
            self.devices.owns(d, self.buffer[d], self.flags[d])

    def launch(self, d, e, order="forward"):
        args = (
            self.x[d] * np.float32(e), self.buffer[d], self.buffer[1 - d], self.flags[d], self.flags[1 - d],
            self.out[d][e - 1], np.int32(self.n), np.uint32(e),
        )  # fmt: skip
        return self.pull, self.blocks, 64, args, {"order": order}

    def exchange(self, count=3, turns="forward", order="forward"):
        return self.devices.run([[self.launch(d, e + 1, order) for e in range(count)] for d in (0, 1)], turns)

    def right(self, count=3):
        return all(
            np.array_equal(out[e], self.x[0] * np.float32(e + 1) + self.x[1] * np.float32(e + 1))
            for out in self.out
            for e in range(count)
        )


@pytest.mark.parametrize("options", [("-DBUFFERS=2",), ("-DBUFFERS=1", "-DEND")], ids=["two buffers", "two barriers"])
@pytest.mark.parametrize("turns", ["forward", "reverse", 1, 2])
def test_an_exchange_is_right_whatever_the_turns_and_the_order_of_blocks(options, turns):
    pair = Pair(*options, check_races=True)
    pair.exchange(turns=turns, order="reverse" if turns == "forward" else 5)
    assert pair.right()


def test_bytes_over_the_link_are_those_of_the_peers_memory():
    pair = Pair("-DBUFFERS=2", n=96)
    reports = pair.exchange(count=1)
    for (report,) in reports:
        # 96 floats are read in 12 sectors, and each of two blocks stores a flag; polls of the own flags cost nothing
        assert report.counters["simt__link_bytes_op_ld.sum"] == 96 * 4
        assert report.counters["simt__link_bytes_op_st.sum"] == 2 * 32
        assert report.counters["simt__link_bytes_op_atom.sum"] == 0
        assert sum(line.get("simt__link_bytes_op_ld.sum", 0) for line in report.lines.values()) == 96 * 4
    alone = simt.compile(SOURCE, ("-DBUFFERS=2",))["count"](1, 1, np.zeros(1, np.uint32), np.zeros(1, np.uint32))
    assert not any("link" in name for name in alone.counters)


def test_a_missing_end_barrier_is_a_race_of_two_launches():
    """One buffer, no barrier at the end: found by its name, whichever turns; and it is no idle warning."""
    found = 0
    for turns in ("forward", "reverse", *range(6)):
        try:
            Pair("-DBUFFERS=1", check_races=True).exchange(turns=turns)
        except simt.RaceError as e:
            found += 1
            assert "its launch 2" in str(e) and "device 0" in str(e) and "device 1" in str(e)
            assert "that takes a barrier of both at the end, behind the last read, or a second buffer" in str(e)
            assert {e.first[0], e.second[0]} == {"load", "store"}
    assert found >= 6  # in the others the flag that was read is the next launch's
    wrong = 0
    for turns in range(8):
        pair = Pair("-DBUFFERS=1")
        pair.exchange(turns=turns)
        wrong += not pair.right()
    assert wrong


def test_what_the_host_has_waited_for_is_no_race():
    pair = Pair("-DBUFFERS=1", check_races=True)
    for e in (1, 2, 3):
        pair.devices.run([pair.launch(d, e) for d in (0, 1)])
        pair.devices.synchronize()
    assert pair.right()
    with pytest.raises(simt.RaceError, match="a second buffer"):
        pair = Pair("-DBUFFERS=1", check_races=True)
        for e in (1, 2, 3):
            pair.devices.run([pair.launch(d, e) for d in (0, 1)])


def test_a_missing_flag_and_a_relaxed_one_are_races():
    for option, need in ("-DNO_FLAG", "nothing tells device"), ("-DRELAXED", "no release covers it"):
        with pytest.raises(simt.RaceError, match=need) as e:
            Pair("-DBUFFERS=2", option, check_races=True).exchange()
        assert "device 0" in str(e.value) and "device 1" in str(e.value) and "__threadfence()" not in str(e.value)


def test_a_scope_of_one_device_is_an_error_that_names_the_line():
    with pytest.raises(simt.ScopeFault, match=r"line \d+ `asm volatile\(RELEASE.*st.release.gpu.*takes the scope .sys"):
        Pair("-DBUFFERS=2", '-DSCOPE="gpu"').exchange()
    counter, own = np.zeros(1, np.uint32), [np.zeros(1, np.uint32) for _ in (0, 1)]

    def launches(*options):
        return [(module("-DBUFFERS=1", *options)["count"], 1, 32, (counter, own[d])) for d in (0, 1)]

    with pytest.raises(simt.ScopeFault, match=r"device 1: kernel count, line \d+ `atomicAdd\(counter, 1u\)"):
        simt.together(launches("-DNEAR"), owned=[[counter], []])
    counter[0] = 0
    simt.together(launches(), owned=[[counter], []], check_races=True)
    assert counter[0] == 64
    with pytest.raises(simt.RaceError, match="on different devices, and one of the two has the scope of one device"):
        simt.together(launches("-DNEAR"), check_races=True)  # nobody's memory: the two meet all the same


def test_an_acquire_of_one_device_hears_nothing_of_another():
    source = r"""
    extern "C" __global__ void send(float *data, unsigned *flag) {
        data[0] = 1;
        FENCE;
        *(volatile unsigned *)flag = 1;
    }
    extern "C" __global__ void receive(const float *data, unsigned *flag, float *out) {
        while (*(volatile unsigned *)flag == 0);
        HEAR;
        out[0] = data[0];
    }"""

    def run(fence, hear):
        send, receive = (simt.compile(source, (f"-DFENCE={fence}", f"-DHEAR={hear}"))[n] for n in ("send", "receive"))
        data, out, flag = np.zeros(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.uint32)
        simt.together([(send, 1, 1, (data, flag)), (receive, 1, 1, (data, flag, out))], check_races=True)
        assert out[0] == 1

    run("__threadfence_system()", "__threadfence_system()")
    with pytest.raises(simt.RaceError, match=r"released for its own device only"):
        run("__threadfence()", "__threadfence_system()")
    with pytest.raises(simt.RaceError, match=r"there is no acquire.*wide enough scope"):
        run("__threadfence_system()", "__threadfence()")


@pytest.mark.parametrize("turns", ["forward", 3])
def test_three_devices_push_through_a_struct_of_pointers(turns):
    n, e = 70, 9
    x = [np.random.default_rng(d).standard_normal(n).astype(np.float32) for d in range(3)]
    boxes = [np.zeros(3 * n, np.uint64) for _ in range(3)]
    out = [np.full(n, np.nan, np.float32) for _ in range(3)]
    push = module()["push"]

    def launch(d, e):
        return push, 1, 32, (x[d], simt.Pointers(boxes), out[d], np.int32(n), np.int32(d), np.uint32(e))

    simt.together([launch(d, e) for d in range(3)], [[b] for b in boxes], check_races=True, turns=turns)
    assert all(np.array_equal(o, (x[0] + x[1]) + x[2]) for o in out)
    with pytest.raises(simt.Deadlock) as error:  # device 2 has another number
        simt.together([launch(d, 10 + d // 2) for d in range(3)], [[b] for b in boxes], turns=turns)
    line = SOURCE[: SOURCE.index('asm volatile("ld.relaxed')].count("\n") + 1
    for d in range(3):
        assert f"device {d}: kernel push, line" in str(error.value)
        assert f"waits at line {line} for boxes[{d}] of device {d}" in str(error.value)


def test_a_device_without_its_peer_is_a_deadlock():
    pair = Pair("-DBUFFERS=2")
    launches = [[pair.launch(0, 1), pair.launch(0, 2)], [pair.launch(1, 1)]]
    with pytest.raises(simt.Deadlock, match=r"device 0: .*waits at line \d+ for flags of device 0\[0\].*on device 1"):
        pair.devices.run(launches)


def test_variables_are_each_devices_own_and_counts_each_launches():
    counter, own = np.zeros(1, np.uint32), [np.full(1, 7, np.uint32) for _ in (0, 1)]
    module().set("tickets", np.uint32(0))
    count, devices = module()["count"], simt.Devices(2)
    devices.owns(0, counter)
    for e in (0, 1):
        reports = devices.run([(count, 1, 32, (counter, own[d])) for d in (0, 1)])
        assert own[0][0] == own[1][0] == e
        assert [r.counters["l1tex__t_requests_pipe_lsu_mem_global_op_red.sum"] for r in reports] == [1, 1]
        assert [r.counters["simt__link_bytes_op_red.sum"] > 0 for r in reports] == [False, True]


def test_wrong_launches_are_refused():
    x, y = np.zeros(8, np.uint32), np.zeros(8, np.uint32)
    count = module()["count"]
    good = (count, 1, 32, (x, y))
    for launches, match in (
        (good[1], "a list with an item for each of 2 devices; got 1"),
        ([good], "each of 2 devices; got 1"),
        ([good, (count, 1, 32)], "device 1: expected .kernel, grid, block, args"),
        ([good, (count, 1, 32, (x, y), {"color": 1})], "options of ahead, order"),
        ([good, (count, 1, 2048, (x, y))], "block"),
        ([good, (count, 1, 32, (x,))], "expects 2"),
        ([(count, 1, 32, (x[:6], y)), (count, 1, 32, (x[2:], y))], "overlaps one: say owns"),
    ):
        with pytest.raises(simt.LaunchError, match=match):
            simt.Devices(2).run(launches)
        assert not x.any() and not y.any()
    for count_of in (0, 17, True, "2", 1.5):
        with pytest.raises(simt.LaunchError, match="expected 1 to 16 devices"):
            simt.Devices(count_of)
    with pytest.raises(simt.LaunchError, match="device: expected 0 to 1; got 2"):
        simt.Devices(2).owns(2, x)
    with pytest.raises(simt.LaunchError, match="C-contiguous"):
        simt.Devices(2).owns(0, np.zeros((4, 4))[:, 1])
    with pytest.raises(simt.LaunchError, match="expected a struct of 24 bytes; got 2 pointers"):
        simt.together(
            [(module()["push"], 1, 32, (x, simt.Pointers([x, y]), x, np.int32(1), np.int32(0), np.uint32(1)))]
        )
