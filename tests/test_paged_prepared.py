"""Paged attention as calls that are prepared (lab/prepared), on a card that is this CPU: the second call of a kind
launches what the checked way launches, and what is refused is refused again."""

import made_up_driver
import pytest
import torch
from paged_problems import Problem

from kernels import paged
from kernels.paged import appending, decoding
from kernels.paged import cache as caches


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(decoding, "card", lambda device: (132, 227 * 1024))
    yield made_up_driver.put_in(monkeypatch)
    for calls in (decoding.DECODES, decoding.APPENDS, appending.SHARED, caches.WRITES):
        calls.clear()


def ways(driver):
    found = [launch.way for launch in driver.launches]
    driver.launches.clear()
    return found


@pytest.mark.parametrize("pdl, invariant", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("new", [None, 3])
def test_the_second_call_launches_the_same(driver, new, pdl, invariant):
    run, calls = (paged.append_attention, decoding.APPENDS) if new else (paged.decode, decoding.DECODES)

    def call(seed):
        p = Problem([33, 17, 50], 16, 8, 2, 64, new=new, seed=seed, max_len=60)
        slots = p.slots
        return lambda: run(p.q, p.cache, slots, 0.3, out=p.out, pdl=pdl, invariant=invariant)

    first, second = made_up_driver.expect_the_same(driver, calls, call(1), call(2))
    assert (first.kernel, second.kernel) == ("decode", "merge") and first.pdl == pdl and second.pdl


@pytest.mark.parametrize(
    ("new", "page_size", "head_dim", "kernels"),
    [
        (16, 16, 64, ["decode", "merge"]),  # 64 rows of a kv head
        (17, 16, 64, ["append", "merge"]),
        (17, 4, 64, ["decode", "merge"] * 2),  # a page too small for a box; 64 rows, and the rest
        (17, 16, 32, ["decode", "merge"] * 2),
    ],
)
def test_who_takes_appends(driver, new, page_size, head_dim, kernels):
    p = Problem([33, 17], page_size, 8, 2, head_dim, new=new)
    slots = p.slots
    driver.launches.clear()
    paged.append_attention(p.q, p.cache, slots)
    assert [launch.kernel for launch in driver.launches] == kernels


@pytest.mark.parametrize("pdl, invariant", [(False, False), (True, True)])
def test_long_appends_launch_the_same(driver, pdl, invariant):
    """By append.cu; with results that hang on nobody else no tile is cut, and there is nothing to merge."""

    def call(seed):
        p = Problem([99, 40, 41], 16, 8, 2, 64, new=33, seed=seed, max_len=120)
        slots = p.slots
        return lambda: paged.append_attention(p.q, p.cache, slots, 0.3, out=p.out, pdl=pdl, invariant=invariant)

    launches = made_up_driver.expect_the_same(driver, decoding.APPENDS, call(1), call(2))
    assert [(one.kernel, one.pdl) for one in launches] == [("append", pdl), ("merge", True)][: 1 if invariant else 2]
    assert [p.name for p in launches[0].function.parameters].index("early") == len(launches[0].values) - 1
    assert launches[0].values[-1] == pdl


def shared(seed, n=3):
    """(q, cache, forks of one request, their Prefixes, out)"""
    cache = paged.PagedCache(20, 16, 2, 64, dtype=torch.float16, device="cpu", max_requests=n)
    root = cache.new()
    cache.reserve([root], 32)
    requests = [root, *(cache.fork(root) for _ in range(n - 1))]
    cache.reserve(requests, seed)
    q = torch.randn(n, 8, 64).half()
    return q, cache, requests, cache.shared_prefixes(requests, [(requests, 32)]), torch.empty_like(q)


@pytest.mark.parametrize("pdl", [False, True])
def test_shared_prefixes_launch_the_same(driver, pdl):
    def call(seed):
        q, cache, requests, prefixes, out = shared(seed)
        return lambda: paged.decode(q, cache, requests, 0.3, out=out, pdl=pdl, prefixes=prefixes)

    first, second = made_up_driver.expect_the_same(driver, appending.SHARED, call(1), call(2))
    assert (first.kernel, second.kernel) == ("append", "merge") and first.pdl == pdl and second.pdl


def test_what_is_refused_with_prefixes_is_refused_again(driver):
    q, cache, requests, prefixes, _ = shared(1)
    for way in ("checked", "prepared"):
        driver.launches.clear()
        paged.decode(q, cache, requests, prefixes=prefixes)
        assert ways(driver) == [way] * 2
        for error, wanted, changed in [
            (ValueError, "q must have a row for each of 3 requests, got 2", {"q": q[:2]}),
            (TypeError, "q must be of torch.float16", {"q": q.float()}),
            (ValueError, "out must not share memory with q", {"out": q}),
            (ValueError, "invariant must be False", {"invariant": True}),
        ]:
            with pytest.raises(error, match=wanted):
                paged.decode(**({"q": q, "cache": cache, "requests": requests, "prefixes": prefixes} | changed))
        assert driver.launches == []


def test_tokens_are_written_by_a_prepared_call(driver):
    def call(seed):
        p = Problem([33, 17], 16, 8, 2, 64, seed=seed)
        slots, (k, v) = p.slots, torch.randn(2, 2, 1, 2, 64).half()
        return lambda: p.cache.write(slots, k, v, pdl=True)

    (launch,) = made_up_driver.expect_the_same(driver, caches.WRITES, call(1), call(2))
    assert launch.kernel == "write" and launch.pdl


def test_what_decides_is_part_of_the_kind(driver):
    p = Problem([33, 17, 50], 16, 8, 2, 64)
    slots = p.slots
    driver.launches.clear()
    for way in ("checked", "prepared"):
        paged.decode(p.q, p.cache, slots)
        assert ways(driver) == [way] * 2
    paged.decode(p.q, p.cache, p.requests)  # a list of requests is the same call, by way of its slots
    assert ways(driver) == ["prepared"] * 2
    for changed in ({"scale": 0.5}, {"pdl": True}, {"invariant": True}):
        for way in ("checked", "prepared"):
            paged.decode(p.q, p.cache, slots, **changed)
            assert ways(driver) == [way] * 2, changed
    other = Problem([33, 17, 50], 8, 8, 2, 64)  # pages of another size
    driver.launches.clear()
    paged.decode(other.q, other.cache, other.slots)
    assert ways(driver)[-2:] == ["checked"] * 2


def test_what_is_refused_is_refused_again(driver):
    p = Problem([33, 17, 50], 16, 8, 2, 64)
    slots = p.slots
    for _ in range(2):
        paged.decode(p.q, p.cache, slots)
        ways(driver)
        for error, wanted, call in [
            (ValueError, "slots must have shape", lambda: paged.decode(p.q, p.cache, slots[:2])),
            (TypeError, "slots must be of torch.int32", lambda: paged.decode(p.q, p.cache, slots.long())),
            (TypeError, "q must be of torch.float16", lambda: paged.decode(p.q.float(), p.cache, slots)),
            (ValueError, "out must not share memory with q", lambda: paged.decode(p.q, p.cache, slots, out=p.q)),
            (TypeError, "scale must be", lambda: paged.decode(p.q, p.cache, slots, "1")),
            (TypeError, "cache must be a PagedCache", lambda: paged.decode(p.q, p.cache.k_pages, slots)),
        ]:
            with pytest.raises(error, match=wanted):
                call()
        assert driver.launches == []
