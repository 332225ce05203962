"""Decode attention in 16 bits as calls that are prepared (lab/prepared), on a card that is this CPU: the second call of
a kind launches what the checked way launches, and what is refused is refused again."""

import made_up_driver
import pytest
import torch

from kernels.attention import decode, decoding


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(decoding, "card", lambda device: (132, 227 * 1024))
    yield made_up_driver.put_in(monkeypatch)
    decoding.CALLS.clear()


def problem(batch=3, kv_len=70, n_heads=8, n_kv_heads=2, head_dim=64, dtype=torch.float16, seed=0):
    torch.manual_seed(seed)
    cache = torch.randn(2, batch, kv_len, n_kv_heads, head_dim).to(dtype)
    return torch.randn(batch, n_heads, head_dim).to(dtype), cache[0].contiguous(), cache[1].contiguous()


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("lens", [False, True])
@pytest.mark.parametrize("shape", [(1, 1024, 32, 8, 128), (64, 64, 8, 8, 64), (3, 70, 24, 1, 80)])
def test_the_second_call_launches_the_same(driver, shape, lens, pdl):
    """One launch where blocks have whole rows, else two."""

    def call(seed):
        tensors = problem(*shape, seed=seed)
        out, kv_lens = torch.empty_like(tensors[0]), torch.full(shape[:1], 33, dtype=torch.int32) if lens else None
        return lambda: decode(*tensors, 0.3, kv_lens=kv_lens, out=out, pdl=pdl)

    launches = made_up_driver.expect_the_same(driver, decoding.CALLS, call(1), call(2))
    assert launches[0].pdl == pdl and all(later.pdl for later in launches[1:])


def ways(driver):
    found = [launch.way for launch in driver.launches]
    driver.launches.clear()
    return found


def test_what_decides_is_part_of_the_kind(driver):
    tensors = problem()
    decode(*tensors)
    assert set(ways(driver)) == {"checked"}
    decode(*tensors)
    assert set(ways(driver)) == {"prepared"}
    for changed in ({"scale": 0.5}, {"pdl": True}, {"kv_lens": torch.full((3,), 9, dtype=torch.int32)}):
        for way in ("checked", "prepared"):
            decode(*tensors, **changed)
            assert set(ways(driver)) == {way}, changed
    for other in (problem(kv_len=71), problem(n_heads=4), problem(dtype=torch.bfloat16)):
        decode(*other)
        assert set(ways(driver)) == {"checked"}


def test_what_is_refused_is_refused_again(driver):
    q, k, v = tensors = problem()
    for _ in range(2):
        decode(*tensors)
        ways(driver)
        for error, wanted, call in [
            (ValueError, "v must have shape", lambda: decode(q, k, v[:, :-1].contiguous())),
            (TypeError, "k must be of torch.float16", lambda: decode(q, k.float(), v)),
            (ValueError, "k must be contiguous", lambda: decode(q, k.transpose(1, 2).contiguous().transpose(1, 2), v)),
            (ValueError, "out must not share memory with q", lambda: decode(q, k, v, out=q)),
            (TypeError, "kv_lens must be of torch.int32", lambda: decode(q, k, v, kv_lens=torch.ones(3).long())),
            (TypeError, "scale must be", lambda: decode(q, k, v, "1")),
        ]:
            with pytest.raises(error, match=wanted):
                call()
        assert driver.launches == []
