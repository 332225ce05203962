"""transformers on whole prompts: its forward on so many tokens at once, logits of the last, with a cache to go on from.

python with_transformers_prompts.py '{"hidden": 4096, …, "dtype": "float16", "lengths": [512], "compile": false}'
"""

import functools
import json
import sys

import torch
import transformers
from turns import say, timed
from with_transformers import model_of


def main(case):
    model, device = model_of(case), case["device"]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def forward(ids):
        cache = transformers.DynamicCache(config=model.config)
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, return_dict=False)[0]

    run = torch.compile(forward, dynamic=False) if case["compile"] else forward
    with torch.inference_mode():
        prompts = {n: torch.randint(0, case["vocab"], (1, n), device=device) for n in case["lengths"]}
        for ids in prompts.values():
            run(ids)
        wait()
        say(ready={"name": f"transformers {transformers.__version__}{', compiled' * case['compile']}"})
        sys.stdin.readline()
        calls = {n: functools.partial(run, ids) for n, ids in prompts.items()}
        say(seconds={n: timed(call, seconds=case["seconds"], wait=wait) for n, call in calls.items()})


if __name__ == "__main__":
    main({"compile": False, "seconds": 1.0, "device": "cuda"} | json.loads(sys.argv[1]))
