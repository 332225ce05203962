"""Pages of 8 and 4 bits on the SIMT machine: the codes are those of ref/kv_cache.py however tokens come, decode and
append_attention are right over them, no freed page is seen, no race, and an error names what is not offered."""

import sys

import numpy as np
import pytest
import torch
from guarded_tensors import fences_stand
from paged_codes import CodeProblem, kept

import simt
from kernels import kv_cache, paged
from kernels.paged import code_decoding, code_pages
from lab.stream import still_running
from ref import paged as ref

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="there is no NVRTC for macOS")
ALL = (8, "fp8", 4)


def launch(p, invariant=False, pdl=False, newer=0, check_races=False, **chosen):
    """With a plan of our choice."""
    new = p.q.shape[1] if p.q.ndim == 4 else 1
    how = new, pdl, invariant, newer, chosen
    code_decoding.launch(p.q, p.cache, p.slots, p.q.shape[-1] ** -0.5, p.out, *how, check_races=check_races)
    return p.out


def read(p, request):
    """Keys and values of a request, as float64."""
    slot = request.slot
    return [x.double() for x in code_pages.dequantized(p.cache, p.cache.pool.pages[slot], p.cache.pool.lens[slot])]


# bits, page, heads, kv heads, head_dim, tokens that come at a time: words of 16, 8 and 4 bytes, and groups of 16
SHAPES = [
    (8, 16, 8, 2, 64, 1000),
    ("fp8", 32, 14, 1, 80, 7),
    (4, 64, 4, 2, 80, 7),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right_for_all_bits_and_pages(shape):
    bits, *sizes, pieces = shape
    p = CodeProblem(bits, [33, 0, 1, 17, 16], *sizes, pieces=pieces)
    for request, said in zip(p.requests, p.said):
        for found, wanted in zip(read(p, request), said[:, 0]):
            assert torch.equal(found, wanted)
    assert paged.decode(p.q, p.cache, p.requests, out=p.out) is p.out
    p.close(p.out)
    assert fences_stand(p.out)


SHARED_OUT = [  # bits; heads, kv heads, head_dim, new tokens; what is chosen of a plan, and whether it is invariant
    (8, (8, 4, 32, None), dict(warps=8, team=8, tile=16), True),
    ("fp8", (8, 4, 32, None), dict(warps=4, team=1, tile=16, stages=1, shares=3), False),
    (4, (8, 4, 32, 3), dict(warps=4, team=2, tile=32, stages=2, shares=2), True),
    ("fp8", (8, 2, 64, 5), dict(warps=2, team=1, tile=32, shares=2), False),  # 20 rows: two head tiles
]


@pytest.mark.parametrize("case", SHARED_OUT, ids=str)
def test_right_however_it_is_shared_out(case):
    """Shares that begin and end anywhere in a row, hold several rows, or leave warps without a tile; no race."""
    bits, (*heads, new), chosen, invariant = case
    p = CodeProblem(bits, [70, 0, 1, 75, 3], 16 if new else 64, *heads, new=new)
    p.close(launch(p, invariant, check_races=True, **chosen))
    assert fences_stand(p.out)


def test_a_warp_without_a_tile_in_its_first_row():
    """It begins with another row of the same request, whose pages it has not entered before."""
    p = CodeProblem("fp8", [20], 16, 8, 4, 32)
    p.close(launch(p, warps=4, team=4, tile=16, shares=3))


def test_more_than_a_window_of_pages():
    """Of 32 numbers: windows follow one another, and begin anew for the next kv head."""
    p = CodeProblem(4, [530, 20], 16, 2, 2, 16)
    p.close(launch(p, warps=1, team=1, shares=2))


def test_many_new_tokens_come_in_pieces():
    p = CodeProblem(8, [30, 5], 16, 4, 1, 32, new=17, dtype=torch.bfloat16)  # 68 rows: two pieces
    assert paged.append_attention(p.q, p.cache, p.requests, out=p.out) is p.out
    p.close(p.out)
    assert fences_stand(p.out)


@pytest.mark.parametrize("bits", ["fp8", 4])
def test_fork_append_and_free(bits):
    """Of two that share a partly filled page one copies it; a page that is free again holds what it held."""
    p = CodeProblem(bits, [20, 45], 32, 4, 2, 32)
    cache, rng = p.cache, torch.Generator().manual_seed(3)
    new = lambda tokens: torch.randn(2, 1, tokens, 2, 32, generator=rng).half()  # noqa: E731
    other = cache.fork(p.requests[0])
    p.requests.append(other), p.said.append(p.said[0].clone())
    before = [page for page in cache.pool.pages[other.slot]]
    for at, tokens in ((2, 3), (0, 1), (2, 14)):
        x = new(tokens)
        cache.append([p.requests[at]], *x)
        p.said[at] = torch.cat([p.said[at], torch.stack([kept(part, bits) for part in x])], dim=2)
    assert cache.pool.pages[other.slot][0] != before[0]
    cache.free(p.requests.pop(1)), p.said.pop(1)
    free = torch.tensor(cache.pool.free_pages)
    cache.k_pages[free], cache.v_pages[free], cache.scales[free] = 255, 255, torch.nan
    late = cache.new()
    cache.append([late], *(x := new(5)))
    p.requests.append(late), p.said.append(torch.stack([kept(part, bits) for part in x]))
    p.q, p.out = (torch.cat([t, t[:1]]) for t in (p.q, p.out))
    p.close(paged.decode(p.q, cache, p.requests, out=p.out))


def test_what_is_behind_a_length_is_never_seen():
    """NaN in the unit that is being filled, behind its newest token, and keys and values that say NaN."""
    p = CodeProblem("fp8", [37, 16, 2], 32, 4, 2, 32)
    want = paged.decode(p.q, p.cache, p.requests).clone()
    x = torch.zeros(2, 3, 1, 2, 32).half()
    slots = p.slots
    p.cache.reserve(p.requests, 1)
    code_pages.launch_write(p.cache, slots, *torch.full_like(x, torch.nan))  # as a card takes it, unlooked at
    p.cache.lens -= 1
    assert torch.equal(paged.decode(p.q, p.cache, slots), want)


def test_the_same_bits_whoever_else_is_there():
    p = CodeProblem(8, [150, 33, 20], 32, 4, 2, 32)
    all_of_them = paged.decode(p.q, p.cache, p.requests, invariant=True)
    for at in (0, 2):
        alone = paged.decode(p.q[at : at + 1].clone(), p.cache, p.requests[at : at + 1], invariant=True)
        assert torch.equal(alone[0], all_of_them[at])


def test_write_has_no_race():
    """Two tokens share a byte in 4 bits: one warp writes both."""
    p = CodeProblem(4, [3, 30], 32, 4, 2, 32)
    p.cache.reserve(p.requests, 5)
    x = torch.randn(2, 2, 5, 2, 32, generator=torch.Generator().manual_seed(0)).half()
    code_pages.launch_write(p.cache, p.slots, *x, check_races=True)
    for at, request in enumerate(p.requests):
        for found, said, new in zip(read(p, request), p.said[at][:, 0], x[:, at]):
            assert torch.equal(found, torch.cat([said, kept(new[None], 4)[0]]))


def test_tables_and_slots_out_of_range():
    """As a card takes them: nothing out of bounds is read or written."""
    p = CodeProblem(8, [33, 17, 50], 32, 4, 2, 32)
    slots, lens, table = p.slots.clone(), p.cache.lens.clone(), p.cache.table.clone()
    slots[1] = 1 << 30
    lens[slots[2]], table[slots[0], 0] = -5, 1 << 30
    p.cache.lens, p.cache.table = lens, table
    before = p.cache.k_pages.clone()
    x = torch.ones(2, 3, 2, 2, 32).half()
    for wrong in (lens, table):
        code_pages.launch_write(p.cache, slots, *x)
        code_decoding.launch(p.q, p.cache, slots, 0.2, p.out.fill_(torch.nan), 1, False, False)
        assert (p.out[1:] == 0).all() or wrong is table
        lens[slots[2]], table[slots[0]], table[slots[2]] = 1 << 30, -7, -7
    assert (p.cache.k_pages == before).flatten(1).all(1).sum() >= len(before) - 1  # the page of two known tokens alone


@pytest.mark.parametrize("bits", ALL)
def test_the_reference_keeps_the_same_codes(bits):
    rng = np.random.default_rng(1)
    cache = ref.PagedCache(6, 16, 2, 32, bits)
    ours = paged.PagedCache(6, 16, 2, 32, dtype=torch.float16, device="cpu", bits=bits)
    a, b = cache.new(), ours.new()
    for tokens in (5, 1, 20):
        x = rng.standard_normal((2, 1, tokens, 2, 32)).astype(np.float16)
        cache.append([a], *x), ours.append([b], *torch.from_numpy(x))
    other, fork = cache.fork(a), ours.fork(b)
    x = rng.standard_normal((2, 1, 1, 2, 32)).astype(np.float16)
    cache.append([other], *x), ours.append([fork], *torch.from_numpy(x))
    for one, mine in ((a, b), (other, fork)):
        found = code_pages.dequantized(ours, ours.pool.pages[mine.slot], ours.pool.lens[mine.slot])
        for wanted, got in zip(cache.gather(one), found):
            assert np.array_equal(wanted, got.numpy())
    q = rng.standard_normal((2, 4, 32)).astype(np.float16)
    got, wanted = paged.decode(torch.from_numpy(q), ours, [b, fork]).double().numpy(), ref.decode(q, cache, [a, other])
    assert np.linalg.norm(got - wanted) <= 1e-3 * np.linalg.norm(wanted)


def test_no_more_memory_than_codes_and_scales():
    cache = paged.PagedCache(3, 32, 2, 128, dtype=torch.float16, device="cpu", bits=4)
    kv = torch.randn(1, 96, 2, 128)
    both = 2 * kv_cache.quantize(kv, 4).nbytes
    assert sum(t.nbytes for t in (cache.k_pages, cache.v_pages, cache.scales)) == both
    assert code_pages.token_bytes(128, 4) * 96 * 2 == both


def small(bits=8, page_size=16, head_dim=32, **options):
    return paged.PagedCache(4, page_size, 1, head_dim, dtype=torch.float16, device="cpu", bits=bits, **options)


def test_bits_and_pages_that_are_not_offered():
    for bits in (7, True, "fp4"):
        with pytest.raises(ValueError, match="bits must be 16, 8, 4 or 'fp8'"):
            small(bits)
    for bits in ALL:
        with pytest.raises(ValueError, match=r"page_size must be one of 16, 32, 64 with bits=.*units of 16 .*, got 8"):
            small(bits, 8)


def test_what_cannot_be_stored_is_named():
    cache = small()
    request, x = cache.new(), torch.ones(1, 3, 1, 32).half()
    bad = x.clone()
    bad[0, 2, 0, 5] = torch.inf
    with pytest.raises(ValueError, match=r"append: v must be finite, got inf at \(0, 2, 0, 5\)"):
        cache.append([request], x, bad)
    with pytest.raises(TypeError, match=r"append: k must be of torch\.float16"):
        cache.append([request], x.float(), x)
    with pytest.raises(ValueError, match="k must have shape"):
        cache.append([request], x[0], x)
    assert cache.lengths([request]) == [0] and cache.free_pages == 4
    slots = cache.slots([request])
    with pytest.raises(ValueError, match="reserve comes first"):
        cache.write(slots, x, x)


def test_what_is_not_offered_over_codes_is_said():
    p = CodeProblem(8, [33], 32, 4, 2, 32)
    with pytest.raises(ValueError, match=r"decode: prefixes must be None over a cache with bits=8"):
        paged.decode(p.q, p.cache, p.requests, prefixes="shared")
    with pytest.raises(ValueError, match=r"append_attention: variant must be None over a cache with bits=8"):
        paged.append_attention(p.q[:, None], p.cache, p.requests, variant=paged.variants.sliding_window(8))
    with pytest.raises(TypeError, match=r"decode: q must be of torch\.float16"):
        paged.decode(p.q.float(), p.cache, p.requests)
    with pytest.raises(ValueError, match=r"n_heads must be a multiple of n_kv_heads, got 3 query heads and 2 kv"):
        paged.decode(p.q[:, :3].contiguous(), p.cache, p.requests)
    p.cache.table[p.requests[0].slot, 0] = 99
    with pytest.raises(ValueError, match="table must name pages from 0 to 4, got 99"):
        paged.decode(p.q, p.cache, p.requests, out=p.out)
    assert p.out.isnan().all()


@pytest.mark.parametrize("new", [None, 2])
def test_a_dependent_launch_waits_for_what_may_still_be_written(new):
    """q, out, and the units of the newest tokens; not for older ones."""
    for chosen in (dict(warps=4, team=4), dict(warps=2, team=1, shares=2)):
        p = CodeProblem(4, [33, 1, 16, 70], 32, 4, 2, 32, new=new)
        places, cache = [], p.cache
        for request in p.requests:
            tokens, pages = cache.pool.lens[request.slot], cache.pool.pages[request.slot]
            for unit in {t // 16 for t in range(max(tokens - (new or 1), 0), tokens)}:
                at = pages[unit // 2], unit % 2
                places += [of[at[0], h, at[1]] for of in (cache.k_pages, cache.v_pages, cache.scales) for h in range(2)]
        still_running(writes=(p.q, p.out, *places))
        p.close(launch(p, pdl=True, **chosen))
    old = p.cache.k_pages[p.cache.pool.pages[p.requests[3].slot][1]]
    still_running(writes=(old,))
    with pytest.raises(simt.AsyncFault, match="which the launch ahead may still write"):
        launch(p, pdl=True, shares=1)
