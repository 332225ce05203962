"""kernels.paged.decode and append_attention on the SIMT machine: right on hostile lengths, pages, groups and plans, no
race, the same bits whoever else is there, and an error before anything is written for whatever is not allowed."""

import functools
import re
import sys

import pytest
import torch
from guarded_tensors import fences_stand
from paged_problems import Problem

import simt
from kernels import paged
from kernels.paged import decoding
from kernels.paged.plan import card, options, plan
from lab import cuda
from lab.source import inlined
from lab.stream import still_running

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")

SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
LENS = [33, 0, 1, 17, 127, 16]


def call(p, **how):
    run = paged.append_attention if p.q.ndim == 4 else paged.decode
    assert run(p.q, p.cache, p.requests, out=p.out, **how) is p.out
    return p.out


def launch(p, out=None, invariant=False, pdl=False, scale=None, check_races=False, newer=0, **chosen):
    """With a plan of our choice."""
    cache, new = p.cache, p.q.shape[1] if p.q.ndim == 4 else 1
    pool, out = (cache.k_pages, cache.v_pages, cache.table, cache.lens), p.out if out is None else out
    scale = p.q.shape[-1] ** -0.5 if scale is None else scale
    decoding.launch(p.q, *pool, p.slots, scale, out, new, pdl, invariant, newer, chosen, check_races=check_races)
    return out


# Right


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64])
def test_right_for_all_pages(page_size):
    dtype = torch.bfloat16 if page_size in (1, 16) else torch.float16
    p = Problem([*LENS, 65, page_size, page_size + 1], page_size, 8, 2, 64, dtype=dtype)
    p.close(call(p))
    assert fences_stand(p.out)


# lengths, page, heads, kv heads, head_dim, new tokens: groups of 1 to 71 rows, several head tiles, more than one pass
SHAPES = [
    ([33, 2, 100], 16, 8, 8, 80, None),
    ([70, 1], 8, 28, 4, 128, None),
    ([40, 19], 16, 71, 1, 64, None),
    ([33, 0, 1, 3, 100], 16, 8, 2, 64, 3),
    ([33, 2, 75], 4, 16, 1, 64, 2),
    ([50, 8, 21], 32, 14, 2, 80, 5),
    ([40, 30], 2, 4, 4, 128, 17),
    ([60, 19, 5], 16, 16, 2, 32, 20),  # 160 rows: three pieces
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_for_all_groups_and_new_tokens(shape):
    *sizes, new = shape
    p = Problem(*sizes, new=new, dtype=torch.bfloat16 if sizes[4] == 128 else torch.float16)
    p.close(call(p))
    assert fences_stand(p.out)


SHARED_OUT = [
    dict(warps=8, side=1, tile=16),
    dict(warps=8, side=2, tile=16, stages=1, shares=7),
    dict(warps=1, side=1, tile=16, shares=1),
    dict(warps=4, side=4, tile=32, stages=2, shares=3),
    dict(warps=2, side=1, tile=32, shares=40, threads=64),
]


@pytest.mark.parametrize("chosen", SHARED_OUT, ids=str)
def test_right_however_it_is_shared_out(chosen):
    """Shares that begin and end anywhere in a row, hold several rows, or leave warps without a tile; more than one
    window of pages."""
    p = Problem([140, 0, 1, 150], 64 if chosen["warps"] == 8 else 4, 8, 4, 32)
    for invariant in (False, True):
        p.close(launch(p, p.out.fill_(torch.nan), invariant, **chosen))
    assert fences_stand(p.out)


def test_more_requests_than_a_warp_has_lanes():
    lens = torch.randint(0, 50, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    p = Problem(lens, 8, 2, 1, 32)
    for invariant in (False, True):
        p.close(launch(p, p.out.fill_(torch.nan), invariant, shares=9))


def test_nobody_gets_zeros():
    """Slots that are nobody's, in a list of slots; on a card also those out of range, lengths out of range, and pages:
    nothing out of bounds is read."""
    p = Problem([33, 17, 50], 16, 4, 2, 32)
    slots = torch.cat([p.slots[:1], torch.tensor([-1], dtype=torch.int32), p.slots[2:]])
    out = paged.decode(p.q, p.cache, slots, out=p.out)
    assert (out[1] == 0).all()
    p.said[1] = p.said[1][:, :, :0]
    p.close(out)
    cache, slots = p.cache, slots.clone()
    slots[1] = 1 << 30
    lens, table = cache.lens.clone(), cache.table.clone()
    lens[slots[2]], table[slots[0], 0] = -5, 1 << 30
    pool = cache.k_pages, cache.v_pages, table, lens
    decoding.launch(p.q, *pool, slots, 0.2, out.fill_(torch.nan), 1, False, False, check_races=True)
    assert (out[1:] == 0).all() and fences_stand(p.out)
    lens[slots[2]], table[slots[2]] = 1 << 30, -7  # all that the table has room for, of the pool's last page
    decoding.launch(p.q, *pool, slots, 0.2, out, 1, False, False)


def test_tokens_that_are_newer_do_not_count():
    p = Problem([33, 3, 64], 16, 4, 2, 32)
    launch(p, newer=5)
    p.said = [said[:, :, : max(0, said.shape[2] - 5)] for said in p.said]
    p.close(p.out)


def test_a_freed_page_is_never_seen():
    """Pages that held NaN, in the hands of another request, whose last page is partly filled."""
    p = Problem([30, 45], 16, 4, 2, 32, max_len=120)
    cache = p.cache
    waste = cache.new()
    cache.append([waste], *torch.full((2, 1, 3 * 16, 2, 32), torch.nan, dtype=torch.float16))
    cache.free(waste)
    for tokens in (1, 16, 2):
        k, v = torch.randn(2, 1, tokens, 2, 32, generator=torch.Generator().manual_seed(tokens)).half()
        cache.append(p.requests[:1], k, v)
        p.grow(p.requests[0], k[0], v[0])
        p.close(call(p))


def test_forks_see_their_own_tokens():
    p = Problem([37, 20], 16, 4, 2, 32, max_len=120)
    fork, rng = p.cache.fork(p.requests[0]), torch.Generator().manual_seed(5)
    p.requests[1], p.said[1] = fork, p.said[0]
    for some in (p.requests, p.requests[:1], p.requests[1:]):
        k, v = torch.randn(2, len(some), 7, 2, 32, generator=rng).half()
        p.cache.append(some, k, v)
        for one, keys, values in zip(some, k, v):
            p.grow(one, keys, values)
        p.close(call(p))


# Whoever else is there


def test_invariant_results_do_not_hang_on_the_others():
    """Bit for bit, alone and among others, and in the other order; without, they do hang on them."""
    lens = [1, 130, 700, 300, 16, 0, 260]
    p = Problem(lens, 16, 8, 2, 64)
    alone = functools.partial(paged.decode, cache=p.cache)
    found = call(p, invariant=True).clone()
    p.close(found)
    for n, request in enumerate(p.requests):
        assert torch.equal(alone(p.q[n : n + 1], requests=[request], invariant=True)[0], found[n]), lens[n]
    back = alone(p.q.flip(0), requests=p.requests[::-1], invariant=True)
    assert torch.equal(back.flip(0), found)
    usual, cache, one = launch(p, shares=7).clone(), p.cache, torch.empty_like(p.q[:1])
    pool = cache.k_pages, cache.v_pages, cache.table, cache.lens
    for n in (2, 3):
        decoding.launch(p.q[n : n + 1], *pool, p.slots[n : n + 1], 64**-0.5, one, 1, False, False, chosen={"shares": 7})
        assert not torch.equal(one[0], usual[n])
    with_new = Problem([40, 200, 9], 16, 8, 2, 64, new=3)
    found = call(with_new, invariant=True).clone()
    with_new.close(found)
    for n, request in enumerate(with_new.requests):
        one = paged.append_attention(with_new.q[n : n + 1], with_new.cache, [request], invariant=True)
        assert torch.equal(one[0], found[n])


def test_the_newest_tokens_and_q_may_come_late():
    """Under programmatic dependent launch: what is still being written by the kernel ahead."""
    for new in (None, 3):
        p = Problem([33, 17, 3, 64], 16, 8, 2, 64, new=new)
        places = []
        for request, tokens in zip(p.requests, p.cache.lengths(p.requests)):
            for t in range(tokens - (new or 1), tokens):
                page = p.cache.pool.pages[request.slot][t // 16]
                places += [pages[page, h, t % 16] for pages in (p.cache.k_pages, p.cache.v_pages) for h in range(2)]
        still_running(writes=(p.q, p.out, *places))
        p.close(call(p, pdl=True))
    p = Problem([100], 16, 8, 2, 64)
    still_running(writes=(p.cache.k_pages[p.cache.pool.pages[p.requests[0].slot][1]],))
    with pytest.raises(simt.AsyncFault, match="which the launch ahead may still write"):
        launch(p, pdl=True, shares=1)


# Races


RACES = [
    (Problem, ([150, 16, 99], 16, 8, 4, 64), dict(warps=4, side=1, tile=16, stages=2)),
    (Problem, ([150, 16, 99], 4, 8, 4, 64), dict(warps=4, side=4, tile=32, stages=1)),
    (Problem, ([150, 30], 16, 40, 2, 32), dict(warps=4, side=2, tile=16, stages=2)),  # teams of two warps
    (Problem, ([75, 20], 8, 39, 1, 32), dict(warps=9, side=3, tile=16, stages=1)),  # an odd number of everything
]


@pytest.mark.parametrize("make, sizes, chosen", RACES, ids=str)
def test_no_race(make, sizes, chosen):
    p = make(*sizes)
    for invariant in (False, True):
        p.close(launch(p, p.out.fill_(torch.nan), invariant, check_races=True, shares=5, **chosen))


BARRIERS = {  # in decode.cu with its headers; what is taken out, and which of several
    "the copies of other lanes": ("sync_team(team);", 0),
    "who still reads a slot of the ring": ("sync_team(team);", 1),
    "the queries": ("        __syncwarp();", 1),
    "who still reads the sums of all warps": ("            __syncthreads(); // who still reads", 0),
    "the copies of its own": ("<STAGES * PARTS - 1 - PART>", 0),
}


@pytest.mark.parametrize("what", BARRIERS)
def test_the_race_check_would_see_a_missing_wait_for(what):
    wait, number = BARRIERS[what]
    p = Problem([150, 16, 99], 16, 8, 4, 64)
    with pytest.raises((simt.RaceError, simt.MemoryFault)):
        launch_changed(wait, "<STAGES * PARTS - PART>" if "STAGES" in wait else "//", number, p)


def launch_changed(old, new, number, p, races=True, merge=False):
    """What decode launches, with the number-th `old` replaced by `new` in one of the sources, and scratch memory that
    is full of NaN and no larger than the plan says."""
    cache, q = p.cache, p.q
    (n_requests, n_heads, head_dim), (n_pages, n_kv_heads, page_size, _) = q.shape, cache.k_pages.shape
    sizes = n_requests, n_heads // n_kv_heads, n_kv_heads, head_dim, n_pages, page_size, cache.table.shape[1]
    chosen = dict(warps=4, side=1, tile=16, stages=2, shares=5)
    made, how = plan(*sizes, *card(q.device), **chosen), {}
    both = options(q.dtype, made, page_size, 1, False)
    how["decode.cu"] = (*both, f"-DRING_STAGES={made.stages}")
    how["merge.cu"] = (*both, f"-DTHREADS={made.threads}")
    modules = {}
    for name, flags in how.items():
        source = inlined(f"kernels/paged/{name}")
        if name == ("merge.cu" if merge else "decode.cu") and old:
            parts = source.split(old)
            assert len(parts) > number + 1
            source = old.join(parts[: number + 1]) + new + old.join(parts[number + 1 :])
            modules[name] = cuda.compile(source, flags)
        else:
            modules[name] = cuda.load(decoding.HERE / name, flags)
    scratch = [torch.full((size,), torch.nan) for size in (made.sums_at, made.floats - made.sums_at)]
    rows = n_requests, made.rows, *cache.table.shape
    args = q, cache.k_pages, cache.v_pages, p.slots, cache.lens, cache.table, *scratch, *rows, n_pages, 0
    scale = head_dim**-0.5 * decoding.LOG2_E
    modules["decode.cu"].decode(made.shares, 32 * made.warps, *args, scale, 0, shared=made.shared, check_races=races)
    max_len = cache.table.shape[1] * page_size
    args = *scratch, p.slots, cache.lens, p.out, *rows[:3], max_len, 0, made.shares
    modules["merge.cu"].merge(made.merge_blocks, made.threads, *args, check_races=races)
    return p.out


def test_scratch_memory_may_hold_anything_and_is_as_large_as_it_must_be():
    p = Problem([150, 16, 0, 99], 16, 8, 4, 64)
    p.close(launch_changed("", "", 0, p))


MISTAKES = {  # of pages, which the tests above would miss if these were not seen
    "the next window is forgotten": (", window = next_window;", ";", False),
    "pages of the first window again": ("first_page += 32, ", "", False),
    "a head further": ("* pool.n_kv_heads + kv_head)", "* pool.n_kv_heads + kv_head / 2 * 2)", False),
    "what is behind a request is not zero": ("else store_zeros(to);", "else copy_async(to, pool.v + at, once);", False),
    "the window of the request before": ("if (next.mine > 0) enter_request(lane);\n    }", "}", False),
    "segments of another row": (
        "first_block + (long long)b * requests.rows + work_row;",
        "first_block + b * requests.rows;",
        True,
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_in_the_pages_would_be_seen(what):
    old, new, merge = MISTAKES[what]
    p = Problem([150, 16, 0, 290], 4 if "not zero" in what else 1, 8, 4, 64)
    with pytest.raises((AssertionError, simt.SimtError)):
        p.close(launch_changed(old, new, 0, p, races=False, merge=merge))


# What is read


def test_pages_are_read_once_and_without_bank_conflicts():
    for page_size, head_dim in ((16, 128), (4, 64)):
        p = Problem([240, 128], page_size, 8, 2, head_dim)
        first, second = paged.counters(p.q, p.cache, p.requests, warps=4, side=1, stages=2, shares=20)
        read = 2 * 368 * 2 * head_dim * 2 // 32
        rest = first.counters[SECTORS.format("ld")] - read
        assert first.counters["smsp__inst_executed_op_ldgsts.sum"] == read * 32 // 512
        assert 0 < rest < 20 * (4 * 2 * head_dim * 2 // 32 * 4 + 4 * 60)  # q, tables and lengths
        assert first.counters[CONFLICTS.format("ld")] == 0
        assert second.counters[SECTORS.format("st")] == p.q.numel() * 2 // 32


# Errors


def changed_cache(p, **changes):
    for name, value in changes.items():
        setattr(p.cache, name, value)
    return p.cache


BAD = {  # what changes of a call, the error, its words
    "q an array": (lambda p: {"q": p.q.numpy()}, TypeError, "q must be a torch tensor, got ndarray"),
    "q of another dtype": (lambda p: {"q": p.q.float()}, TypeError, "q must be of torch.float16, like the first"),
    "q for two": (lambda p: {"q": p.q[:2].clone()}, ValueError, "slots must have shape (2,)"),
    "heads that are no multiple": (
        lambda p: {"q": p.q[:, :3].contiguous()}, ValueError, "n_heads must be a multiple of n_kv_heads, got 3 query",
    ),
    "another head_dim": (lambda p: {"q": torch.ones(3, 4, 16).half()}, ValueError, "q must have shape (n_req"),
    "q on an odd address": (
        lambda p: {"q": torch.ones(3 * 4 * 32 + 8).half()[1:-7].view(3, 4, 32)}, ValueError, "q must start at an",
    ),
    "no cache": (lambda p: {"cache": p.cache.k_pages}, TypeError, "cache must be a PagedCache, got Tensor"),
    "requests a number": (lambda p: {"requests": 3}, TypeError, "requests must be a sequence of requests, got int"),
    "a request freed": (
        lambda p: {"requests": [p.requests[0], p.cache.free(p.requests[1]) or p.requests[1], p.requests[2]]},
        ValueError, "requests[1] must be alive",
    ),
    "slots of 64 bits": (lambda p: {"requests": p.slots.long()}, TypeError, "slots must be of torch.int32"),
    "a slot that is none": (lambda p: {"requests": p.slots + 5}, ValueError, "slots must be from -1 (nobody) to 4"),
    "scale NaN": (lambda p: {"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    "out over the pool": (
        lambda p: {"out": p.cache.k_pages.view(-1)[: 3 * 4 * 32].view(3, 4, 32)}, ValueError,
        "out must not share memory with k_pages",
    ),
    "a length beyond the table": (
        lambda p: {"cache": changed_cache(p, lens=torch.full((5,), 99, dtype=torch.int32))}, ValueError,
        "lens must be from 0 to 64, what a row of table has room for, got 99",
    ),
    "a page out of the pool": (
        lambda p: {"cache": changed_cache(p, table=torch.full((5, 4), 77, dtype=torch.int32))}, ValueError,
        "table must name pages from 0 to",
    ),
    "a page twice": (
        lambda p: {"cache": changed_cache(p, table=torch.zeros(5, 4, dtype=torch.int32))}, ValueError,
        "table must name a page once in a request, got page 0 twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_nothing_is_launched_on_bad_input(what, monkeypatch):
    change, kind, words = BAD[what]
    monkeypatch.setattr(decoding, "launch", lambda *_, **__: pytest.fail("it was launched"))
    p = Problem([33, 17, 50], 16, 4, 2, 32)
    with pytest.raises(kind, match=re.escape(words)) as caught:
        paged.decode(**{"q": p.q, "cache": p.cache, "requests": p.requests, "out": p.out} | change(p))
    assert re.match("(decode|slots): ", str(caught.value)) and p.out.isnan().all() and fences_stand(p.out)


def test_new_tokens_have_a_dimension_of_their_own():
    p = Problem([33, 17, 50], 16, 4, 2, 32)
    with pytest.raises(ValueError, match=r"append_attention: q must have shape \(n_requests, new, n_heads, 32\)"):
        paged.append_attention(p.q, p.cache, p.requests)
    with pytest.raises(ValueError, match=r"decode: q must have shape \(n_requests, n_heads, 32\)"):
        paged.decode(p.q[:, None], p.cache, p.requests)


# Operators


def test_they_are_operators():
    """Of a cache's tensors; tests/test_operators.py has them compiled."""
    for new, name in ((None, "paged_decode"), (2, "paged_append_attention")):
        p = Problem([33, 17, 50], 16, 4, 2, 32, new=new)
        inputs = p.q, p.cache.k_pages, p.cache.v_pages, p.cache.table, p.cache.lens, p.slots
        p.close(getattr(torch.ops.matmul_to_mamba, name)(*inputs))
