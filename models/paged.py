"""Several texts on a card, in pages of one pool: a step of all of them reads each weight once.

The steps are those of ref.llm, for a row of x for each text. Products: kernels.matmul.linear in 16 bits, and
kernels.lowbit.gemv in fewer; keys, values and attention: kernels.paged. What lies between is PyTorch's, as for prompts.
Tables, lengths and tokens lie on the card, so that one CUDA graph is replayed for every step, whoever is there.

A row's numbers do not depend on the other rows, bit for bit: there are always as many rows, some of nobody, and
attention is asked to be invariant.
"""

import copy

import torch
import torch.nn.functional as F

from kernels import lowbit, matmul
from kernels.lowbit.fused import HALF_TILE, Paired
from kernels.paged import PagedCache, code_pages, decode
from kernels.rotary import rope_frequencies
from models.config import BadModel
from models.gpu import prompt
from models.positions import rotate
from models.prefill import norm
from models.several import expect_ours

PAGE = 16  # tokens
SPARE = 0.9  # of a card's free memory, at most, becomes pages


class Pages:
    """Places for so many texts (models/several.py) on an engine of models/gpu.py.

    tokens  of each text, at most: the pool has room for the longest of them, as many as are there at a time, or as
            many as the card has memory for
    """

    def __init__(self, engine, most, tokens):
        c = engine.config
        if c.head_dim % 16:
            raise BadModel(f"generate_several: head_dim must be a multiple of 16, got {c.head_dim}")
        self.engine, self.most, self.text = engine, most, engine.text
        longest = sorted((-(-n // PAGE) for n in tokens), reverse=True)[:most]
        n_pages = max(1, min(sum(longest), self._memory() // (PAGE * self._token_bytes())))
        if longest and longest[0] > n_pages:
            raise BadModel(f"generate_several: a text needs {longest[0]} pages of {PAGE} tokens, room is for {n_pages}")
        make = lambda dtype, *shape: torch.zeros(shape, dtype=dtype, device=engine.device)  # noqa: E731
        self.cache = PagedCache(
            n_pages, PAGE, c.n_kv_heads, c.head_dim, dtype=engine.dtype, device=engine.device, bits=engine.kv_bits,
            max_requests=most, max_len=PAGE * max([1, *longest]),
        )  # fmt: skip
        self.layers = [self._layer(index) for index in range(c.n_layers)]
        self.promised, self.free = {}, n_pages  # pages that each text may yet come to have
        self.slots, self.tokens = make(torch.int32, most).fill_(-1), make(torch.int64, most)
        self.frequencies = torch.from_numpy(rope_frequencies(c.head_dim, c.theta, c.scaling)).to(engine.device)
        self.logits, self.graph = None, None

    def _token_bytes(self):
        c, bits = self.engine.config, self.engine.kv_bits
        if bits != 16:
            return c.n_layers * c.n_kv_heads * code_pages.token_bytes(c.head_dim, bits)
        return 2 * self.engine.dtype.itemsize * c.n_layers * c.kv_rows

    def _memory(self):
        if self.engine.device.type != "cuda":
            return 1 << 40
        return int(SPARE * torch.cuda.mem_get_info(self.engine.device)[0])

    def _layer(self, index):
        """The cache as a layer sees it: pages of its own, and the tables of all."""
        if index == 0:
            return self.cache
        layer = copy.copy(self.cache)
        for name in ("k_pages", "v_pages", *(["scales"] if self.engine.kv_bits != 16 else [])):
            setattr(layer, name, torch.zeros_like(getattr(self.cache, name)))
        return layer

    def fits(self, tokens):
        return -(-tokens // PAGE) <= self.free

    @torch.inference_mode()
    def enter(self, ids, tokens):
        expect_ours(self.engine, self.text)
        request = self.cache.new()
        self.promised[request] = -(-tokens // PAGE)
        self.free -= self.promised[request]
        ids = torch.tensor(ids, device=self.engine.device)
        logits = prompt(self.engine.config, self.engine.weights, ids, _Prompt(self, request), self.engine.dtype)
        return request, logits[0]

    @torch.inference_mode()
    def step(self, texts):
        expect_ours(self.engine, self.text)
        requests = [request for request, _ in texts]
        self.cache.reserve(requests, 1)
        nobody = self.most - len(texts)
        slots = [request.slot for request in requests] + nobody * [-1]
        self._send(self.slots, slots)
        self._send(self.tokens, [token for _, token in texts] + nobody * [0])
        self._replay()
        return self.logits[: len(texts)].float()

    def leave(self, request):
        self.cache.free(request)
        self.free += self.promised.pop(request)

    def _send(self, there, numbers):
        here = torch.tensor(numbers, dtype=there.dtype)
        there.copy_(here.pin_memory() if there.is_cuda else here, non_blocking=True)

    def _replay(self):
        """The step as one CUDA graph; on the SIMT machine, launch by launch."""
        if self.engine.device.type != "cuda":
            self.logits = self.launch()
            return
        with torch.cuda.device(self.engine.device):
            if self.graph is None:
                self.engine._compiled()  # what is compiled ahead uses the same scratch memory
                self.launch()  # compiles; writes what the replay writes again
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, stream=torch.cuda.Stream(self.engine.device)):
                    self.logits = self.launch()
            self.graph.replay()

    def launch(self):
        """Steps 1 to 9 of ref.llm, for a token of each text: from self.tokens, self.slots and the tables to logits
        (most, vocab)."""
        c, weights, eps = self.engine.config, self.engine.weights, self.engine.config.eps
        heads = c.n_heads + c.n_kv_heads
        positions = (self.cache.lens[self.slots.clamp(min=0).long()] - 1).clamp(min=0)
        angles = positions.double()[:, None] * self.frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        x = weights.embedding[self.tokens]  # 1
        for cache, layer in zip(self.layers, weights.layers):
            qkv = product(norm(x, layer.attention_norm, eps), layer.Wqkv)  # 2
            if layer.bqkv is not None:
                qkv = qkv + layer.bqkv
            qkv = qkv.view(self.most, -1, c.head_dim)
            qk, v = qkv[:, :heads], qkv[:, heads:]
            if layer.q_norm is not None:  # 3
                parts = zip(qk.split((c.n_heads, c.n_kv_heads), dim=1), (layer.q_norm, layer.k_norm))
                qk = torch.cat([norm(part, weight, eps) for part, weight in parts], dim=1)
            q, k = rotate(qk, cos, sin).to(x.dtype).split((c.n_heads, c.n_kv_heads), dim=1)  # 4
            cache.write(self.slots, k[:, None].contiguous(), v[:, None].contiguous())
            mixed = decode(q.contiguous(), cache, self.slots, invariant=True)  # 5
            x = x + product(mixed.view(self.most, -1), layer.Wo)  # 6
            gate, up = gate_and_up(norm(x, layer.ffn_norm, eps), layer.W_glu)  # 7
            x = x + product(F.silu(gate) * up, layer.W_down)  # 8
        return product(norm(x, weights.norm, eps), weights.head)  # 9


class _Prompt:
    """A request as models.prefill wants a cache."""

    def __init__(self, pages, request):
        self.pages, self.request, self.length = pages, request, 0

    def append(self, index, k, v):
        cache, n = self.pages.layers[index], len(k)
        if index == 0:  # tables and lengths are of all layers
            cache.reserve([self.request], n)
        k, v = (new.to(cache.dtype).contiguous() for new in (k, v))
        cache.write(cache.slots([self.request]), k[None], v[None])
        if not self.length and cache.bits == 16:
            return k, v
        table = cache.table[self.request.slot, : -(-(self.length + n) // PAGE)].long()
        if cache.bits != 16:  # a prompt sees its keys and values as later tokens will
            return tuple(t.to(cache.dtype) for t in code_pages.dequantized(cache, table, self.length + n))
        pages = (cache.k_pages[table], cache.v_pages[table])  # (pages, n_kv_heads, PAGE, head_dim)
        return tuple(t.transpose(1, 2).flatten(0, 1)[: self.length + n] for t in pages)

    def advance(self, n):
        self.length += n


def product(x, W):
    """x Wᵀ for a row of x for each text, W in 16 bits or fewer."""
    return lowbit.gemv(W, x) if isinstance(W, lowbit.QuantizedWeight) else matmul.linear(x, W)


def gate_and_up(x, W):
    """(x W_gateᵀ, x W_upᵀ), W of both: one above the other, or in pairs."""
    if isinstance(W, Paired):
        return (part.flatten(1) for part in lowbit.gemv(W.weight, x).unflatten(1, (-1, 2, HALF_TILE)).unbind(2))
    return product(x, W).chunk(2, dim=1)
