"""transformers: a static cache and a compiled step, as its documentation of generation has it; or, with "compile":
false, as it comes, with a cache that grows. Greedy.

python with_transformers.py '{"hidden": 4096, …, "dtype": "float16", "length": 128, "device": "cuda"}'
"""

import inspect
import json
import sys

import torch
import transformers
from turns import take_turn_on


def model_of(case):
    sizes = {
        "hidden_size": case["hidden"], "intermediate_size": case["ffn"], "num_hidden_layers": case["n_layers"],
        "num_attention_heads": case["n_heads"], "num_key_value_heads": case["n_kv_heads"],
        "head_dim": case["head_dim"], "vocab_size": case["vocab"], "rms_norm_eps": case["eps"],
        "tie_word_embeddings": case["tied"], "max_position_embeddings": 8192,
    }  # fmt: skip
    if case["tied"]:
        config, kind = transformers.LlamaConfig(**sizes), transformers.LlamaForCausalLM
    else:
        config, kind = transformers.MistralConfig(**sizes, sliding_window=None), transformers.MistralForCausalLM
    config._attn_implementation = "sdpa"
    dtype, device = getattr(torch, case["dtype"]), case["device"]
    with torch.device("meta"):
        model = kind(config)
    model = model.to(dtype).to_empty(device=device).eval()
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    with torch.device(device):  # its buffers are not stored
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.requires_grad_(False)


def main(case):
    model, length, device = model_of(case), case["length"], case["device"]
    capacity = length + 1024
    if case["compile"]:
        cache, way = transformers.StaticCache(config=model.config, max_cache_len=capacity), "static cache, compiled"
    else:
        cache, way = transformers.DynamicCache(config=model.config), "eager"
    told = "cache_position" in inspect.signature(model.forward).parameters
    position = torch.zeros(1, dtype=torch.int64, device=device)

    def step(token, position):
        where = {"cache_position": position} if told else {"position_ids": position[None]}
        logits = model(token, past_key_values=cache, use_cache=True, return_dict=False, **where)[0]
        return logits[:, -1:].argmax(-1)

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True) if case["compile"] else step
    with torch.inference_mode():
        ids = torch.randint(0, case["vocab"], (1, length), device=device)
        where = {"cache_position": torch.arange(length, device=device)} if told else {}
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **where)
        state = {"token": ids[:, -1:].clone(), "done": 0}
        position.fill_(length)

        def token():
            if state["done"] == capacity - length - 8:
                rewind(cache, length)
                position.fill_(length)
                state["done"] = 0
            state["token"] = compiled(state["token"], position).clone()
            position.add_(1)
            state["done"] += 1

        take_turn_on(device, f"transformers {transformers.__version__}, {way}", token, case["seconds"])


def rewind(cache, length):
    """Forget the tokens behind the first so many: newer versions count them in the cache."""
    if isinstance(cache, transformers.DynamicCache):
        cache.crop(length)
    for layer in getattr(cache, "layers", ()):
        if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
            layer.cumulative_length.fill_(length)


if __name__ == "__main__":
    main({"compile": True, "seconds": 1.5, "device": "cuda"} | json.loads(sys.argv[1]))
