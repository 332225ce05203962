"""What a whole language model needs on a card beside products and attention: a launch each.

    embed         the residual stream's beginning: a row of the embedding
    rope_append   biases, norms of heads, rotary positions, and the new token's place in the cache, of 16, 8 or 4 bits
    greedy        the likeliest token becomes the next one, and the length counts it
    attend        the same for a cache of 16 bits, and the whole of attention with it

Token and length lie on the card, so that a CUDA graph of a whole step can be replayed while they change. CUDA tensors
run on their card, CPU tensors on the SIMT machine. pdl= as in kernels/fusion: embed and rope_append wait before they
read anything; attend reads the length and the cache of earlier tokens at once.

torch.compile takes them as operators: torch.ops.matmul_to_mamba.llm_embed, llm_rope_append, llm_rope_append_quantized,
llm_greedy, llm_attend.

TypeError or ValueError names the argument, what was expected and what came, before anything is written. What lies on
the card is not looked at: a token outside of the table gives NaN, a length outside of the cache writes nothing.
"""

from kernels.llm.attending import attends
from kernels.llm.operators import attend, embed, greedy, rope_append

__all__ = ["attend", "attends", "embed", "greedy", "rope_append"]
