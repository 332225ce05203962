"""Clusters on the SIMT machine: ranks, arrivals at other blocks' mbarriers, stores, multicast copies, barriers."""

import functools

import numpy as np
import pytest
from hopper_kernels import PRELUDE

import simt
from simt import nvrtc

try:
    nvrtc.version()
    HERE = True
except simt.CompilerMissing:
    HERE = False
pytestmark = pytest.mark.skipif(not HERE, reason="needs NVRTC")

CLUSTER = r"""
__device__ unsigned rank() { unsigned r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ void arrive_at(u64 *bar, unsigned rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" :: "r"(at(bar)), "r"(rank) : "memory");
}
__device__ void load_all(void *to, const CUtensorMap *map, int column, int row, u64 *bar, short blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" :: "r"(at(to)), "l"(map), "r"(column), "r"(row), "r"(at(bar)),
                 "h"(blocks) : "memory");
}
"""


@functools.cache
def compiled(text):
    return simt.compile(PRELUDE + CLUSTER + text, arch="sm_90a")["k"]


def run(body, grid, block, *args, parameters="int* y", **options):
    return compiled(f'\nextern "C" __global__ void k({parameters}) {{\n{body}\n}}')(grid, block, *args, **options)


NAMES = "%cluster_ctarank %cluster_nctarank %cluster_ctaid.x %cluster_nctaid.x %clusterid.x %nclusterid.x".split()


@pytest.mark.parametrize("order", ["forward", "reverse", 3])
@pytest.mark.parametrize("cluster, places", [(1, None), (2, 2), (4, 5)])
def test_ranks(cluster, places, order):
    read = "".join(
        f'asm volatile("mov.u32 %0, %{n};" : "=r"(v)); y[blockIdx.x * 6 + {i}] = v;\n' for i, n in enumerate(NAMES)
    )
    y = np.full((8, 6), -1, np.int32)
    run(f"unsigned v;\n{read}", 8, 1, y, cluster=cluster, places=places, order=order)
    for block, found in enumerate(y.tolist()):
        assert found == [block % cluster, cluster, block % cluster, cluster, block // cluster, 8 // cluster]


ROUND = """
    __shared__ u64 bar;
    __shared__ int value;
    if (threadIdx.x == 0) init(&bar, 2), value = 0;
    cluster_arrive(); cluster_wait();
    if (threadIdx.x == 0) arrive_at(&bar, 0), arrive_at(&bar, 1);
    wait(&bar, 0);
    if (threadIdx.x == 0) value = 7 + rank();
    __syncthreads();
    y[blockIdx.x * 64 + threadIdx.x] = value;
    cluster_arrive(); cluster_wait();
"""


@pytest.mark.parametrize("order, places", [("forward", None), ("reverse", 2), (5, 4)])
def test_arrivals_from_other_blocks(order, places):
    y = np.full((6, 64), -1, np.int32)
    run(ROUND, 6, 64, y, cluster=2, order=order, places=places, check_races=True)
    assert (y == [[7], [8]] * 3).all()


MISTAKES = {
    "nobody arrives elsewhere": ((", arrive_at(&bar, 1)", ""), simt.Deadlock, "lacks . of 2 arrivals"),
    "more arrivals than there are": (("init(&bar, 2)", "init(&bar, 3)"), simt.Deadlock, "lacks 1 of 3"),
    "a rank that is none": (("arrive_at(&bar, 1)", "arrive_at(&bar, 2)"), simt.LaneFault, "the cluster, of 2 blocks"),
    "not initialised yet": (("init(&bar, 2), value = 0;\n    cluster_arrive(); cluster_wait();", "value = 0;"),
                            simt.AsyncFault, "has not been initialised"),
    "wait without arrive": (("value = 0;\n    cluster_arrive();", "value = 0;"), simt.AsyncFault, "without an arrive"),
    "arrive twice": (("value = 0;\n    cluster_arrive();", "value = 0;\n    cluster_arrive(); cluster_arrive();"),
                     simt.AsyncFault, "without a wait in between"),
    "the other has gone": (
        ("    wait(&bar, 0);", "    if (rank() == 0) return;\n    wait(&bar, 0);\n    arrive_at(&bar, 0);"),
        simt.AsyncFault, "a barrier of the cluster is missing"),
    "half of a cluster stays away": (
        ("value;\n    cluster_arrive(); cluster_wait();", "value;\n    if (rank() == 0) { cluster_arrive(); "
         "cluster_wait(); } else wait(&bar, 1);"), simt.SimtError, None),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_named(what):
    (old, new), error, text = MISTAKES[what]
    assert ROUND.count(old) == 1
    with pytest.raises(error, match=text):
        run(ROUND.replace(old, new), 4, 64, np.zeros((4, 64), np.int32), cluster=2, check_races=True)


# Each thread sends two numbers to the next block of the cluster, and shows what it was sent.
SEND = """
    __shared__ __align__(8) float got[128];
    unsigned there, to = (rank() + 1) % 4;
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); cluster_wait();
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at(got + 2 * threadIdx.x)), "r"(to));
    float a = blockIdx.x, b = threadIdx.x;
    if (threadIdx.x % 3 < 2)
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" :: "r"(there), "f"(a), "f"(b) : "memory");
    cluster_arrive(), cluster_wait();
    if (threadIdx.x % 3 < 2) y[blockIdx.x * 64 + threadIdx.x] = got[2 * threadIdx.x] * 64 + got[2 * threadIdx.x + 1];
"""


@pytest.mark.parametrize("order, places", [("forward", None), ("reverse", 4), (5, 4)])
def test_stores_to_other_blocks(order, places):
    y = np.full((8, 64), -1, np.int32)
    run(SEND, 8, 64, y, cluster=4, order=order, places=places, check_races=True)
    block, thread = np.divmod(np.arange(512), 64)
    sender = block // 4 * 4 + (block + 3) % 4
    assert (y.reshape(-1) == np.where(thread % 3 < 2, sender * 64 + thread, -1)).all()


STORES = {
    "read too early": ("    cluster_arrive(), cluster_wait();\n    if", "    __syncthreads();\n    if",
                       simt.SimtError, None),
    "arrived without release": (
        "    cluster_arrive(), cluster_wait();\n    if",
        '    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); cluster_wait();\n    if',
        simt.RaceError, "race"),
    "two to one place": ("2 * threadIdx.x)), ", "2 * (threadIdx.x / 2))), ", simt.RaceError, "race"),
    "before the others are there": (' ::: "memory"); cluster_wait();', ' ::: "memory");',
                                    simt.AsyncFault, "may not have begun"),
    "past the end": ("at(got + 2 * ", "at(got + 64 + 2 * ", simt.MemoryFault, "of a block's 512 of shared memory"),
    "between two numbers": ("at(got + 2 * ", "at(got + 1 + 2 * ", simt.MemoryFault, "a multiple of 8"),
    "to a rank that is none": ("% 4;", "% 5;", simt.LaneFault, "the cluster, of 4 blocks"),
}  # fmt: skip


@pytest.mark.parametrize("what", STORES)
def test_a_mistake_with_a_store_is_named(what):
    old, new, error, text = STORES[what]
    assert SEND.count(old) == 1
    with pytest.raises(error, match=text):
        run(SEND.replace(old, new), 8, 64, np.zeros((8, 64), np.int32), cluster=4, check_races=True)


def test_who_leaves_has_come():
    """A barrier of the cluster waits for nobody who has left."""
    body = "if (rank() == 0) return;\n cluster_arrive(); cluster_wait();\n y[blockIdx.x] = 5;"
    y = np.zeros(4, np.int32)
    run(body, 4, 32, y, cluster=2)
    assert y.tolist() == [0, 5, 0, 5]


# Each block of a pair brings half of a tile, for both, as often as there are rows of tiles; two slots.
SHARED = """
    __shared__ __align__(1024) short tile[2][2][8][64];
    __shared__ u64 full[2], empty[2];
    if (threadIdx.x == 0) for (int s = 0; s < 2; s++) init(&full[s], 1), init(&empty[s], 2);
    cluster_arrive(); cluster_wait();
    for (int i = 0; i < rounds; i++) {
        if (threadIdx.x == 0) {
            wait(&empty[i % 2], i / 2 % 2 ^ 1);
            expect(&full[i % 2], 2048);
            load_all(tile[i % 2][rank()], &map, 0, 16 * i + 8 * rank(), &full[i % 2], 3);
        }
        wait(&full[i % 2], i / 2 % 2);
        for (int n = threadIdx.x; n < 1024; n += 64)
            y[(blockIdx.x * rounds + i) * 1024 + n] = tile[i % 2][0][0][n];
        __syncthreads();
        if (threadIdx.x < 2) arrive_at(&empty[i % 2], threadIdx.x);
    }
    cluster_arrive(); cluster_wait();
"""


def multicast(body, rounds=5, **options):
    array = np.arange(16 * rounds * 64, dtype=np.int16).reshape(-1, 64)
    y = np.full((4, rounds, 1024), -1, np.int16)
    report = run(
        body, 4, 64, y, simt.TensorMap(array, (8, 64)), np.int32(rounds), cluster=2, check_races=True,
        parameters="short* y, const __grid_constant__ CUtensorMap map, int rounds", **options,
    )  # fmt: skip
    assert (y == array.reshape(1, rounds, 1024)).all()
    return report


@pytest.mark.parametrize("order, places", [("forward", None), ("reverse", 2), (1, 3)])
def test_a_copy_for_two_blocks(order, places):
    report = multicast(SHARED, order=order, places=places)
    assert report.counters["simt__bulk_load_bytes.sum"] == 4 * 5 * 1024  # each half is read once


COPIES = {
    "for this block alone": ("&full[i % 2], 3)", "&full[i % 2], 1 << rank())", simt.Deadlock),
    "for a block that is none": ("&full[i % 2], 3)", "&full[i % 2], 7)", simt.AsyncFault),
    "bytes of one half": ("expect(&full[i % 2], 2048)", "expect(&full[i % 2], 1024)", simt.SimtError),
    "the other's readers are not asked": ("init(&empty[s], 2)", "init(&empty[s], 1)", simt.SimtError),
    "a warp speaks for both": ("        __syncthreads();\n", "", simt.RaceError),
    "leaves before the other's copies": ("    }\n    cluster_arrive(); cluster_wait();\n", "    }\n", simt.AsyncFault),
}


@pytest.mark.parametrize("what", COPIES)
def test_a_mistake_with_a_copy_for_two_is_seen(what):
    old, new, error = COPIES[what]
    assert SHARED.count(old) == 1
    with pytest.raises(error):
        multicast(SHARED.replace(old, new))


@pytest.mark.parametrize(
    "grid, options, text",
    [
        (3, {"cluster": 2}, "cluster: expected 1 to 16 blocks along x, as many as divide the grid's 3; got 2"),
        (4, {"cluster": 0}, "cluster: expected .*; got 0"),
        (4, {"cluster": (2, 2)}, r"cluster: expected .*; got \(2, 2\)"),
        (4, {"cluster": 1.5}, "cluster: expected .*; got 1.5"),
        (4, {"cluster": 2, "places": 1}, "places: expected 2 or more beside clusters of 2 blocks; got 1"),
        (4, {"cluster": 2, "only": [0]}, r"only: expected None beside clusters of 2 blocks; got \[0\]"),
    ],
)
def test_launches_that_are_none(grid, options, text):
    with pytest.raises(simt.LaunchError, match=text):
        run("y[0] = 1;", grid, 1, np.zeros(4, np.int32), **options)


@pytest.mark.parametrize("access", ["reads", "accesses"])
def test_loads_and_atomics_in_another_block_are_refused_by_a_sentence(access):
    there = "ld.shared::cluster.u32 %0, [%1];" if access == "reads" else "atom.shared::cluster.add.u32 %0, [%1], 1;"
    source = r"""
extern "C" __global__ void k(unsigned* y) {
    __shared__ unsigned s[32];
    unsigned at = (unsigned)__cvta_generic_to_shared(s + threadIdx.x), far, got;
    s[threadIdx.x] = blockIdx.x;
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(far) : "r"(at));
    asm volatile("THERE" : "=r"(got) : "r"(far) : "memory");
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    y[blockIdx.x * 32 + threadIdx.x] = got;
}""".replace("THERE", there)
    kernel, y = simt.compile(source)["k"], np.zeros(64, np.uint32)
    with pytest.raises(
        simt.MemoryFault, match=f"line 8 .*{access} 4 bytes in the shared memory of another block of its"
    ):
        kernel(2, 32, y, cluster=2)
    kernel(1, 32, y)  # alone, a block is its own cluster
