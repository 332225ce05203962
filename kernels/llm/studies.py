"""What stands beside the ladders of a whole model, as tables:

the law    a step takes its bytes at the speed of reading, and so much more for each launch: leave out kernels, count
           launches and bytes, and see what each launch costs
bits       of the cache: a step by the length of the text, with keys and values in 16, 8 and 4 bits
prompts    whole prompts beside transformers' forward
start      from the command `python -m models.generate` to its first token, for a checkpoint in the page cache
"""

import functools
import math
from types import SimpleNamespace

import numpy as np
import torch

from kernels import benching
from kernels.llm import bench, prompts, shapes, starting
from kernels.llm.step import Step, best
from lab import cuda_timing
from lab.table import Table

LENGTH = 128
PARTS = (
    (), ("attend",), ("project",), ("back",), ("feed",), ("down",), ("end",), ("feed", "down"), ("attend", "end"),
    ("project", "attend", "back"), ("attend", "feed"), ("back", "down"),
)  # fmt: skip
CALLED = {
    "attend": "attention", "project": "QKV", "back": "output projection", "feed": "gate and up", "down": "down",
    "end": "the head",
}  # fmt: skip
KV_LENGTHS = (128, 3968, 16384)


def tables():
    """All of them."""
    cuda_timing.expect_gpu("the studies of a whole model")
    found = [*laws(), attention_alone(), kv_bits(), starting.start()]
    benching.empty()
    return [*found, prompts.prompts()]


# The law


def laws(seconds=0.1):
    """A Table for each of: fp16 plain and with PDL, int8, int4."""
    found = []
    for bits, ways in ((16, (False, True)), (8, (True,)), (4, (True,))):
        benching.empty()
        shape = shapes.MISTRAL_7B
        weights = shapes.random_weights(shape, bits, benching.DEVICE)
        weights = weights if bits == 16 else shapes.in_pairs(weights)
        cache = shapes.RandomCache(shape, LENGTH, bench.ROOMS[LENGTH], device=benching.DEVICE)
        found += [law(shape, bits, weights, cache, pdl, seconds) for pdl in ways]
    return found


def law(shape, bits, weights, cache, pdl, seconds):
    """Steps without some of their kernels, timed in turns: launches, bytes and µs of each, and what fits them."""
    kind = best(weights)
    calls, facts = {}, {}
    for parts in PARTS:
        step = without(kind(shape, weights, shape.dtype, benching.DEVICE, pdl=pdl), parts)
        step.token.fill_(bench.TOKEN)
        step.kv_len.fill_(LENGTH)
        name = "without " + " and ".join(CALLED[part] for part in parts) if parts else "all"
        calls[name] = functools.partial(step.launch, cache)
        facts[name] = launches(calls[name]), bytes_of(weights, cache, parts)
    probe, read = cuda_timing.read_probe()
    timed = cuda_timing.against(probe, calls, seconds=seconds)
    rate = float(np.median([read / (timing.median / ratio) for timing, ratio in timed.values()]))
    rows = {
        name: {"launches": n, "GB": moved / 1e9, "µs": 1e6 * timed[name][0].median}
        for name, (n, moved) in facts.items()
    }
    fitted = fit(rows, rate)
    bare = {name: row for name, row in rows.items() if CALLED["attend"] in name}
    fitted["c without attention, µs"] = fit(bare, rate)["c, µs"]
    alone = "without " + CALLED["attend"]
    fitted["attention, µs a layer"] = (rows["all"]["µs"] - rows[alone]["µs"]) / shape.n_layers
    for row in rows.values():
        row["the law's µs"] = row["GB"] * 1e15 / rate + fitted["c, µs"] * row["launches"]
    rows["fit"] = fitted | {"read, GB/s": rate / 1e9}
    title = f"The law of a step: {shape.name}, {bench.numbers_of(shape, bits)}, {'PDL' if pdl else 'plain'}"
    return Table(title, rows, (*bench.FUSED[bits], *bench.ATTEND, "kernels/llm/studies.py"))


def fit(rows, rate):
    """The c of step = bytes / rate + c · launches, by least squares, in µs; its deviation by leaving out a row; and the
    largest miss of a step. rows: with "launches", "GB" and "µs"; rate: bytes/s"""
    n = np.array([row["launches"] for row in rows.values()], float)
    over = np.array([row["µs"] - row["GB"] * 1e15 / rate for row in rows.values()])
    c = float(n @ over / (n @ n))
    apart = [float(np.delete(n, i) @ np.delete(over, i) / (np.delete(n, i) @ np.delete(n, i))) for i in range(len(n))]
    deviation = math.sqrt((len(n) - 1) / len(n) * sum((one - np.mean(apart)) ** 2 for one in apart))
    each = over / n
    miss = max(abs(o - c * k) / row["µs"] for o, k, row in zip(over, n, rows.values()))
    return {
        "c, µs": c, "its deviation": deviation, "c of a row, least": float(each.min()), "most": float(each.max()),
        "largest miss, %": 100 * float(miss),
    }  # fmt: skip


def without(step, parts):
    """The step, some of whose methods do nothing: what comes after them reads what was there."""
    for part in parts:
        setattr(step, part, lambda *arguments: None)
    return step


def bytes_of(weights, cache, parts):
    """What a step without these parts reads."""
    names = {"project": "Wqkv attention_norm", "back": "Wo", "feed": "W_glu ffn_norm", "down": "W_down"}
    gone = sum(getattr(layer, n).nbytes for layer in weights.layers for p in parts for n in names.get(p, "").split())
    gone += (weights.head.nbytes + weights.norm.nbytes) * ("end" in parts) + cache.bytes * ("attend" in parts)
    return weights.bytes + cache.bytes - gone


def launches(call):
    """How many kernels a call launches, as its CUDA graph counts them."""
    from cuda.bindings import driver

    call()
    benching.wait()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with cuda_timing.no_garbage_collected(), torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        call()
    raw = driver.CUgraph(graph.raw_cuda_graph())
    error, _, count = driver.cuGraphGetNodes(raw, 0)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the nodes of a CUDA graph cannot be counted: {error}")
    error, nodes, count = driver.cuGraphGetNodes(raw, count)
    kind = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    return sum(driver.cuGraphNodeGetType(node)[1] == kind for node in nodes[:count])


# Attention alone


def attention_alone(shape=shapes.MISTRAL_7B):
    """What the launches between a layer's first product and its output projection take, by themselves, in a graph."""
    benching.empty()
    bare = SimpleNamespace(bias_rows=None, q_norm=None, k_norm=None)
    rows = {"three launches": {}, "one launch": {}}
    for length, room in bench.ROOMS.items():
        cache = shapes.RandomCache(shape, length, room, device=benching.DEVICE)
        for row, one in zip(rows.values(), (False, True)):
            for pdl in (False, True):
                weights = SimpleNamespace(layers=[bare] * shape.n_layers)
                step = Step(shape, weights, shape.dtype, benching.DEVICE, pdl=pdl, one_attention=one)
                step.kv_len.fill_(length)
                calls = [functools.partial(step.attend, bare, *cache.layer(i)) for i in range(shape.n_layers)]
                graph = cuda_timing.Graph(calls)
                taken = float(np.median([second for _ in range(3) for second in graph.turn()]))
                row[f"{length - 1} tokens{', PDL' * pdl}, µs"] = 1e6 * taken
    sources = (*bench.STEP, *bench.ATTEND, "kernels/llm/studies.py")
    return Table(f"Attention of a layer of {shape.name}, alone", rows, sources)


# Bits of the cache


def kv_bits(seconds=0.1):
    """A step of eight layers of Mistral-7B's shape by the cache's bits and the length of the text, µs."""
    import dataclasses

    benching.empty()
    shape = dataclasses.replace(shapes.MISTRAL_7B, n_layers=8)
    weights = shapes.random_weights(shape, 16, benching.DEVICE)
    rows = {}
    for length in KV_LENGTHS:
        calls, caches = {}, {}
        for bits in (16, 8, 4):
            caches[bits] = shapes.RandomCache(shape, length, length + 128, bits, benching.DEVICE)
            step = Step(shape, weights, shape.dtype, benching.DEVICE)
            step.token.fill_(bench.TOKEN)
            step.kv_len.fill_(length)
            wanted = shapes.wanted_logits(shape, weights, caches[bits], bench.TOKEN)
            bench.checked(f"a cache of {bits} bits, {length} tokens", step, caches[bits], wanted, shape.dtype)
            calls[bits] = functools.partial(step.launch, caches[bits])
        timed = cuda_timing.against(cuda_timing.read_probe()[0], calls, seconds=seconds)
        row = rows[f"{length} tokens"] = {}
        for bits in calls:
            row[f"{bits} bits, µs"] = 1e6 * timed[bits][0].median
            row[f"{bits} bits, MB of cache"] = caches[bits].bytes / 1e6
    sources = (*bench.FUSED[16], *bench.KV_SOURCES, "kernels/llm/studies.py")
    return Table("A step of eight layers of Mistral-7B, fp16, PDL, by the cache's bits", rows, sources)
