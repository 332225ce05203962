"""How long it takes from the command `python -m models.generate` to its first token, of a checkpoint in the page cache.

The command runs in a process of its own, as a user's does, on a folder of random weights in memory (/dev/shm).
"""

import functools
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kernels.llm import shapes
from lab.table import Table
from lab.timing import Timing

SHARD = 2 << 30  # bytes of a file of a checkpoint
CHILD = """
import sys, time
begin = float(sys.argv.pop(1))
import models.generate as generate
said = {"imports": time.time() - begin}
load = generate.load
def timed_load(*arguments, **options):
    before = time.time()
    model = load(*arguments, **options)
    said["weights on the card"] = time.time() - before
    return model
generate.load = timed_load
class Out:
    def write(self, text):
        said.setdefault("to the prompt's echo", time.time() - begin)
    def flush(self):
        pass
class Clock(generate.Clock):
    def __iter__(self):
        for item in super().__iter__():
            said.setdefault("to the first token", time.time() - begin)
            yield item
generate.Clock, generate.report = Clock, lambda *arguments: ""
quiet, sys.stdout = sys.stdout, Out()
status = generate.main(sys.argv[1:])
sys.stdout = quiet
import json
print("said: " + json.dumps(said | {"status": status}))
"""


def start(runs=3, shape=shapes.MISTRAL_7B):
    """`python -m models.generate FOLDER` in a process of its own, from its start to the first token: seconds."""
    room = Path("/dev/shm")
    home = room if room.is_dir() and shutil.disk_usage(room).free > 20e9 else Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(dir=home) as folder:
        begin = time.perf_counter()
        write_checkpoint(Path(folder), shape)
        written = time.perf_counter() - begin
        found = [_first_token(folder) for _ in range(runs)]
    parts = list(dict.fromkeys(part for one in found for part in one))
    rows = {
        part: dict(zip(("s", "least", "most"), _spread([one[part] for one in found if part in one]))) for part in parts
    }
    print(f"a checkpoint of {shape.name} was written to {home} in {written:.1f} s", flush=True)
    names = "generate", "gpu", "gpu_weights", "prefill", "upload", "weights"
    sources = ("kernels/llm/starting.py", *(f"models/{name}.py" for name in names))
    return Table(f"From the command to the first token: {shape.name}, fp16, in the page cache", rows, sources)


def _spread(values):
    found = Timing.of(values)
    return found.median, min(values), max(values)


def _first_token(folder):
    command = [sys.executable, "-c", CHILD, str(time.time()), folder, "--prompt", "a b c d", "--max-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    line = next((line for line in done.stdout.splitlines() if line.startswith("said: ")), None)
    if line is None:
        raise RuntimeError(f"models.generate ended without a word: {done.stderr[-500:]}")
    said = json.loads(line.removeprefix("said: "))
    if said.pop("status"):
        raise RuntimeError(f"models.generate failed: {done.stderr[-500:]}")
    return said


def write_checkpoint(folder, shape):
    """config.json, tokenizer.json and random weights as Hugging Face lays them out, in files of about 2 GB, which
    several threads write. The files' numbers are the same: loading takes no less for that."""
    config = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": shape.hidden,
        "num_hidden_layers": shape.n_layers, "num_attention_heads": shape.n_heads, "head_dim": shape.head_dim,
        "num_key_value_heads": shape.n_kv_heads, "intermediate_size": shape.ffn, "vocab_size": shape.vocab,
        "rms_norm_eps": shape.eps, "rope_theta": shape.theta, "max_position_embeddings": 32768,
        "sliding_window": None, "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1,
        "eos_token_id": 2, "torch_dtype": "float16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *"abcdefgh"])}
    words |= {f"<{i}>": i for i in range(len(words), shape.vocab)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shards, size = [{}], 0
    for name, dims in _tensors(shape):
        if size and size + 2 * math.prod(dims) > SHARD:
            shards.append({})
            size = 0
        shards[-1][name], size = dims, size + 2 * math.prod(dims)
    numbers = np.random.default_rng(0).standard_normal(SHARD // 64, np.float32).astype(np.float16) * np.float16(0.015)
    files = [f"model-{i:05}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(functools.partial(_write_shard, folder, numbers), files, shards))
    index = {name: file for file, shard in zip(files, shards) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _tensors(shape):
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for i in range(shape.n_layers):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", (shape.hidden,)
        yield at + "self_attn.q_proj.weight", (shape.q_rows, shape.hidden)
        yield at + "self_attn.k_proj.weight", (shape.kv_rows, shape.hidden)
        yield at + "self_attn.v_proj.weight", (shape.kv_rows, shape.hidden)
        yield at + "self_attn.o_proj.weight", (shape.hidden, shape.q_rows)
        yield at + "post_attention_layernorm.weight", (shape.hidden,)
        yield at + "mlp.gate_proj.weight", (shape.ffn, shape.hidden)
        yield at + "mlp.up_proj.weight", (shape.ffn, shape.hidden)
        yield at + "mlp.down_proj.weight", (shape.hidden, shape.ffn)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocab, shape.hidden)


def _write_shard(folder, numbers, file, shard):
    """A safetensors file: the length of its header, the header, the numbers over and over."""
    header, at = {}, 0
    for name, dims in shard.items():
        end = at + 2 * math.prod(dims)
        header[name] = {"dtype": "F16", "shape": dims, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    piece = memoryview(numbers).cast("B")
    with open(folder / file, "wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, at, len(piece)):
            opened.write(piece[: at - begin])
