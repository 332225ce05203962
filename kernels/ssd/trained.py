"""How exact is it with trained weights? The errors of accuracy.py for the layers of models/small_mamba2 over a text.

Decays drawn at random are alike for every token; those of trained weights depend on the token: a head keeps its state
over most tokens, and drops nearly all of it at others. x, dt, A, B and C are those that each layer hands to its scan
over a text that the model was not trained on. `kernels` imports no `models`, so they come from a process of their own;
and the published fused kernel, which waits in a loop for other blocks, runs in one, too.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from kernels import benching
from kernels.attention.bench import empty
from kernels.ssd import accuracy, bench, peers
from kernels.ssd.arguments import NO_LIMIT
from lab.table import Table

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "models/small_mamba2"
TOKENS = 65536
PEER = {torch.float16: bench.PUBLISHED[0], torch.bfloat16: bench.PUBLISHED_HIGH[0]}  # (precision, chunk size)
MODELS = "scans", "mamba2", "mamba2_torch", "mamba2_weights", "prefill"
SOURCES = (*accuracy.ALL, "kernels/ssd/trained.py", *(f"models/{name}.py" for name in MODELS))
ALONE, WHOLE = "only y rounded", "all layers"


def title_of(dtype):
    return f"SSD, {accuracy.NAMES[dtype]}, trained weights: error against float64"


def tables():
    """Tables of ‖y − truth‖ / ‖truth‖ for each layer and for all, in fp16 and in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/scans.pt"
        _run("models.scans", FOLDER, TOKENS, file)
        layers = _read(file)
        return [_errors(layers, file, dtype) for dtype in PEER]


def _run(module, *arguments, seconds=150):
    """What a module of the course prints in a process of its own. RuntimeError with its last line if it fails."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result within {seconds} seconds") from None
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout


def _read(file):
    """The layers' calls, float32, on the bench's device."""
    layers = torch.load(file, map_location=benching.DEVICE)
    if any(tuple(call.pop("dt_limit")) != NO_LIMIT for call in layers):
        raise ValueError(f"trained: {FOLDER} must not limit dt, as the truth here does not")
    return layers


def _in(dtype, call):
    """The call in 16 bits: A, D and dt_bias stay float32."""
    return call | {name: call[name].to(dtype) for name in ("x", "dt", "B", "C")}


def _errors(layers, file, dtype):
    empty()
    functions, parts = accuracy.variants(dtype), {ALONE: []}
    for layer in layers:
        call = _in(dtype, layer)
        wanted = bench.truth(call)
        parts[ALONE].append(_part(wanted.to(dtype), wanted))
        for name, function in functions.items():
            parts.setdefault(name, []).append(_part(function(**call), wanted))
    if peers.published() is not None:
        try:
            parts[bench.FUSED_PEER] = json.loads(_run("kernels.ssd.trained", file, accuracy.NAMES[dtype]))
        except RuntimeError as error:
            print(f"{title_of(dtype)}: the published fused kernel is left out: {error}")
    return Table(title_of(dtype), {name: _row(found) for name, found in parts.items()}, SOURCES)


def _part(y, wanted):
    """(‖y − wanted‖², ‖wanted‖²)."""
    return float((y - wanted).square().sum()), float(wanted.square().sum())


def _row(parts):
    row = {f"layer {n}": math.sqrt(off / of) for n, (off, of) in enumerate(parts, 1)}
    off, of = map(sum, zip(*parts))
    return row | {WHOLE: math.sqrt(off / of)}


def _published(file, dtype):
    """The parts of the published fused kernel."""
    precision, chunk_size = PEER[dtype]
    found = []
    for layer in _read(file):
        call = _in(dtype, layer)
        (run,) = peers.published_calls([call], precision, chunk_size)
        found.append(_part(run(), bench.truth(call)))
    return found


if __name__ == "__main__":
    print(json.dumps(_published(sys.argv[1], {v: k for k, v in accuracy.NAMES.items()}[sys.argv[2]])))
