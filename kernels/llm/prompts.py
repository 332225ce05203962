"""How long a prompt takes, ours beside transformers' forward: random weights, whole prompts, on one card in turns.

Both are asked for the logits behind the last token and for the keys and values to go on from, and are timed as called
from Python. Each runs in a process of its own: ours is what models.gpu runs for a prompt, and `kernels` imports no
`models`.
"""

import json
import os
import sys
from pathlib import Path

from kernels.llm import peers, shapes
from lab.table import Table
from lab.timing import Timing

LENGTHS = (512, 4096)
ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import functools, json, sys
case = json.loads(sys.argv[1])
sys.path.insert(0, case["root"])
sys.path.append(case["root"] + "/kernels/llm/peers")
import torch
from kernels.llm import shapes
from models import cache, gpu
from models.config import Config
from turns import say, timed
shape, device = getattr(shapes, case["shape"]), case["device"]
if "layers" in case:
    import dataclasses
    shape = dataclasses.replace(shape, n_layers=case["layers"], **case["sizes"])
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
sizes = "hidden", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn", "vocab", "eps", "theta", "scaling", "tied"
config = Config(kind="mistral", context=8192, stops=(), begin=None, **{name: getattr(shape, name) for name in sizes})
with torch.inference_mode():
    weights = shapes.random_weights(shape, 16, device)
    place = cache.make(config, max(case["lengths"]), shape.dtype, device, 16)
    def run(ids):
        place.clear()
        return gpu.prompt(config, weights, ids, place, shape.dtype)
    prompts = {n: torch.randint(0, shape.vocab, (n,), device=device) for n in case["lengths"]}
    for ids in prompts.values():
        assert torch.isfinite(run(ids)).all()
    wait()
    say(ready={"name": "ours"})
    sys.stdin.readline()
    say(seconds={n: timed(functools.partial(run, ids), seconds=case["seconds"], wait=wait)
                 for n, ids in prompts.items()})
"""


class Ours(peers.Peer):
    """The course's own prompts, as a peer's process."""

    def __init__(self, shape="MISTRAL_7B", lengths=LENGTHS, seconds=1.0, device="cuda", **smaller):
        self.title = "ours, prompts"
        case = {"shape": shape, "lengths": lengths, "seconds": seconds, "device": device, "root": str(ROOT)} | smaller
        self.start([sys.executable, "-c", CHILD, json.dumps(case)], os.environ)


def theirs(compiled, shape=shapes.MISTRAL_7B, lengths=LENGTHS, **more):
    """transformers' process."""
    case = peers.case_of(shape, 16, max(lengths)) | {"lengths": lengths, "compile": compiled} | more
    return peers.Peer("with_transformers_prompts.py", case | {"dtype": str(shape.dtype).removeprefix("torch.")})


def begun():
    """The processes, which make themselves ready: ours, and transformers' where it is installed."""
    return [Ours(), *([theirs(False), theirs(True)] if peers.has_transformers() else [])]


def prompts(processes=None, shape=shapes.MISTRAL_7B):
    """A Table of ms a prompt; of those processes that are ready in time."""
    processes = begun() if processes is None else processes
    found = dict(filter(None, [process.turn() for process in processes]))
    return table({name: {int(n): Timing.of(s) for n, s in taken.items()} for name, taken in found.items()}, shape)


def table(found, shape=shapes.MISTRAL_7B):
    """found: {name: {tokens: Timing}}, "ours" among them. Ours come first, and last how many times faster they are than
    the best peer."""
    rows, theirs = {}, sorted(found.keys() - {"ours"})
    for n in sorted(found["ours"]):
        ours = found["ours"][n].median
        row = rows[f"{n} tokens"] = {"ours, ms": 1e3 * ours, "ours, TFLOP/s": flops_of(shape, n) / ours / 1e12}
        row |= {f"{name}, ms": 1e3 * found[name][n].median for name in theirs}
        if theirs:
            row["times faster"] = min(found[name][n].median for name in theirs) / ours
    models = "gpu", "prefill", "positions", "cache"
    sources = ("kernels/llm/prompts.py", *(f"models/{name}.py" for name in models))
    return Table(f"Prompts, {shape.name}, fp16", rows, sources)


def flops_of(shape, n):
    """Of a prompt of n tokens: two for each weight and token, the head's once; four for each query head, pair of tokens
    that sees one another, and channel."""
    layer = shape.hidden * (2 * shape.q_rows + 2 * shape.kv_rows + 3 * shape.ffn)
    seen = n * (n + 1) // 2
    return (
        2 * (n * shape.n_layers * layer + shape.vocab * shape.hidden) + 4 * shape.n_layers * shape.q_rows * seen
    )  # fmt: skip
