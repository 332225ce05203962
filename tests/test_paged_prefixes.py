"""decode where requests share tokens: which groups there are, what is said to kernels, and the results on the SIMT
machine."""

import itertools
import weakref

import numpy as np
import pytest
import torch

from kernels import paged
from kernels.paged import appending
from ref import paged as ref

HALF = torch.float16
PAGE, HEAD_DIM = 16, 64


def family(tree, n_heads=4, n_kv_heads=1, page_size=PAGE, n_pages=64, seed=0):
    """(cache, requests, q, wanted): tree: {name: (parent or None, tokens of its own)}, in float64 by ref.paged."""
    rng = np.random.default_rng(seed)
    cache = paged.PagedCache(n_pages, page_size, n_kv_heads, HEAD_DIM, dtype=HALF, device="cpu", max_requests=16)
    truth = ref.PagedCache(n_pages, page_size, n_kv_heads, HEAD_DIM)
    cache.k_pages.fill_(torch.nan), cache.v_pages.fill_(torch.nan)
    rng.shuffle(cache.pool.free_pages)
    made, wanted = {}, {}
    for name, (parent, tokens) in tree.items():
        made[name] = cache.fork(made[parent]) if parent else cache.new()
        wanted[name] = truth.fork(wanted[parent]) if parent else truth.new()
        if tokens:
            k, v = torch.from_numpy(rng.standard_normal((2, 1, tokens, n_kv_heads, HEAD_DIM))).to(HALF)
            cache.append([made[name]], k, v)
            truth.append([wanted[name]], k.double().numpy(), v.double().numpy())
    q = torch.from_numpy(rng.standard_normal((len(tree), n_heads, HEAD_DIM))).to(HALF)
    right = torch.from_numpy(ref.decode(q.double().numpy(), truth, list(wanted.values())))
    return cache, made, q, right


TREE = {"root": (None, 256), "a": ("root", 144), "b": ("root", 7), "a1": ("a", 1), "a2": ("a", 30), "lone": (None, 20)}


def error(out, right):
    return float((out.double() - right).norm() / right.norm())


def groups_by_name(prefixes, made):
    names = list(made)
    return [({names[place] for place in members}, tokens) for members, tokens in prefixes.groups]


def test_groups_are_found():
    cache, made, _, _ = family(TREE)
    found = groups_by_name(cache.shared_prefixes(list(made.values())), made)
    assert found == [({"root", "a", "b", "a1", "a2"}, 256), ({"a", "a1", "a2"}, 400)]
    two = {name: made[name] for name in ("a1", "b")}
    assert groups_by_name(cache.shared_prefixes(list(two.values())), two) == [({"a1", "b"}, 256)]
    assert cache.shared_prefixes([made["a1"], None, made["lone"]]).groups == []


@pytest.mark.parametrize("n_heads", [4, 24])  # all rows of a group in one tile, or in two
def test_decode(n_heads):
    cache, made, q, right = family(TREE, n_heads)
    requests = list(made.values())
    nested = [(requests[:5], 256), ([made["a"], made["a2"], made["a1"]], 384)]
    for prefixes in ("shared", nested, [(requests[1:3], 32)]):
        out = paged.decode(q, cache, requests, prefixes=prefixes)
        assert error(out, right) < 1e-3


@pytest.mark.parametrize("nested", [[(2, 16), (2, 32)], [(1, 16), (1, 32)], [(2, 16), (1, 48)], [(0, 16), (2, 32)]])
def test_groups_of_the_same_requests_or_of_one(nested):
    """More groups than could be found: the same two share a system's prompt and a document, or one is alone."""
    cache, made, q, right = family({"root": (None, 48), "a": ("root", 1)})
    requests = list(made.values())
    prefixes = [(requests[:count], tokens) for count, tokens in nested]
    assert error(paged.decode(q, cache, requests, prefixes=prefixes), right) < 1e-3
    if nested[0][0] == 1:
        alone = paged.decode(q[:1], cache, requests[:1], prefixes=prefixes)
        assert error(alone, right[:1]) < 1e-3


def test_a_graph_keeps_what_it_reads(monkeypatch):
    """Lists of requests and groups whose tensors a captured graph reads are not forgotten, however many follow."""
    cache, made, _, _ = family(TREE)
    requests = list(made.values())
    slots = weakref.ref(cache.slots(requests))
    found = weakref.ref(paged.prefixes.prefixes_of("decode", cache, requests, "shared"))
    gone = weakref.ref(cache.slots(requests[:2]))
    with monkeypatch.context() as capture:
        capture.setattr(paged.PagedCache, "_capturing", lambda self: True)
        assert cache.slots(requests) is slots()
        assert paged.prefixes.prefixes_of("decode", cache, requests, "shared") is found()
        with pytest.raises(RuntimeError, match="slots: must not be captured in a graph"):
            cache.slots(requests[::-1])
    for some in itertools.islice(itertools.permutations(requests, 3), 70):
        cache.slots(list(some))
        paged.prefixes.prefixes_of("decode", cache, list(some), "shared")
    assert gone() is None and slots() is not None and found() is not None


def test_prefixes_are_told_anew_in_place():
    cache, made, q, right = family(TREE)
    names = ["a", "b", "a1", "lone"]
    batch, rows = [made[name] for name in names], [list(made).index(name) for name in names]
    prefixes = cache.shared_prefixes(batch)
    tensors = [prefixes.items, prefixes.count, prefixes.rows, prefixes.levels]
    places = [tensor.data_ptr() for tensor in tensors]
    out = paged.decode(q[rows], cache, batch, prefixes=prefixes)
    assert error(out, right[rows]) < 1e-3
    rows = [3, 0, 5, 4]
    batch = [list(made.values())[row] for row in rows]
    prefixes.update([*batch[:2], None, batch[3]])
    assert groups_by_name(prefixes, {"a1": 0, "root": 0, None: 0, "a2": 0}) == [({"a1", "root", "a2"}, 256),
                                                                              ({"a1", "a2"}, 400)]  # fmt: skip
    assert [tensor.data_ptr() for tensor in (prefixes.items, prefixes.count, prefixes.rows, prefixes.levels)] == places
    slots = torch.tensor(prefixes.slots, dtype=torch.int32)
    out = paged.decode(q[rows], cache, slots, prefixes=prefixes)
    right[rows[2]] = 0
    assert error(out, right[rows]) < 1e-3 and not out[2].any()


def test_what_was_found_is_kept_until_requests_change():
    cache, made, q, _ = family(TREE)
    requests = list(made.values())
    kept = [paged.prefixes.prefixes_of("decode", cache, requests, "shared") for _ in range(2)]
    assert kept[0] is kept[1]
    cache.fork(made["lone"])
    assert paged.prefixes.prefixes_of("decode", cache, requests, "shared") is not kept[0]


def test_elsewhere_each_request_reads_all():
    """Pages too small for append.cu: the result is the same, and a warning says why, once."""
    cache, made, q, right = family(TREE, page_size=4, n_pages=200)
    appending._warn.cache_clear()
    with pytest.warns(UserWarning, match="reads what it shares with others for itself: page_size must be one of"):
        out = paged.decode(q, cache, list(made.values()), prefixes="shared")
    assert error(out, right) < 1e-3


def test_refusals():
    cache, made, q, _ = family(TREE)
    requests = list(made.values())

    def run(prefixes, requests=requests, **how):
        return paged.decode(q, cache, requests, prefixes=prefixes, **how)

    a, b = made["a"], made["b"]
    for wrong, kind, message in [
        ([(requests[:2], 16), ([a, b], 272)], ValueError, r"prefixes\[1\] must share .*: requests\[2\] has 263 tokens"),
        (
            [(requests[:2], 16), (requests[1:4:2], 400), (requests[3:5], 416)],
            ValueError,
            r"prefixes\[2\] .*401 tokens, fewer",
        ),
        ([([a, made["lone"]], 16)], ValueError, r"prefixes\[0\] must share what it claims, 16 tokens: page 0 is "),
        ([([a, b], 24)], ValueError, r"prefixes\[0\] must be of whole pages, a multiple of 16 tokens, got 24"),
        ([(requests[:3], 32), (requests[1:4], 64)], ValueError, "prefixes must be nested or apart"),
        ([([cache.new()], 16)], ValueError, r"prefixes\[0\] must have requests of the batch"),
        ("all", TypeError, 'prefixes must be "shared", '),
        ([5], TypeError, r"prefixes\[0\] must be \(requests, tokens\), got 5"),
        ([(a, 16)], TypeError, r"prefixes\[0\] must be \(requests, tokens\), got \(Request"),
    ]:
        with pytest.raises(kind, match=message):
            run(wrong)
    with pytest.raises(ValueError, match="invariant must be False with prefixes"):
        run("shared", invariant=True)
    with pytest.raises(TypeError, match=r"prefixes must be Prefixes \(cache.shared_prefixes\) where requests is a ten"):
        run("shared", cache.slots(requests))
    with pytest.raises(TypeError, match="requests must be int32 slots of the 6 requests of prefixes, got torch.f"):
        run(cache.shared_prefixes(requests), torch.zeros(6))
    with pytest.raises(ValueError, match="shared_prefixes: levels must be at least 0, got -1"):
        cache.shared_prefixes(requests, levels=-1)
    with pytest.raises(ValueError, match="prefixes must be of the same requests"):
        run(cache.shared_prefixes(requests), requests[::-1])
