"""Measure, on a GPU, what a step of several texts takes (models/paged.py): Mistral-7B in 16, 8 and 4 bits, random
weights, caches of random numbers.

    python -m models.measure_several      writes kernels/llm/measured/<card>_several.json

In a CUDA graph, which is what the card takes; and as called, with pages, tables, tokens and the wait for logits. Of
these times models/serving_times.py makes its law, where they are stored.
"""

import sys
from types import SimpleNamespace

import torch

from kernels.bench import versions
from kernels.benching import empty
from kernels.llm import shapes
from kernels.lowbit.gemv import SOURCES as OF_BITS
from lab import cuda_timing, results
from lab.roof_gpu import gpu_roof
from lab.table import Table
from lab.timing import Timing, measure
from models.config import Config
from models.paged import Pages

ROWS, SEEN = (1, 2, 4, 8, 16), (128, 4096)
SIZES = "hidden", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn", "vocab", "eps", "theta", "scaling", "tied"
SOURCES = (
    "models/paged.py", "models/positions.py", "models/prefill.py", "kernels/paged/decode.cu", "kernels/paged/merge.cu",
    "kernels/paged/plan.py", "kernels/paged/write.cu", "kernels/matmul/planned.cu", "kernels/matmul/merge.cu",
    "kernels/matmul/plan.py", *OF_BITS,
)  # fmt: skip


def title_of(bits, shape=shapes.MISTRAL_7B):
    return f"A step of several texts: {shape.name}, {'fp16' if bits == 16 else f'int{bits}'}"


def filled(shape, weights, device, rows, seen):
    """(places, [(key, token), ...]) of so many texts of so many tokens each, beside the one that a step adds."""
    config = Config(kind="mistral", context=1 << 20, stops=(), begin=None, **{n: getattr(shape, n) for n in SIZES})
    engine = SimpleNamespace(
        config=config, weights=weights, dtype=shape.dtype, device=device, kv_bits=16, text=object(),
        _compiled=lambda: None,
    )  # fmt: skip
    places = Pages(engine, rows, rows * [seen + 4096])  # a step is made some thousand times
    requests = [places.cache.new() for _ in range(rows)]
    places.cache.reserve(requests, seen - 1)
    for layer in places.layers:
        for pages in (layer.k_pages, layer.v_pages):
            pages.normal_()
    return places, [(request, 7 * n + 1) for n, request in enumerate(requests)]


def case(shape, weights, device, rows, seen, seconds=0.3):
    """{"µs": of a step in a graph, "as called, µs": ...}"""
    places, texts = filled(shape, weights, device, rows, seen)
    logits = places.step(texts)
    if not torch.isfinite(logits).all():
        raise RuntimeError(f"a step of {rows} texts of {seen} tokens gives logits that are not finite")
    with torch.inference_mode():
        graph = Timing.of(cuda_timing.Graph(places.launch).turn())
    called = measure(lambda: places.step(texts).argmax(1).tolist(), seconds=seconds)
    return {"µs": 1e6 * graph.median, "as called, µs": 1e6 * called.median}


def table(bits, device, shape=shapes.MISTRAL_7B):
    """{"4 texts": {"128 tokens, µs": ..., ...}, ...}"""
    weights = shapes.random_weights(shape, bits, device)
    weights = weights if bits == 16 else shapes.in_pairs(weights)
    rows = {}
    for count in ROWS:
        for seen in SEEN:
            empty()
            found = case(shape, weights, device, count, seen)
            key = f"{count} text{'s' * (count > 1)}"
            rows.setdefault(key, {}).update({f"{seen} tokens, {name}": value for name, value in found.items()})
    return Table(title_of(bits, shape), rows, SOURCES)


def main():
    """Measure, print, store."""
    cuda_timing.expect_gpu("a step of several texts")
    tables = [table(bits, torch.device("cuda")) for bits in (16, 8, 4)]
    print(*tables, sep="\n\n")
    path = results.save(results.ROOT / "kernels" / "llm", [], gpu_roof(), versions(), tables=tables, name="several")
    print(f"written: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
