"""gpt-fast (github.com/pytorch-labs/gpt-fast): its model and its way to compile one token, with its own settings.

GPT_FAST=<its checkout> python with_gpt_fast.py '{"hidden": 4096, …, "bits": 16, "length": 128}'
"""

import contextlib
import json
import os
import sys
import types

import torch
from turns import take_turn_on

sys.path.insert(0, os.environ["GPT_FAST"])
sys.modules["tokenizer"] = types.ModuleType("tokenizer")  # it wants packages for text, and there is none here
sys.modules["tokenizer"].get_tokenizer = None

import generate  # noqa: E402 - gpt-fast's; it sets torch.compile's options
import model as gpt_fast  # noqa: E402
import quantize  # noqa: E402


def model_of(case):
    sizes = {"n_layer": case["n_layers"], "n_head": case["n_heads"], "n_local_heads": case["n_kv_heads"]}
    sizes |= {"dim": case["hidden"], "intermediate_size": case["ffn"], "vocab_size": case["vocab"]}
    with torch.device("meta"):
        model = gpt_fast.Transformer(gpt_fast.ModelArgs(block_size=8192, **sizes))
        if case["bits"] == 8:
            model = quantize.WeightOnlyInt8QuantHandler(model).convert_for_runtime()
        elif case["bits"] == 4:
            model = quantize.WeightOnlyInt4QuantHandler(model, groupsize=128).convert_for_runtime()
    model = model.to_empty(device=case["device"])
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.bfloat16).normal_(0, tensor.shape[-1] ** -0.5)
        else:
            top = torch.iinfo(tensor.dtype)
            tensor.data.random_(top.min, top.max)
    return model.eval().requires_grad_(False)


def mathematical():
    """As decode_n_tokens asks for: Inductor makes the attention."""
    if hasattr(torch.nn, "attention"):
        return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    return contextlib.nullcontext()


@torch.no_grad()
def main(case):
    device, length = case["device"], case["length"]
    model, capacity = model_of(case), length + 200  # as its command makes it, for so many new tokens
    with torch.device(device):
        model.setup_caches(max_batch_size=1, max_seq_length=capacity)
    decode = generate.decode_one_token
    if case["compile"]:
        decode = torch.compile(decode, mode="reduce-overhead", fullgraph=True)
    position = torch.tensor([length], device=device, dtype=torch.int)
    state = {"token": torch.randint(0, case["vocab"], (1, 1), device=device, dtype=torch.int), "done": 0}

    def token():
        if state["done"] == 190:
            position.fill_(length)
            state["done"] = 0
        with mathematical():
            found, chance = decode(model, state["token"], position, temperature=0.8, top_k=200)
        state["token"] = found.clone().view(1, 1)
        chance.clone()
        position.add_(1)
        state["done"] += 1

    numbers = {16: "bf16", 8: "int8", 4: "int4, groups of 128"}[case["bits"]]
    take_turn_on(device, f"gpt-fast, {numbers}", token, case["seconds"])


if __name__ == "__main__":
    main({"compile": True, "seconds": 1.5, "device": "cuda", "bits": 16} | json.loads(sys.argv[1]))
