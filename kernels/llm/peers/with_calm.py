"""calm (github.com/zeux/calm): its program, on a file of its layout with random weights. Greedy.

CALM=<its checkout, built> python with_calm.py '{"hidden": 4096, …, "dtype": "fp16", "length": 128}'

All matrices of the file are the same random bytes: the program gives each memory of its own on the card. So the file is
as small as the largest of them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

import numpy as np
from turns import say

TOKENS, BITS = 128, {"fp16": 16, "fp8": 8, "gf4": 4}
WORD = 5  # the token that is "a": the prompt
STORED = {"fp16": "F16", "fp8": "F8_E5M2", "gf4": "I32"}


def tensors_of(case):
    """{name: (dtype, shape)}; of gf4 an int32 has eight numbers."""
    c, each = case, 8 if case["dtype"] == "gf4" else 1
    q_rows, kv_rows = c["n_heads"] * c["head_dim"], c["n_kv_heads"] * c["head_dim"]
    found = {"model.embed.weight": (c["vocab"], c["hidden"]), "model.output.weight": (c["vocab"], c["hidden"])}
    for i in range(c["n_layers"]):
        shapes = {"attn.wq": (q_rows, c["hidden"]), "attn.wk": (kv_rows, c["hidden"])}
        shapes |= {"attn.wv": (kv_rows, c["hidden"]), "attn.wo": (c["hidden"], q_rows)}
        shapes |= {"mlp.w1": (c["ffn"], c["hidden"]), "mlp.w2": (c["hidden"], c["ffn"])}
        shapes |= {"mlp.w3": (c["ffn"], c["hidden"])}
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
    if case["tied"]:
        del found["model.output.weight"]
    found = {name: (STORED[case["dtype"]], (rows, cols // each)) for name, (rows, cols) in found.items()}
    norms = [f"model.layers.{i}.{part}.norm.weight" for i in range(c["n_layers"]) for part in ("attn", "mlp")]
    return found | {name: ("F32", (c["hidden"],)) for name in (*norms, "model.norm.weight")}


def random_bytes(case):
    """As many as the largest matrix takes: numbers with a deviation of about 1 / sqrt(hidden)."""
    made, count = np.random.default_rng(0), case["hidden"] * max(case["vocab"], case["ffn"])
    small = (made.standard_normal(1 << 22, dtype=np.float32) * case["hidden"] ** -0.5).astype(np.float16)
    if case["dtype"] == "fp8":  # e5m2 is the upper byte of a float16
        raw = (small.view(np.uint16) >> 8).astype(np.uint8).tobytes()
    elif case["dtype"] == "gf4":  # 3 bits each, and a scale in e5m2 at the bottom
        low = np.full(1 << 20, 0x28, np.uint32)
        raw = ((made.integers(0, 1 << 24, 1 << 20, dtype=np.uint32) << 8) | low).tobytes()
    else:
        raw = small.tobytes()
    wanted = count * BITS[case["dtype"]] // 8
    return (raw * (wanted // len(raw) + 1))[:wanted]


def write(case, path, extra):
    """The file: a header of JSON, norms of ones, the matrices' bytes, and the tokenizer's tensors."""
    matrices, ones = random_bytes(case), np.ones(case["hidden"], np.float32).tobytes()
    header = {"__metadata__": {**metadata(case), **extra}}
    size = {"F32": 4, "F16": 2, "F8_E5M2": 1, "I32": 4, "U8": 1}
    for name, (dtype, shape) in tensors_of(case).items():
        begin = 0 if dtype == "F32" else len(ones)
        header[name] = entry(dtype, shape, begin, begin + size[dtype] * int(np.prod(shape)))
    words = b"".join(b"a\0" if i == WORD else b"<%d>\0" % i for i in range(case["vocab"]))
    at = len(ones) + len(matrices)
    header["tokenizer.tokens"] = entry("U8", (len(words),), at, at + len(words))
    padding = -(at + len(words)) % 4
    at += len(words) + padding
    header["tokenizer.scores"] = entry("F32", (case["vocab"],), at, at + 4 * case["vocab"])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)  # so that the bytes behind lie at a multiple of 64
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + ones)
        file.write(matrices)
        file.write(words + bytes(padding + 4 * case["vocab"]))


def metadata(case):
    sizes = {"dim": "hidden", "hidden_dim": "ffn", "head_dim": "head_dim", "n_layers": "n_layers"}
    sizes |= {"n_heads": "n_heads", "n_kv_heads": "n_kv_heads", "vocab_size": "vocab", "rotary_dim": "head_dim"}
    found = {name: str(case[key]) for name, key in sizes.items()} | {"max_seq_len": "4096", "dtype": case["dtype"]}
    arch = {"arch": "mistral", "norm_eps": "1e-5", "norm_type": "rmsnorm", "act_type": "silu", "rope_theta": "1000000"}
    return found | arch


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def main(case):
    program = os.path.join(os.environ["CALM"], "build", "run")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "random.calm")
        write(case, path, {"bos_token_id": "-2", "eos_token_id": "-3"})  # none that could end a text
        say(ready={"name": f"calm, {case['dtype']}"})
        sys.stdin.readline()
        first = max(0, case["length"] - TOKENS)
        command = [program, path, "-t", "0", "-n", str(TOKENS), "-r", "5", "-i", "a"]
        command += ["-c", "4096"] if case["length"] > 2048 else []
        environment = os.environ | {"CALM_POSO": str(first)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    rates = [float(found) for found in re.findall(r"throughput: ([\d.]+) tok/s", done.stderr)]
    if not rates:
        raise SystemExit(f"calm said nothing of its speed: {done.stderr[-300:]!r}")
    say(seconds=[1 / rate for rate in rates])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
