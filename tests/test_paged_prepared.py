"""Paged attention as calls that are prepared (lab/prepared), on a card that is this CPU: the second call of a kind
launches what the checked way launches, and what is refused is refused again."""

import made_up_driver
import pytest
import torch
from paged_problems import Problem

from kernels import paged
from kernels.paged import cache as caches
from kernels.paged import decoding


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(decoding, "card", lambda device: (132, 227 * 1024))
    yield made_up_driver.put_in(monkeypatch)
    for calls in (decoding.DECODES, decoding.APPENDS, caches.WRITES):
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
