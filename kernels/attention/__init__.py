"""Attention for decoding: one new token looks back at all that its sequence has said.

    mix_naive, mix_split, mix_shared   chapter 07: shares are given, values are mixed
    two_pass, online, split, ...       chapter 08: one signature, from scores in memory to tokens split over the card
    decode                             the best rung: 16 bit, tensor cores, programmatic dependent launch

    q (batch, n_heads, head_dim), k and v (batch, kv_len, n_kv_heads, head_dim) -> (batch, n_heads, head_dim)

    decode(q, k, v, scale=None, *, kv_lens=None, out=None, pdl=False)

All tensors of a call lie contiguously on one device: CUDA tensors run on their card, CPU tensors on the SIMT machine.
Query head h reads kv head h // (n_heads // n_kv_heads). Sums are fp32, rounded once at the end. Offsets are 64 bits.
Gradients are not tracked. TypeError or ValueError names the argument, what was expected and what came; nothing has been
written by then. torch.compile takes each as an operator, torch.ops.matmul_to_mamba.attention_decode and so on.
"""

from kernels.attention.operators import (
    decode,
    mix_naive,
    mix_shared,
    mix_split,
    online,
    split,
    split_triton,
    two_pass,
)

__all__ = ["decode", "mix_naive", "mix_shared", "mix_split", "online", "split", "split_triton", "two_pass"]
