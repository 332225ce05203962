"""Decode attention over a quantised cache as calls that are prepared (lab/prepared), on a card that is this CPU: what
is launched is what the checked way launches, and what is refused is refused the second time, too."""

import functools
import math
import random

import made_up_driver
import pytest
import torch

from kernels import kv_cache
from kernels.kv_cache import decode, quantize
from kernels.kv_cache.decoding import CALLS


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(kv_cache.decoding, "_card", lambda device: (132, 227 * 1024))
    yield made_up_driver.put_in(monkeypatch)
    CALLS.clear()


def problem(bits=8, axis="channel", batch=3, kv_len=70, head_dim=64, seed=0):
    torch.manual_seed(seed)
    k, v = torch.randn(2, batch, kv_len, 2, head_dim)
    k[0, 0, 0, 0] = v[0, 0, 0, 0] = 6  # the largest: the powers of two of all are alike
    return (
        torch.randn(batch, 8, head_dim).half(),
        quantize(k, bits, axis=axis, role="keys"),
        quantize(v, bits),
    )


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("lens", [False, True])
@pytest.mark.parametrize("bits, axis, head_dim", [(8, "channel", 64), (4, "token", 80), ("fp8", "channel", 128)])
def test_the_second_call_launches_the_same(driver, bits, axis, head_dim, lens, pdl):
    def call(seed):
        tensors = problem(bits, axis, head_dim=head_dim, seed=seed)
        out, kv_lens = torch.empty_like(tensors[0]), torch.tensor([1, 70, 33], dtype=torch.int32) if lens else None
        return lambda: decode(*tensors, 0.3, kv_lens=kv_lens, out=out, pdl=pdl)

    split, merge = made_up_driver.expect_the_same(driver, CALLS, call(1), call(2))
    assert split.pdl == pdl and merge.pdl
    partial, pairs = (dict(zip([p.name for p in split.function.parameters], split.values))[name]
                      for name in ("partial_out", "max_and_sum"))  # fmt: skip
    assert merge.values[:2] == [partial, pairs]  # what the first wrote


@pytest.mark.parametrize("lens", [False, True])
@pytest.mark.parametrize("before, after", [(65, 80), (70, 69), (2, 16)])
def test_a_cache_that_grows_launches_the_same(driver, before, after, lens):
    """kv_len is a number that changes from call to call: what else hangs on it is the same for 16 tokens."""

    def call(kv_len):
        q, k, v = problem(kv_len=kv_len)
        out, kv_lens = torch.empty_like(q), torch.tensor([1, 1, kv_len], dtype=torch.int32) if lens else None
        return lambda: decode(q, k, v, kv_lens=kv_lens, out=out)

    # Memory for as many tokens, as one cache has it that tokens are put into
    launches = made_up_driver.expect_the_same(driver, CALLS, call(before), call(after))
    for launch in launches:
        assert after in [value for value in launch.values if isinstance(value, int)]


def test_a_model_that_appends_a_token_a_call_is_prepared(driver):
    q, new = torch.randn(1, 2, 64).half(), torch.randn(1, 1, 1, 64) * 1e-3
    k, v = (quantize(torch.randn(1, 20, 1, 64), 8, role=role, capacity=128) for role in ("keys", "values"))
    for _ in range(100):
        decode(q, k.append(new), v.append(new))
    found = ways(driver)
    assert found.count("checked") <= 2 * 8 and len(found) == 2 * 100  # a kind for each tile of 16 tokens
    assert CALLS.kept <= 8


def ways(driver):
    found = [launch.way for launch in driver.launches]
    driver.launches.clear()
    return found


def test_what_decides_is_part_of_the_kind(driver):
    q, k, v = problem()
    decode(q, k, v)
    assert ways(driver) == ["checked"] * 2
    decode(q, k, v)
    assert ways(driver) == ["prepared"] * 2
    for changed in ({"scale": 0.5}, {"pdl": True}, {"kv_lens": torch.full((3,), 9, dtype=torch.int32)}):
        decode(q, k, v, **changed)
        assert ways(driver) == ["checked"] * 2, changed
        decode(q, k, v, **changed)
        assert ways(driver) == ["prepared"] * 2, changed
    room = quantize(k.dequantize(), 8, axis="channel", capacity=128), quantize(v.dequantize(), 8, capacity=128)
    decode(q, *room)
    ways(driver)
    room[0].append(torch.randn(3, 1, 2, 64)), room[1].append(torch.randn(3, 1, 2, 64))  # the same memory, a token more
    decode(q, *room)
    assert ways(driver) == ["prepared"] * 2
    room[0].append(torch.randn(3, 10, 2, 64)), room[1].append(torch.randn(3, 10, 2, 64))  # into the next tile
    decode(q, *room)
    assert ways(driver) == ["checked"] * 2
    v.peak *= 1.01  # which changes no power of two
    decode(q, k, v)
    assert ways(driver) == ["prepared"] * 2
    v.peak *= 1000  # the weights' power of two hangs on it
    decode(q, k, v)
    assert ways(driver) == ["checked"] * 2


def test_what_is_refused_is_refused_again(driver):
    q, k, v = problem()
    other = problem(bits=4)
    for _ in range(2):
        decode(q, k, v)
        ways(driver)
        for args, options, kind in [
            ((q, k, k), {}, "two caches"),
            ((q, v, v), {}, "two caches"),
            ((q.float(), k, v), {}, "q must be of torch.float16"),
            ((q[:, :7].contiguous(), k, v), {}, "n_heads must be a multiple"),
            ((q[:2], k, v), {}, "k must have shape"),
            ((q, k, problem(kv_len=71)[2]), {}, "v must have shape"),
            ((q, k, other[1].lay_out("keys")), {}, "v must be quantised with"),
            ((q, k, v), {"scale": math.nan}, "scale must be finite"),
            ((q, k, v), {"scale": torch.tensor(0.5)}, "scale must be a number"),
            ((q, k, v), {"out": q}, "out must not share memory with q"),
            ((q, k, v), {"out": q[:, :4]}, "out must have shape"),
            ((q, k, v), {"kv_lens": torch.tensor([1, 2, 3])}, "kv_lens must be of torch.int32"),
            ((q, k, v), {"kv_lens": torch.tensor([1, 2, 71], dtype=torch.int32)}, "kv_lens must be from 1"),
            ((q, k, v.dequantize()), {}, "two QuantizedKV or two tensors"),
        ]:
            with pytest.raises((TypeError, ValueError), match=kind):
                decode(*args, **options)
            assert ways(driver) == []


def launched(driver, call):
    driver.launches.clear()
    call()
    return [(launch.kernel, launch.shape, launch.pdl, launch.values) for launch in driver.launches]


def without_scratch(launches, out):
    """Their numbers, but for addresses of scratch memory and of the output."""
    return [
        (kernel, shape, pdl, [v for v in values if not (isinstance(v, int) and v > 2**32 and v not in out)])
        for kernel, shape, pdl, values in launches
    ]


@pytest.mark.parametrize("bits, axis", [(8, "channel"), (4, "token")])
def test_caches_that_grow_between_right_and_wrong_calls(driver, bits, axis):
    """Caches of several lengths, which grow, move and change their peaks in turns: each prepared call launches what the
    checked one would, and what is refused launches nothing."""
    chance, q = random.Random(bits), torch.randn(1, 4, 64).half()
    caches = [
        (quantize(torch.randn(1, n, 2, 64), bits, axis=axis, role="keys"), quantize(torch.randn(1, n, 2, 64), bits))
        for n in (5, 40, 130)
    ]
    prepared = 0
    for turn in range(150):
        k, v = caches[chance.randrange(3)]
        if chance.random() < 0.6:
            new = torch.randn(2, 1, chance.choice((1, 1, 1, 7, 30)), 2, 64) * chance.choice((1, 1, 1, 100))
            k.append(new[0]), v.append(new[1])
        if chance.random() < 0.3:
            k.append(torch.randn(1, 1, 2, 64))  # and v does not
            driver.launches.clear()
            with pytest.raises(ValueError, match="v must have shape"):
                decode(q, k, v)
            assert not driver.launches
            v.append(torch.randn(1, 1, 2, 64))
        lens = torch.tensor([chance.randint(1, k.shape[1])], dtype=torch.int32) if turn % 2 else None
        call = functools.partial(decode, q, k, v, chance.choice((None, 0.5)), kv_lens=lens, pdl=turn % 3 == 0)
        found = launched(driver, call)
        prepared += driver.launches[0].way == "prepared"
        table = CALLS.run, CALLS.run_tracked, CALLS._keep
        CALLS.clear()
        wanted = launched(driver, call)
        CALLS.run, CALLS.run_tracked, CALLS._keep = table
        ours = {t.data_ptr() for t in (q, k.packed, k.scale, v.packed, v.scale, lens) if t is not None}
        assert without_scratch(found, ours) == without_scratch(wanted, ours)
        assert k.shape[1] in found[0][3]
    assert prepared > 30
