"""Latent attention (MLA): decode where all heads look at one cache of 512 + 64 numbers a token.

    decode(q, cache, *, kv_lens=None, scale, out=None, pdl=False)    the best rung that the card has
    split, last, in_place(...)                                       rungs by name, the same signature

    q       (batch, n_heads, 576): 512 for the latent vector, into which each head's up-projection of keys has been
            absorbed (ref/latent_attention.py), then 64 for the rotated part
    cache   (batch, kv_len, 576), or LatentPages(pages, table): pages (n_pages, 64, 576), table int32 (batch, max_pages)
    result  (batch, n_heads, 512): weighted latent vectors, from which the up-projection of values makes heads

A token's 576 numbers are its key, for all heads, and the first 512 of them its value, too. So 128 heads do 242 flops
for each byte: reading is not what limits, as for other decode attention, but the tensor cores. n_heads: 1 to 128;
float16 or bfloat16; sequences of any lengths, which the card reads: a captured graph follows them when it is replayed.
CUDA tensors run on their card, of compute capability 8.0 or later, CPU tensors on the SIMT machine. Gradients are not
tracked. TypeError or ValueError names the argument, what was expected and what came; nothing has been written by then.
torch.compile takes decode as an operator, torch.ops.matmul_to_mamba.latent_decode.
"""

from kernels.latent.arguments import LatentPages
from kernels.latent.decoding import counters
from kernels.latent.operators import decode, in_place, last, split

__all__ = ["LatentPages", "counters", "decode", "in_place", "last", "split"]
