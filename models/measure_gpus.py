"""Measure, on several cards of one host, what a token takes over them: Mistral-7B in fp16 behind 4095 tokens, random
weights made on the card, beside one card in the same run.

    python -m models.measure_gpus [--gpus 2] [--quick]      writes kernels/llm/measured/<card>_gpus.json

First the logits of all cards are held to those of one. Then CUDA graphs of a token, one for each card, are replayed by
turns: the median over turns, of the slowest card. What each launch takes at whole and half sizes is measured on one
card, and a token predicted of these parts and of one exchange (models/exchange_costs.py). Peer, in the same run: the
same launches with NCCL's all-reduce behind the products, a process for each card.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from kernels import benching, llm
from kernels.bench import versions
from kernels.collective.one_launch import SOURCES as SHARE
from kernels.llm import bench, one_launch, shapes
from kernels.llm.step import Step
from lab import cuda_timing, results
from lab.roof_gpu import gpu_roof
from lab.table import Table
from models import exchange_costs
from models.across import Caches, ShareStep, Steps, WholeSteps
from models.exchanges import Devices, Processes
from models.shares import rows_of, share_of

LENGTH, ROOM, TOKEN = 4096, 5120, 17  # tokens with this one; room in the cache; the token
TURNS, REPLAYS = 9, 20
PATIENCE = 60  # seconds that a peer may take
NCCL = {"NCCL_NVLS_ENABLE": "0", "NCCL_GRAPH_MIXING_SUPPORT": "0"}  # no multicast; all its calls are in graphs
SOURCES = (
    "models/across.py", "models/shares.py", "models/exchanges.py", "kernels/collective/product.cu",
    "kernels/collective/fused.py", "kernels/collective/direct.cu", "kernels/collective/launches.py",
    "kernels/collective/group.py", "lab/cuda/devices.py", *SHARE, *bench.STEP, *bench.FUSION, *bench.ATTEND,
)  # fmt: skip


def weights_of(weights, shape, rank, count, device):
    """One device's share of what kernels.llm.shapes.random_weights gives, on that device."""
    q, kv = (rows_of(rows, rank, count) for rows in (shape.q_rows, shape.kv_rows))
    ffn, vocab = (rows_of(rows, rank, count) for rows in (shape.ffn, shape.vocab))

    def there(*parts):
        return torch.cat([part.to(device) for part in parts]).contiguous()

    def joined(cuts, *parts):
        whole = there(*(part[slice(*cut)] for part, cut in zip(parts, cuts)))
        return whole, whole.split([last - first for first, last in cuts])

    layers = []
    for layer in weights.layers:
        share = SimpleNamespace(bqkv=None, bias_rows=None, q_norm=None, k_norm=None)
        share.Wqkv, (share.Wq, share.Wk, share.Wv) = joined((q, kv, kv), layer.Wq, layer.Wk, layer.Wv)
        share.W_glu, (share.W_gate, share.W_up) = joined((ffn, ffn), layer.W_gate, layer.W_up)
        share.Wo, share.W_down = there(layer.Wo[:, slice(*q)]), there(layer.W_down[:, slice(*ffn)])
        share.attention_norm, share.ffn_norm = there(layer.attention_norm), there(layer.ffn_norm)
        layers.append(share)
    head, norm = there(weights.head[slice(*vocab)]), there(weights.norm)
    return SimpleNamespace(embedding=there(weights.embedding), layers=layers, norm=norm, head=head)


class PartOfCache:
    """One device's heads of a kernels.llm.shapes.RandomCache."""

    def __init__(self, cache, rank, count, device):
        heads = slice(*rows_of(cache.layers[0][0].shape[1], rank, count))
        both = (torch.stack([pair[n][:, heads].to(device) for pair in cache.layers]) for n in range(2))
        self.layers = list(zip(*both))

    def layer(self, index):
        return self.layers[index]


def over(exchange, shape, weights, cache, token=TOKEN, length=LENGTH, kinds=(Steps, WholeSteps)):
    """([Steps, WholeSteps], Caches) of this process's devices: weights and a cache of one device, cut into shares."""
    steps, parts = [[] for _ in kinds], []
    for device, rank in zip(exchange.where, exchange.ranks):
        share = weights_of(weights, shape, rank, exchange.count, device)
        parts.append(PartOfCache(cache, rank, exchange.count, device))
        for each, kind in zip(steps, kinds):
            each.append(kind.kind(shape, share, shape.dtype, device, rank, exchange.count, pdl=True))
            said(each[-1], token, length)
    return [kind(each, exchange) for each, kind in zip(steps, kinds)], Caches(parts)


def said(step, token=TOKEN, length=LENGTH):
    """The step, with a token at the end of so many."""
    step.token.fill_(token)
    step.kv_len.fill_(length)
    return step


def expect_right(steps, caches, exchange, wanted, tolerance):
    """Run a token; ValueError where its logits are not those of one device, or not the same bits on all."""
    for step in steps.steps:
        step.all_logits.fill_(torch.nan)
    steps.launch(caches)
    exchange.synchronize()
    found = [step.all_logits.to(wanted.device) for step in steps.steps]
    error = float((found[0].double() - wanted).norm() / wanted.norm())
    if not error <= tolerance or not all(torch.equal(logits, found[0]) for logits in found):
        raise ValueError(f"a token over {exchange.count} devices is not right, so it is not timed: error {error:.2g}")
    return error


def timed(replay, where):
    """Microseconds of one replay: the median over turns, of the slowest of these cards."""
    for _ in range(REPLAYS):
        replay()
    taken = []
    for _ in range(TURNS):
        marks = {device: [torch.cuda.Event(enable_timing=True) for _ in "be"] for device in where}
        for n in range(REPLAYS + 1):
            for device, events in marks.items():
                if n in (0, REPLAYS):
                    events[n > 0].record(torch.cuda.current_stream(device))
            if n < REPLAYS:
                replay()
        for device in where:
            torch.cuda.synchronize(device)
        taken.append(max(1e3 * begin.elapsed_time(end) / REPLAYS for begin, end in marks.values()))
    return sorted(taken)[TURNS // 2]


def on_one(step, cache):
    """Microseconds of a token on one card, in a graph."""
    return timed(cuda_timing._capture([functools.partial(step.launch, cache)], 1, torch.cuda.Stream()), [step.device])


def apart(step, layer, keys, values):
    """Attention as rope_append and decode."""
    step.rotate(layer, keys, values)
    step.mix(keys, values)


def together(step, layer, keys, values):
    """Attention as one launch, also where the step would not take it."""
    step._place(llm.attend, layer, keys, values, step.mixed[0])


def parts(step, cache):
    """{launch: µs} of one card: of all layers on end, so that no weights are found in its cache."""
    layers = list(enumerate(step.weights.layers))
    calls = {
        "qkv": [functools.partial(step.project, layer) for _, layer in layers],
        "attention": [functools.partial(step.attend, layer, *cache.layer(index)) for index, layer in layers],
        "attention in three launches": [functools.partial(apart, step, layer, *cache.layer(n)) for n, layer in layers],
        "attention in one": [functools.partial(together, step, layer, *cache.layer(n)) for n, layer in layers],
        "W_o": [functools.partial(Step.back, step, layer) for _, layer in layers],
        "GLU": [functools.partial(step.feed, layer) for _, layer in layers],
        "W_down": [functools.partial(Step.down, step, layer) for _, layer in layers],
        "head": [step.end],
    }
    found = {}
    for name, each in calls.items():
        for call in each[:1]:
            call()
        torch.cuda.synchronize(step.device)
        replay = cuda_timing._capture(each, 1, torch.cuda.Stream(step.device))
        found[name] = timed(replay, [step.device]) / len(each)
    return found


def predicted(shape, of_parts, count):
    """Microseconds of a token over so many cards, of its parts at a share's sizes and of its exchanges."""
    each = sum(of_parts[name] for name in ("qkv", "attention", "W_o", "GLU", "W_down"))
    return shape.n_layers * each + of_parts["head"] + 1e6 * exchange_costs.seconds(shape, count)


def row(micros, one, **more):
    return {"µs": micros, "tokens/s": 1e6 / micros, "of one card": one / micros, **more}


def measure(count, shape=shapes.MISTRAL_7B, quick=False):
    """Tables of a token over `count` cards."""
    exchange = Devices([f"cuda:{n}" for n in range(count)])
    device, tolerance = exchange.where[0], bench.TOLERANCE[shape.dtype]
    weights = shapes.random_weights(shape, 16, device)
    cache = shapes.RandomCache(shape, LENGTH, ROOM, device=device)
    wanted = shapes.wanted_logits(shape, weights, cache, TOKEN)
    ours = {"one card": said(Step(shape, weights, shape.dtype, device))}
    kinds = [Steps]
    if one_launch.takes(shape) and one_launch.takes(share_of(shape, 0, count)):
        ours["one card, one launch"] = said(one_launch.OneLaunch(shape, weights, shape.dtype, device))
        kinds.append(WholeSteps)
    both, caches = over(exchange, shape, weights, cache, kinds=kinds)
    ahead = [(step, cache) for step in ours.values()] + [(steps, caches) for steps in both]
    benching.ahead(part for step, of_step in ahead for part in step.parts(of_step))
    exchange.synchronize()
    found = {}
    for name, step in ours.items():
        bench.checked(name, step, cache, wanted, shape.dtype)
        found[name] = on_one(step, cache)
        print(f"{name}: {found[name]:,.1f} µs", flush=True)
    best = min(found.values())
    rows = {name: row(micros, best) for name, micros in found.items()}
    names = f"{count} cards, sums in the epilogue", f"{count} cards, one launch on each"
    for name, steps in zip(names, both):
        expect_right(steps, caches, exchange, wanted, tolerance)
        with cuda_timing.no_garbage_collected():
            graph = exchange.graph(functools.partial(steps.launch, caches))
        micros = timed(graph.replay, exchange.where)
        expect_right(steps, caches, exchange, wanted, tolerance)
        print(f"{name}: {micros:,.1f} µs, {1e6 / micros:,.1f} tokens/s, {best / micros:.3f} of one card", flush=True)
        rows[name] = row(micros, best)
        del graph
    of_parts = {"one card": parts(ours["one card"], cache), "a share": parts(both[0].steps[0], caches.parts[0])}
    rows[names[0]]["predicted, µs"] = predicted(shape, of_parts["a share"], count)
    del steps, both, caches, ours, weights, cache, ahead
    benching.empty()
    if not quick and (peer := nccl(count)) is not None:
        rows[f"{count} cards, NCCL's all-reduce"] = row(peer, best)
    title = f"{shape.name}, fp16, behind {LENGTH - 1}, {count} × {torch.cuda.get_device_name(0)}"
    return [Table(f"A token: {title}", rows, SOURCES), Table(f"Its launches, µs: {title}", of_parts, SOURCES)]


# The peer


def nccl(count):
    """Microseconds of a token with NCCL's all-reduce, a process for each card; None, after a sentence, without."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "models.measure_gpus", "--gpus", str(count), "--folder", folder, "--rank"]
        runs = [subprocess.Popen([*command, str(rank)], env=os.environ | NCCL) for rank in range(count)]
        end = time.monotonic() + PATIENCE
        try:
            for run in runs:
                run.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"NCCL's all-reduce: left out: it took more than {PATIENCE} s")
        finally:
            for run in runs:
                run.kill()
        found = Path(folder) / "found.json"
        return json.loads(found.read_text()) if found.exists() else None


def process(rank, count, folder, shape=shapes.MISTRAL_7B):
    """One rank of the peer: weights of a share, made here."""
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=count, device_id=device
    )
    exchange = Processes(device, "messages")
    torch.manual_seed(rank)
    share = share_of(shape, rank, count)
    weights = shapes.random_weights(share, 16, device)
    cache = shapes.RandomCache(share, LENGTH, ROOM, device=device)
    step = said(ShareStep(shape, weights, shape.dtype, device, rank, count))
    steps, caches = Steps([step], exchange), Caches([cache])
    with cuda_timing.no_garbage_collected():
        graph = exchange.graph(functools.partial(steps.launch, caches))
    dist.barrier()
    micros = timed(graph.replay, [device])
    logits = step.all_logits.clone()
    dist.broadcast(logits, 0)
    if not torch.isfinite(logits).all() or not torch.equal(logits, step.all_logits):
        raise RuntimeError("logits are not finite, or not the same everywhere")
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(micros))
    del graph
    dist.destroy_process_group()


def main(arguments=None):
    """Measure, print, store. The exit code: 0, or 2 where there are too few cards."""
    parser = argparse.ArgumentParser("python -m models.measure_gpus", description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="without the peer, and nothing is stored")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    there = torch.cuda.device_count() if torch.version.cuda is not None else 0
    if options.gpus < 2 or there < options.gpus:
        print(
            f"measure_gpus needs 2 cards or more that reach each other's memory: asked for {options.gpus}, {there} here"
        )
        return 2
    if options.rank is not None:
        process(options.rank, options.gpus, options.folder)
        return 0
    tables = measure(options.gpus, quick=options.quick)
    print(*tables, sep="\n\n")
    if not options.quick:
        path = results.save(results.ROOT / "kernels" / "llm", [], gpu_roof(), versions(), tables=tables, name="gpus")
        print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
