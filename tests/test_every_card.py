"""Cards other than the one that was measured: sources compile for them or say what runs there instead, and plans keep
to their multiprocessors and shared memory. All choices of options and architectures: python -m tests.every_card."""

import sys

import every_card
import numpy as np
import pytest
import torch
from paged_problems import Problem
from standing_in import standing_in

import ref.attention
import ref.gemv
import simt
from kernels import attention, fusion, gemv, kv_cache, latent, lowbit, matmul, paged
from kernels.latent import splitting
from lab import card, cuda, cuda_driver
from lab.cuda import needs
from lab.source import with_includes
from simt import nvrtc

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

CHOICES = every_card.choices()
SOURCES = sorted(path.relative_to(every_card.KERNELS).as_posix() for path in every_card.KERNELS.rglob("*.cu"))
FOLDERS = sorted({source.partition("/")[0] for source in SOURCES})
HOPPERS_OWN = "wgmma.mma_async", "setmaxnreg"  # of 9.0 and no other
SMALL = (card.T4, card.A100, card.RTX_3060, card.RTX_4090, card.RTX_5090)


# Sources


def test_the_list_has_every_source_and_what_is_refused_is_there():
    assert {source for source, _ in CHOICES} == set(SOURCES)
    listed = needs._read(every_card.KERNELS / needs.FILE)
    assert set(listed) <= set(SOURCES) and list(listed) == sorted(listed)
    for entry in listed.values():
        assert set(entry) == {"capability", "for", "instead"} and all(entry.values())
        assert entry["capability"] in ("9.0", "9.0 or newer")


def test_what_is_of_one_card_alone_says_so():
    """Whether "9.0" stands there and not "9.0 or newer" follows from the instructions: no compilation is needed."""
    for source in SOURCES:
        parts = with_includes(f"kernels/{source}", root=every_card.ROOT)
        text = "".join((every_card.ROOT / part).read_text(encoding="utf-8") for part in parts)
        entry = needs.of(every_card.KERNELS / source)
        if entry and entry["capability"] == "9.0":
            assert any(word in text for word in HOPPERS_OWN), source


@pytest.mark.parametrize("folder", FOLDERS)
def test_sources_compile_for_the_oldest_card_and_hoppers_for_the_newest(folder):
    """The machine code of one choice of options: for a T4 of what runs everywhere, for an RTX 5090 of what needs 9.0 or
    newer. Between the two nothing is told apart but what tests of 9.0 compile."""
    seen = set()
    for source, options in CHOICES:
        entry = needs.of(every_card.KERNELS / source)
        if source.partition("/")[0] != folder or source in seen or (entry and entry["capability"] == "9.0"):
            continue
        seen.add(source)
        how, why = every_card.end(source, options, card.RTX_5090 if entry else card.T4)
        assert how == "compiled", (source, why)


@pytest.mark.parametrize(
    "source, options, on, said",
    [
        ("matmul/mma.cu", ("-DDTYPE=__nv_bfloat16",), card.T4,
         r"mma.cu: bfloat16 on tensor cores needs a card of compute capability 8.0 or newer, got Tesla T4, 7.5; "
         r"float16 runs there: give every tensor of the call as \.to\(torch.float16\), which ends at 65504"),
        ("matmul/tma.cu", (), card.RTX_4090,
         "tma.cu: needs a card of compute capability 9.0 or newer, for TMA, got NVIDIA GeForce RTX 4090, 8.9; "
         "kernels.matmul.mma runs there"),
        ("ssd/fused.cu", (), card.RTX_5090,
         "fused.cu: needs a card of compute capability 9.0, for wgmma, got NVIDIA GeForce RTX 5090, 12.0; "
         "kernels.ssd.five runs there"),
    ],
    ids=["bfloat16 on a T4", "TMA before Hopper", "wgmma after Hopper"],
)  # fmt: skip
def test_what_a_card_lacks_is_a_sentence(source, options, on, said):
    with card.as_if(on), pytest.raises(RuntimeError, match=f"^{said}$"):
        cuda.load(every_card.KERNELS / source, options)._on_machine()


def test_a_card_that_is_too_old_is_a_sentence(monkeypatch):
    monkeypatch.setattr(cuda_driver, "capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce GTX 1080")
    with pytest.raises(
        RuntimeError,
        match=r"need a card of compute capability 7.5 or newer \(T4, RTX 20 and later\), got NVIDIA GeForce GTX 1080, "
        "6.1; CPU tensors run on the SIMT machine",
    ):
        cuda.compile('extern "C" __global__ void k(int* x) { *x = 1; }')._arch_on(0)


@pytest.mark.parametrize(
    "capability, arch", [((9, 0), "sm_90a"), ((8, 9), "sm_89"), ((12, 0), "sm_120"), ((8, 4), "sm_80")]
)
def test_code_of_one_card_alone_is_made_anew_for_another(monkeypatch, capability, arch):
    """one_launch.cu is measured as sm_90a, which no other card takes, and needs no more than 9.0."""
    monkeypatch.setattr(cuda_driver, "capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(nvrtc, "architectures", lambda: ("sm_75", "sm_80", "sm_89", "sm_90", "sm_120"))
    assert cuda.compile("", arch="sm_90a")._arch_on(0) == arch


def test_a_mistake_of_ones_own_stays_the_compilers():
    with card.as_if(card.T4), pytest.raises(simt.CompileError, match='identifier "y" is undefined'):
        cuda.compile('extern "C" __global__ void k(int* x) { *x = y; }')._on_machine()


# What takes the place of an instruction

ROUNDS = """
#include "device/copy.cuh"
#include "device/mma.cuh"
#include "device/reduce_integers.cuh"
#include "kv_cache/codes.cuh"
extern "C" __global__ void products(const unsigned* a, const unsigned* b, int* whole, float* sums) {
    int d[4] = {};
    float f[4] = {};
    const unsigned of[4] = {a[threadIdx.x], a[32 + threadIdx.x], a[64 + threadIdx.x], a[96 + threadIdx.x]};
    mma_m16n8k32(d, of, b[threadIdx.x], b[32 + threadIdx.x]);
    mma_m16n8k16(f, of, b[threadIdx.x], b[32 + threadIdx.x], __half());
    for (int i = 0; i < 4; i++) whole[4 * threadIdx.x + i] = d[i], sums[4 * threadIdx.x + i] = f[i];
}
extern "C" __global__ void copies(const uint4* from, uint4* to, int there) {
    __shared__ uint4 place[64];
    copy_async(shared_address(place + threadIdx.x), from + threadIdx.x, evict_first());
    copy_async_or_zero(shared_address(place + 32 + threadIdx.x), from + threadIdx.x, threadIdx.x < there);
    copy_async_commit();
    copy_async_wait<0>();
    copy_async_word(shared_address(place + 32 + threadIdx.x) + 4, from + threadIdx.x, threadIdx.x % 3 * 2);
    copy_async_commit();
    copy_async_wait<0>();
    to[threadIdx.x] = place[threadIdx.x], to[32 + threadIdx.x] = place[32 + threadIdx.x];
}
extern "C" __global__ void lanes(const int* x, int* to) {
    to[threadIdx.x] = __reduce_add_sync(~0u, x[threadIdx.x]);
    to[32 + threadIdx.x] = __reduce_max_sync(~0u, (unsigned)x[threadIdx.x]);
}
extern "C" __global__ void bytes(const unsigned* codes, unsigned* to) {
    unsigned a[4];
    Fp8::keys(a, codes + 2 * threadIdx.x);
    for (int i = 0; i < 4; i++) to[4 * threadIdx.x + i] = a[i];
}
"""


def test_what_turing_lacks_is_replaced_bit_for_bit():
    """The same numbers as by the instructions of Hopper. Sums of float16 in two pieces are exact here as in one."""
    rng, found = np.random.default_rng(1), []
    a, b = (rng.integers(0, 2**32, 32 * n, np.uint32) for n in (4, 2))
    few = rng.integers(-8, 9, (2, 128)).astype(np.float16)  # of which no sum is rounded
    from_, x = rng.integers(0, 2**32, 128, np.uint32), rng.integers(-(2**20), 2**20, 32, np.int32)
    codes = np.arange(256, dtype=np.uint8).view(np.uint32)
    for arch in ("sm_75", "sm_90"):
        module = simt.compile(ROUNDS, (f"-I{every_card.KERNELS}",), arch)
        whole, sums, ignored = np.zeros(128, np.int32), np.zeros(128, np.float32), np.zeros(128, np.float32)
        module["products"](1, 32, a, b, whole, ignored)
        halves = few[0].repeat(2).view(np.uint32), few[1].view(np.uint32)
        module["products"](1, 32, *halves, np.zeros(128, np.int32), sums)
        copied, of_lanes, wide = np.zeros(256, np.uint32), np.zeros(64, np.int32), np.zeros(128, np.uint32)
        module["copies"](1, 32, from_, copied, np.int32(20))
        module["lanes"](1, 32, x, of_lanes)
        module["bytes"](1, 32, codes, wide)
        found.append((whole, sums, copied, of_lanes, wide))
    for what, turing, hopper in zip(("whole", "sums", "copied", "lanes", "bytes"), *found):
        assert turing.any() and np.array_equal(turing, hopper), (what, turing, hopper)


# Plans


def tensors(*shapes, dtype=torch.float16):
    rng = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(*shape, generator=rng).to(dtype) for shape in shapes]


def by_gemv():
    W, x = tensors((170, 4096), (4096,))
    return gemv.gemv(W, x), W.double() @ x.double()


def by_unaligned_gemv():
    W, x = tensors((300, 1027), (1027,))
    return gemv.gemv(W, x), W.double() @ x.double()


def by_16_rows_of_4_bits():
    W, x = tensors((96, 1024), (16, 1024))
    Wq = lowbit.quantize(W, 4, 128)
    return lowbit.gemv(Wq, x), x.double() @ Wq.dequantize().double().T


def by_decode():
    q, k, v = tensors((1, 8, 64), (1, 600, 2, 64), (1, 600, 2, 64))
    return attention.decode(q, k, v), decoded(q, k, v)


def by_decode_of_fp8():
    q, k, v = tensors((1, 8, 64), (1, 600, 2, 64), (1, 600, 2, 64))
    k, v = kv_cache.quantize(k, "fp8"), kv_cache.quantize(v, "fp8")
    return kv_cache.decode(q, k, v), decoded(q, k.dequantize(), v.dequantize())


def by_pages():
    problem = Problem([300, 5, 0, 129], 16, 8, 2, 64)
    return paged.decode(problem.q, problem.cache, problem.requests), problem.wanted()


def by_latent_decode():
    q, cache = tensors((2, 16, 576), (2, 200, 576))
    scores = q.double() @ cache.double().transpose(1, 2) * 0.07
    return latent.decode(q, cache, scale=0.07), scores.softmax(-1) @ cache.double()[..., :512]


def by_linear():
    x, W = tensors((70, 136), (200, 136))
    return matmul.linear(x, W), x.double() @ W.double().T


def by_norm_glu():
    x, norm, gate, up = tensors((512,), (512,), (200, 512), (200, 512))
    h = x.double() * (x.double().pow(2).mean() + 1e-5).rsqrt() * norm.double()
    return fusion.norm_glu(x, norm, gate, up), torch.nn.functional.silu(gate.double() @ h) * (up.double() @ h)


def decoded(q, k, v):
    return torch.from_numpy(ref.attention.decode_attention(*(t.double().numpy() for t in (q, k, v))))


CALLS = [by_gemv, by_unaligned_gemv, by_16_rows_of_4_bits, by_decode, by_decode_of_fp8, by_pages, by_latent_decode]
CALLS += [by_linear, by_norm_glu]


@pytest.mark.filterwarnings("ignore:linear. wgmma needs")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_right_on_smaller_cards(call):
    """As planned for their multiprocessors, in their shared memory, by code that was compiled for them."""
    for on in (card.T4, card.RTX_3060):
        if on == card.T4 and call is by_latent_decode:
            continue
        with standing_in(on) as launched:
            y, wanted = call()
        error = torch.linalg.norm(y.double() - wanted.view(y.shape)) / torch.linalg.norm(wanted)
        assert error < 1e-3, (on.name, error)
        assert launched and all(shared <= on.shared for _, _, shared in launched)


def test_plans_follow_the_card():
    """More multiprocessors, more blocks; and the machine's answers are what plans are made from."""
    from kernels.attention.plan import card as asked
    from kernels.attention.plan import plan

    blocks = {}
    for on in SMALL:
        with standing_in(on):
            here = asked(torch.device("cpu"))
        assert here == (on.multiprocessors, on.shared)
        p = plan(1, 32, 8, 64, 16384, *here)
        blocks[on] = p.shares
        assert p.shared <= on.shared and 0.7 * on.multiprocessors <= p.shares <= 4 * on.multiprocessors
    assert blocks[card.RTX_5090] > blocks[card.RTX_4090] > blocks[card.T4] > blocks[card.RTX_3060]
    assert asked(torch.device("cpu")) == (132, 227 * 1024)


@pytest.mark.parametrize("on", SMALL, ids=lambda on: on.name)
def test_sizes_of_models_fit_into_shared_memory(on):
    """Plans alone, for the sizes of models: whatever does not fit is refused with a sentence."""
    from kernels.attention.plan import plan as attention_plan
    from kernels.lowbit.plan import plan as lowbit_plan

    here = on.multiprocessors, on.shared
    for rows, cols in ((4096, 4096), (14336, 4096), (4096, 14336), (64, 32768)):
        for bits in (8, 4, 2):
            for m in (1, 2, 4, 5, 16):
                assert lowbit_plan(rows, cols, m, bits, 128 if bits < 8 else 0, 2, *here).shared <= on.shared
    for batch, kv_len in ((1, 128), (1, 131072), (64, 4096)):
        for n_heads, n_kv_heads, head_dim in ((32, 8, 128), (32, 4, 64), (64, 8, 128), (16, 16, 256), (128, 8, 128)):
            p = attention_plan(batch, n_heads, n_kv_heads, head_dim, kv_len, *here)
            assert p.shared <= on.shared and p.shares <= 8 * on.multiprocessors
    for n_heads in (1, 16, 32, 64, 128):
        if on == card.T4:
            with pytest.raises(
                RuntimeError, match="heads needs [0-9]+ bytes of shared memory for a block, and this card"
            ):
                splitting.plan(4, n_heads, 2048, *here)
        else:
            assert splitting.plan(4, n_heads, 2048, *here).shared <= on.shared


def test_latent_decode_with_one_tile_at_a_time():
    """As on cards of 99 KB, where there is no room to copy ahead: no race, tiles that are not full, a request of 0."""
    n_heads = 20  # of 32
    q, cache = tensors((3, n_heads, 576), (3, 150, 576))
    lens = torch.tensor([150, 0, 65], dtype=torch.int32)
    chosen = {"stages": 1, "shares": 4}
    out = torch.full((3, n_heads, 512), torch.nan, dtype=torch.float16)
    latent.counters(q, cache, kv_lens=lens, scale=0.07, rung="split", out=out, check_races=True, **chosen)
    for b, n in enumerate(lens.tolist()):
        here = cache[b, :n].double()
        wanted = (q[b].double() @ here.T * 0.07).softmax(-1) @ here[:, :512] if n else torch.zeros(n_heads, 512)
        assert torch.allclose(out[b].double(), wanted.double(), atol=4e-3)
