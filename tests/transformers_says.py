"""What transformers computes, in a process of its own: python transformers_says.py OUT FOLDER… TOKENS

The course's `kernels` is imported first: transformers looks for a package of that name, which is another project's,
and must get by with this one. OUT.npz gets, for each folder by its name, logits in float32 and the greedy continuation
by 64 tokens.
"""

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import kernels.gemv  # noqa: F401


def main(out, *rest):
    *folders, tokens = rest
    tokens, found = torch.tensor([json.loads(tokens)]), {}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        name = folder.rstrip("/").split("/")[-1]
        with torch.no_grad():
            found[name + ".logits"] = model(tokens).logits[0].numpy()
            written = model.generate(tokens, max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=-1)
            found[name + ".greedy"] = written[0, tokens.shape[1] :].numpy()
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
