"""Accesses that the race detector puts aside: what __syncwarp settles, and that nothing is missed where they are not
looked at byte by byte."""

import random
from itertools import product

import numpy as np
import pytest

import simt
from simt.execute import scheduler
from simt.memory.noting import Noting
from simt.memory.races import Races

BLOCKS, THREADS, ROW = 2, 96, 4096  # bytes of a block's row
HEAD = """
#define W __syncwarp()
#define B __syncthreads()
#define NEXT (int)lane + (warp < 2 ? 32 : -64)
template <class T> __device__ unsigned low(T v) { return (unsigned)v; }
template <> __device__ unsigned low(uint4 v) { return v.x + v.w; }
template <class T> __device__ T made(unsigned v) { return (T)v; }
template <> __device__ uint4 made(unsigned v) { return make_uint4(v, v, v, v); }
#define GET(T, row, at) asm volatile("" ::: "memory"); v += low(((const T *)(row))[at])
#define SET(T, row, at, v) ((T *)(row))[at] = made<T>(v); asm volatile("" ::: "memory")
#define LOAD(row, at) GET(unsigned, row, at)
#define STORE(row, at) SET(unsigned, row, at, v)
"""
KERNEL = """
extern "C" __global__ void k%s(unsigned char *x, unsigned *out) {
  __shared__ alignas(16) unsigned char s[%d];
  unsigned t = threadIdx.x, b = blockIdx.x, lane = t %% 32, warp = t / 32, v = t;
  unsigned char *g = x + %d * b, *other = x + %d * (1 - b);
  for (int i = t; i < %d / 16; i += 96) ((uint4 *)s)[i] = make_uint4(0, 0, 0, 0);
  B;
  %s
  out[96 * b + t] = v;
}"""


def compiled(bodies):
    """A module of kernels, given {name: what they do}."""
    return simt.compile(HEAD + "".join(KERNEL % (name, ROW, ROW, ROW, ROW, does) for name, does in bodies.items()))


def verdict(kernel, order="forward"):
    """What is said of a launch; None if nothing is wrong."""
    x, out = np.zeros(BLOCKS * ROW, np.uint8), np.zeros(BLOCKS * THREADS, np.uint32)
    try:
        kernel(BLOCKS, THREADS, x, out, check_races=True, order=order)
    except simt.RaceError as e:
        return str(e)
    return None


# Each warp works on 32 words of its own: first some steps, then something that is right or wrong.
STEP = "LOAD(m, lane); LOAD(m, lane ? lane - 1 : 0); W; STORE(m, lane); W;"
STEPS = f"for (int n = 0; n < 3; n++) {{ {STEP} }}"
HALVES = "if (lane < 16) __syncwarp(0xffff); else __syncwarp(0xffff0000);"
BEHIND = [  # (what, what the warps do, is it right)
    ("steps", STEPS, True),
    ("steps of a part of the lanes", STEPS.replace("STORE(m, lane);", "if (lane > 3) { STORE(m, lane); }"), True),
    ("steps of a part of the warps", f"if (warp < 2) {{ {STEPS} }}", True),
    ("as many steps as the warp's number", STEPS.replace("n < 3", "n < 1 + warp"), True),
    ("a neighbour's word", STEPS + "LOAD(m, lane ^ 9);", True),
    # Without a __syncwarp, or one for a part of the lanes.
    ("read after write", STEPS + "STORE(m, lane); LOAD(m, lane ^ 1);", False),
    ("write after read", STEPS + "LOAD(m, lane ^ 1); STORE(m, lane);", False),
    ("write after write", STEPS + "STORE(m, lane); STORE(m, lane ^ 1);", False),
    ("a step that lacks its middle", STEPS + STEP.replace("W; STORE", "STORE"), False),
    ("steps that lack their end", STEPS.replace("lane); W; }", "lane); }"), False),
    ("halves that keep to themselves", STEPS + f"STORE(m, lane); {HALVES} LOAD(m, lane ^ 15);", True),
    ("halves that do not", STEPS + f"STORE(m, lane); {HALVES} LOAD(m, lane ^ 16);", False),
    ("halves, again and again", f"for (int n = 0; n < 3; n++) {{ {STEP.replace('W;', HALVES)} }}", False),
    ("a half", STEPS + "if (lane < 16) { STORE(m, lane); __syncwarp(0xffff); LOAD(m, lane ^ 1); }", True),
    ("one warp lacks it", STEPS + "STORE(m, lane); if (warp != 1) W; LOAD(m, lane ^ 1);", False),
    ("one lane of one warp writes late", STEPS + "if (t == 40) { STORE(m, lane ^ 1); } LOAD(m, lane);", False),
    # Other warps, and other blocks.
    ("another warp's word", STEPS + "if (t == 3) { LOAD(m, 40); }", False),
    ("... is written", STEPS + "if (t == 3) { STORE(m, 40); } W;", False),
    ("... behind a barrier", STEPS + "B; LOAD(m, NEXT);", True),
    ("... is written there", STEPS + "B; STORE(m, NEXT);", True),
    ("... and the warp goes on", STEPS + "B; LOAD(m, NEXT);" + STEPS, False),
    ("... behind another barrier", STEPS + "B; LOAD(m, NEXT); B;" + STEPS, True),
    ("warps and blocks in turn", f"for (int k = 0; k < 3; k++) {{ {STEPS} B; LOAD(all, 95 - t); B;"
     " STORE(all, t); B; }", True),
    ("... one barrier short", f"for (int k = 0; k < 3; k++) {{ {STEPS} B; LOAD(all, 95 - t); STORE(all, t); B; }}",
     False),
    ("... behind what was settled before", f"B; STORE(all, 95 - t); B; {STEPS} LOAD(all, 95 - t);", False),
    ("what all warps read", STEPS.replace("LOAD(m, lane);", "LOAD(m, lane); LOAD(all, 200);"), True),
    ("... and one writes", STEPS.replace("LOAD(m, lane);", "LOAD(m, lane); LOAD(all, 200);")
     + "if (t == 0) { STORE(all, 200); }", False),
    ("a store in front of the steps", "STORE(all, 95 - t);" + STEPS, False),
    # Words in part.
    ("bytes of a word by two lanes", STEPS + "SET(unsigned char, m, lane, v); W; GET(unsigned char, m, lane ^ 1);",
     True),
    ("... without a __syncwarp", STEPS + "SET(unsigned char, m, lane, v); GET(unsigned char, m, lane ^ 1);", False),
    ("bytes of a word by two warps", STEPS + "SET(unsigned char, all, 512 + 2 * (t % 32) + (warp & 1), v);", False),
    ("halves of words", STEPS + "SET(unsigned short, m, lane, v); W; LOAD(m, lane);" + STEPS, True),
    ("... that lack a __syncwarp", STEPS + "SET(unsigned short, m, 2 * lane, v); LOAD(m, lane ^ 1);", False),
    ("vectors", STEPS + "if (lane < 8) { SET(uint4, m, lane, v); } W;" + STEPS, True),
    ("... that lack a __syncwarp", STEPS + "if (lane < 8) { SET(uint4, m, lane, v); }" + STEPS, False),
    ("a vector over another warp's words", STEPS + "if (lane == 0) { SET(uint4, m, 7, v); }"
     " if (t == 0) { GET(uint4, m, 8); }", False),
    # Lanes that meet in one store, in one of the blocks.
    ("every other lane", STEPS + "if (lane % 2 == 0) { STORE(m, lane / 2); } W;" + STEPS, True),
    ("... in one block", STEPS + "if (b || lane % 2 == 0) { STORE(m, lane / 2); } W;", False),
    ("every other lane, by the block's number", STEPS + "if (lane % 2 == 0) { STORE(m, lane / 2 + b); } W;" + STEPS,
     True),
    ("... in one block, by its number", STEPS + "if (b || lane % 2 == 0) { STORE(m, lane / 2 + b); } W;", False),
    # Other kinds of access.
    ("an atomic", STEPS + "atomicAdd((unsigned *)m + (lane ^ 1), 1); W;" + STEPS, True),
    ("... that lacks a __syncwarp", STEPS + "atomicAdd((unsigned *)m + (lane ^ 1), 1);" + STEPS, False),
    ("a counter of all warps", STEPS.replace("W; }", "W; atomicAdd((unsigned *)all + 200, 1); }"), True),
    ("... that is read", STEPS.replace("W; }", "W; atomicAdd((unsigned *)all + 200, 1); }") + "LOAD(all, 200);", False),
    ("a counter that another warp stores to", STEPS + "if (t == 0) { atomicAdd((unsigned *)all + 200, 1); } W;"
     " if (t == 40) { STORE(all, 200); }", False),
    ("lanes that have left", STEPS + "STORE(m, lane); if (lane > 20) return; __syncwarp(0x1fffff);"
     " LOAD(m, lane + 8);", False),
    ("... behind a __syncwarp", STEPS + "STORE(m, lane); W; if (lane > 20) return; LOAD(m, lane + 8);"
     " __syncwarp(0x1fffff); STORE(m, lane);", True),
    ("warps that have left", STEPS + "if (warp == 1) { STORE(m, lane); return; } B;"
     " if (warp == 0) { LOAD(m, lane + 32); }", False),
    ("... behind a barrier", STEPS + "B; if (warp == 1) return; B; if (warp == 0) { LOAD(m, lane + 32); }", True),
]  # fmt: skip


@pytest.fixture(scope="module")
def behind():
    places = {"shared": "*all = s, *m = s + 128 * warp;", "global": "*all = g, *m = g + 128 * warp;"}
    return compiled({
        f"{n}_{place}": f"unsigned char {pointers} {does}"
        for (n, (_, does, _)), (place, pointers) in product(enumerate(BEHIND), places.items())
    })  # fmt: skip


@pytest.mark.parametrize("place", ["shared", "global"])
@pytest.mark.parametrize("number", [pytest.param(n, id=row[0]) for n, row in enumerate(BEHIND)])
def test_behind_steps_of_warps(behind, number, place, monkeypatch):
    for order, together in ("forward", BLOCKS), ("reverse", 1):
        monkeypatch.setattr(scheduler, "PART", THREADS * together)
        said = verdict(behind[f"k{number}_{place}"], order)
        assert (said is None) == BEHIND[number][2], said


def test_another_block_s_words():
    """Global memory that another block has settled for its warps alone is its own."""
    module = compiled({"k": STEPS.replace("m,", "g + 128 * warp,") + "if (b) { LOAD(other, lane); }"})
    assert "different blocks" in verdict(module["kk"])


def test_what_a_warp_has_settled_is_not_looked_at(behind, monkeypatch):
    """The steps of a stencil in place by warps cost no look at single bytes: it took them 40 times as long."""
    looked = []
    access = Races.access
    monkeypatch.setattr(Races, "access", lambda self, *given: looked.append(given) or access(self, *given))
    names = [row[0] for row in BEHIND]
    for name, place in product(
        ("steps", "steps of a part of the lanes", "steps of a part of the warps", "as many steps as the warp's number",
         "... behind a barrier", "warps and blocks in turn", "what all warps read"),
        ("shared", "global"),
    ):  # fmt: skip
        assert verdict(behind[f"k{names.index(name)}_{place}"]) is None
        assert not looked, (name, place)


# Random kernels: what is said of them, once with accesses put aside, once with a look at every byte.
TYPES = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "uint4"}
MASKS = ["lane < 16", "lane & 1", "lane > 0 && lane < 31", "warp == 1", "warp < 2", "b == 0", "lane == 3", "t < 40"]
OWN = ["lane", "31 - lane", "(lane ^ 1)", "(lane + 1) % 32"]
READ = [*OWN, "lane / 2", "5"]
FAR = ["t ^ 32", "(t + 32) % 96", "t + 1", "lane", "7", "95 - t", "96 + t", "96 + 95 - t"]


def right(choose):
    """An access of each warp to its own words, and what orders it."""
    size, row = choose.choice([4, 4, 4, 4, 1, 2, 16]), choose.choice("sg")
    row = f"({row} + 128 * warp)" if size == 4 else f"({row} + 1024 + 512 * warp)"
    does = f"GET({TYPES[size]}, {row}, {choose.choice(READ)});"
    if choose.random() < 0.5:
        does = f"SET({TYPES[size]}, {row}, {choose.choice(OWN)}, v);"
    return some(choose, does) + " " + choose.choice(["W;", "W;", "W;", "B;"])


def any_access(choose):
    """An access somewhere; and what orders it, mostly."""
    row = choose.choice(["s", "g", "s", "g", "s", "g", "other"])
    kind, size = choose.random(), choose.choice([4, 4, 4, 4, 4, 1, 2, 8, 16])
    at = f"warp * 32 + {choose.choice(READ)}" if choose.random() < 0.85 else choose.choice(FAR)
    if kind < 0.5:
        does = f"GET({TYPES[size]}, {row}, {at});"
    elif kind < 0.92:
        does = f"SET({TYPES[size]}, {row}, {at}, {choose.choice(['v', 'v', '7'])});"
    elif kind < 0.97:
        does = f"atomicAdd((unsigned *){row} + ({at}), 1);"
    else:
        does = f"v += *(volatile unsigned *)((unsigned *){row} + ({at}));"
    return some(choose, does) + " " + choose.choice(["W;"] * 16 + ["B;"] * 3 + [HALVES] + [""] * 2)


def some(choose, does):
    return does if choose.random() < 0.7 else f"if ({choose.choice(MASKS)}) {{ {does} }}"


def body(seed):
    """What the kernel of this number does."""
    choose = random.Random(seed)
    care = choose.choice([0, 0.8, 0.95, 1])

    def lines(count, without=()):
        found = [(right if choose.random() < care else any_access)(choose) for _ in range(count)]
        return "\n  ".join(found)

    inside = lines(choose.randint(2, 7))
    turns = choose.choice(["1", "2", "3", "3", "2 + b"] + ([] if "B;" in inside else ["1 + warp"]))
    does = f"for (int n = 0; n < {turns}; n++) {{ {inside} }}\n  "
    end = choose.random()
    if end < 0.15:
        leaves = choose.choice(["lane > 29", "warp == 2", "t > 80"])
        first = lines(1).replace("B;", "").replace(HALVES, "").replace("W;", "")
        does = f"if ({leaves}) {{ {first} return; }}\n  " + does
        does = does.replace("0xffff0000", "__activemask() & 0xffff0000")
    return does + ("B;\n  " if end < 0.6 else "") + lines(choose.randint(0, 3))


def test_as_if_each_byte_was_looked_at(monkeypatch):
    seeds = range(40)
    module = compiled({seed: body(seed) for seed in seeds})
    said = {seed: verdict(module[f"k{seed}"]) for seed in seeds}
    monkeypatch.setattr(Noting, "set_aside", lambda *given: False)
    for seed in seeds:
        assert (verdict(module[f"k{seed}"]) is None) == (said[seed] is None), (body(seed), said[seed])
    assert 12 < sum(one is None for one in said.values()) < 35
