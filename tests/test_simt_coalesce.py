"""Sectors per warp: against sets counted in plain Python, and against what an H200 counted for the same addresses."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simt_truth import memory

from simt.memory.sectors import atomic_sectors_per_warp, sectors_per_warp

STORED = json.loads((Path(__file__).parent / "simt_truth" / "h200.json").read_text())["launches"]
THREAD = np.arange(256).reshape(8, 32)  # the launches of simt_truth.memory: 2 blocks of 4 warps


def counted(name, op):
    return STORED[name]["counters"][f"l1tex__t_sectors_pipe_lsu_mem_global_op_{op}.sum"]


def sectors(addresses, active):
    return len({a // 32 for a, on in zip(addresses.tolist(), active.tolist()) if on})


def sectors_in_turns(addresses, active):
    met, passes = {}, set()
    for a, on in zip(addresses.tolist(), active.tolist()):
        if on:
            passes.add((a // 32, met.setdefault(a, 0)))
            met[a] += 1
    return len(passes)


def plainly(count, addresses, active, lead):
    addresses = np.broadcast_to(addresses, (*lead, 32)).reshape(-1, 32)
    active = np.broadcast_to(active, (*lead, 32)).reshape(-1, 32)
    return np.array([count(a, on) for a, on in zip(addresses, active)]).reshape(lead)


PATTERNS = [
    lambda rng, size: np.arange(32) * size,
    lambda rng, size: np.arange(32)[::-1] * size * int(rng.integers(1, 5)),
    lambda rng, size: np.arange(32) // int(rng.integers(1, 9)) * size * 5,
    lambda rng, size: rng.integers(0, 40, 32) * size,
    lambda rng, size: rng.integers(0, 1 << 40, 32) // size * size,
    lambda rng, size: np.full(32, int(rng.integers(0, 99)) * size),
]
MASKS = [
    lambda rng: np.ones(32, bool),
    lambda rng: np.zeros(32, bool),
    lambda rng: np.arange(32) < rng.integers(0, 33),
    lambda rng: rng.random(32) < 0.5,
]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 2), st.integers(0, 2), st.booleans())
def test_any_addresses_and_masks_agree_with_sets(seed, size, address_axes, mask_axes, alike):
    rng = np.random.default_rng(seed)
    lead = (3, 2)

    def draw(axes, make):
        shape = (lead, (1, 2), (3, 1))[axes]
        return np.stack([make() for _ in range(shape[0] * shape[1])]).reshape(*shape, -1)

    addresses = draw(address_axes, lambda: PATTERNS[rng.integers(len(PATTERNS))](rng, size))
    active = draw(mask_axes, lambda: MASKS[rng.integers(len(MASKS))](rng))
    if alike:
        addresses = addresses[..., :1]
    lead = np.broadcast_shapes(addresses.shape[:-1], active.shape[:-1])
    for function, plain in (sectors_per_warp, sectors), (atomic_sectors_per_warp, sectors_in_turns):
        got = function(addresses, size, active)
        assert got.shape == lead and np.array_equal(got, plainly(plain, addresses, active, lead))
        got = function(addresses, size)
        assert np.array_equal(got, plainly(plain, addresses, np.True_, addresses.shape[:-1]))
        got = function(addresses, size, active[..., :1])
        assert np.array_equal(got, plainly(plain, addresses, active[..., :1], lead))


def by_stride(stride, offset, size):
    return (THREAD * stride + offset) * size


LOADS = {f"load_stride_{s}_float": by_stride(s, 0, 4) for s in (1, 2, 3, 4, 8, 16, 32, 33)}
LOADS |= {f"load_offset_{o}_float": by_stride(1, o, 4) for o in (1, 2, 4, 7, 8, 16, 31)}
LOADS |= {
    "load_offset_1_float4": by_stride(1, 1, 16),
    "load_stride_2_float4": by_stride(2, 0, 16),
    "load_broadcast": np.zeros((8, 1), int),
    "load_reversed": (255 - THREAD) * 4,
    "load_two_addresses": THREAD % 2 * 160,
    "load_half_warps_apart": np.where(THREAD % 32 < 16, THREAD, THREAD + 1000) * 4,
    "cp_async_4_stride_2": by_stride(2, 0, 4),
    "cp_async_16_ca": by_stride(1, 0, 16),
}
WIDTHS = {"char": 1, "short": 2, "half": 2, "half2": 4, "double": 8, "float2": 8, "float4": 16}
LOADS |= {f"copy_{name}": THREAD * size for name, size in WIDTHS.items()}


def width_of(name):
    return next((size for word, size in WIDTHS.items() if name.endswith(word)), 4)


@pytest.mark.parametrize("name", LOADS)
def test_loads_cost_what_the_gpu_counted(name):
    assert sectors_per_warp(LOADS[name], width_of(name)).sum() == counted(name, "ld")


STORES = {
    "store_stride_2_float": by_stride(2, 0, 4),
    "store_offset_1_float": by_stride(1, 1, 4),
    "store_stride_2_float4": by_stride(2, 0, 16),
    "store_offset_1_short": by_stride(1, 1, 2),
    "store_same_address": THREAD[:, :1] // 32 * 4,
    "store_scatter": memory.permutation("store_scatter", 4096)[THREAD] * 4,
}


@pytest.mark.parametrize("name", STORES)
def test_stores_cost_what_the_gpu_counted(name):
    assert sectors_per_warp(STORES[name], width_of(name)).sum() == counted(name, "st")


def test_a_gather_costs_its_indices_and_its_elements():
    where = memory.permutation("load_gather", 4096)[THREAD]
    both = sectors_per_warp(THREAD * 4, 4) + sectors_per_warp(where * 4, 4)
    assert both.sum() == counted("load_gather", "ld")


def test_lanes_that_are_off_cost_nothing():
    thread = np.arange(2 * 128).reshape(2, 4, 32)
    found = sectors_per_warp(thread * 4, 4, thread % 128 < 17)
    assert found.tolist() == [[3, 0, 0, 0]] * 2 and found.sum() == counted("lanes_first_17_of_block", "ld")
    assert sectors_per_warp(thread * 4, 4, thread % 2 == 1).sum() == counted("lanes_odd_only", "ld")


ATOMICS = {
    ("red_add_int_same_address", "red"): (np.full((8, 1), 4), 4),
    ("atom_add_int_same_address", "atom"): (np.full((1, 32), 4), 4),
    ("red_add_int_distinct", "red"): (THREAD * 4, 4),
    ("red_add_int_stride_2", "red"): (THREAD * 8, 4),
    ("atom_add_int_stride_2", "atom"): (THREAD * 8, 4),
    ("red_add_float_8_bins", "red"): (THREAD % 8 * 4, 4),
    ("red_add_double_distinct", "red"): (THREAD * 8, 8),
    ("red_add_half2_distinct", "atom"): (THREAD * 4, 4),
    ("red_max_int_by_4", "red"): (THREAD // 4 * 4, 4),
    ("atom_cas_int_distinct", "atom"): (THREAD * 4, 4),
}


@pytest.mark.parametrize("name, op", ATOMICS)
def test_atomics_cost_what_the_gpu_counted(name, op):
    addresses, size = ATOMICS[name, op]
    assert atomic_sectors_per_warp(addresses, size).sum() == counted(name, op)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="size: expected 1, 2, 4, 8 or 16"):
        sectors_per_warp(THREAD, 12)
    with pytest.raises(ValueError, match=r"addresses: .* got shape \(8, 16\)"):
        sectors_per_warp(THREAD[:, :16], 4)
    with pytest.raises(ValueError, match="addresses: expected integers; got float64"):
        sectors_per_warp(THREAD * 1.0, 4)
    with pytest.raises(ValueError, match=r"active: .* got shape \(8, 5\)"):
        sectors_per_warp(THREAD, 4, np.ones((8, 5), bool))
