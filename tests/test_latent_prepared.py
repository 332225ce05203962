"""Latent attention as calls that are prepared (lab/prepared), on a card that is this CPU: the second call of a kind
launches what the checked way launches."""

import made_up_driver
import pytest
import torch

from kernels import latent
from kernels.latent import decoding, splitting
from tests.latent_cases import caches


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(splitting, "card", lambda device: (132, 227 * 1024))
    kept = {}
    monkeypatch.setattr(splitting, "claim", lambda device, words: kept.setdefault(words, torch.zeros(words).long()))
    yield made_up_driver.put_in(monkeypatch)
    decoding.CALLS.clear()


LAUNCHES = {"split": ["split", "merge"], "last": ["last"], "in_place": ["in_place"], "decode": ["hopper", "merge"]}


@pytest.mark.parametrize("paged, pdl", [(False, False), (True, True)])
@pytest.mark.parametrize("rung", LAUNCHES)
def test_the_second_call_launches_the_same(driver, rung, paged, pdl):
    def call(seed):
        cache, table, kv_lens = caches([70, 33], torch.float16, "cpu", seed, paged)
        q = torch.randn(2, 5, 576).half()
        given = latent.LatentPages(cache, table) if paged else cache
        out = q.new_empty(2, 5, 512)
        return lambda: getattr(latent, rung)(q, given, kv_lens=kv_lens, scale=0.07, out=out, pdl=pdl)

    launches = made_up_driver.expect_the_same(driver, decoding.CALLS, call(1), call(2))
    assert [launch.kernel for launch in launches] == LAUNCHES[rung] and launches[0].pdl == pdl
