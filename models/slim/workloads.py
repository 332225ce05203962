"""Twelve workloads, each by its name: python workloads.py gemv. It prints a hash of what it computed, always the same.

Nothing of the course is imported: they run in whatever environment has torch, and in copies of it. `unseen` is one
more, which is in no trace: what happens when a copy is asked for what was cut?
"""

import hashlib
import sys

import torch
import torch.nn.functional as F

DEVICE = "cuda"


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def whole(*shape):
    """Small whole numbers: their sums are exact in any order."""
    return torch.randint(-9, 10, shape, device=DEVICE).float()


def gemv():
    return [torch.mv(randn(4096, 4096), randn(4096))]


def matmul():
    return [
        F.linear(randn(512, 4096), randn(14336, 4096)),
        randn(256, 256, dtype=torch.float32) @ torch.eye(256).cuda(),
    ]


def attention():
    q, k, v = (randn(2, 16, 1024, 64) for _ in range(3))
    return [F.scaled_dot_product_attention(q, k, v, is_causal=True)]


def llama_block():
    x, (hidden, ffn, heads) = randn(1, 256, 2048), (2048, 5632, 16)
    wq, wk, wv, wo = (randn(hidden, hidden) / 45 for _ in range(4))
    w1, w3, w2 = randn(ffn, hidden) / 45, randn(ffn, hidden) / 45, randn(hidden, ffn) / 75
    angles = torch.outer(torch.arange(256.0), 1e4 ** (-torch.arange(0, 128, 2) / 128)).to(DEVICE)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def norm(y):
        return F.rms_norm(y, (hidden,))

    def turned(y):
        a, b = y.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    for _ in range(2):
        q, k, v = (F.linear(norm(x), w).view(1, 256, heads, 128).transpose(1, 2) for w in (wq, wk, wv))
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(1, 256, hidden), wo)
        x = x + F.linear(F.silu(F.linear(norm(x), w1)) * F.linear(norm(x), w3), w2)
    return [x, F.softmax(x.float(), -1).argmax(-1)]


def convolution():
    torch.backends.cudnn.deterministic = True
    x = F.relu(F.conv2d(randn(4, 3, 128, 128, dtype=torch.float32), randn(32, 3, 3, 3, dtype=torch.float32), padding=1))
    x = F.batch_norm(x, torch.zeros(32).cuda(), torch.ones(32).cuda(), training=True)
    return [F.max_pool2d(F.conv2d(x, randn(64, 32, 3, 3, dtype=torch.float32), stride=2), 2)]


def fft():
    return [torch.view_as_real(torch.fft.rfft2(randn(8, 512, 512, dtype=torch.float32)))]


def sort():
    x = whole(64, 5000)
    values, order = torch.sort(x, stable=True)
    return [values, order, torch.topk(x, 50).values, torch.cumsum(x, -1)]


def solve():
    a = randn(200, 200, dtype=torch.float64)
    a = a @ a.T + 200 * torch.eye(200, dtype=torch.float64, device=DEVICE)
    return [torch.linalg.solve(a, a[:, :3]).round(decimals=6), torch.linalg.cholesky(a).round(decimals=6)]


def sparse():
    dense = whole(1000, 1000)
    dense[dense < 8] = 0
    return [dense.to_sparse_csr() @ whole(1000, 64)]


def random():
    return [torch.rand(100_000, device=DEVICE), torch.randperm(5000, device=DEVICE),
            torch.multinomial(torch.rand(100, device=DEVICE), 1000, replacement=True)]  # fmt: skip


def training_step():
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.LayerNorm(2048),
                                torch.nn.Linear(2048, 100)).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = randn(256, 512, dtype=torch.float32), torch.randint(100, (256,), device=DEVICE)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [loss.detach(), *(p.detach() for p in model.parameters())]


def lstm():
    layer = torch.nn.LSTM(128, 256, 2, batch_first=True).to(DEVICE)
    with torch.no_grad():
        return [layer(randn(16, 40, 128, dtype=torch.float32))[0]]


def unseen():
    x = randn(1000, dtype=torch.float64)
    return [torch.unique(x.round()), torch.cdist(x[:50, None], x[:50, None]), x.cumprod(0), x.histc(20)]


WORKLOADS = {
    f.__name__: f
    for f in (gemv, matmul, attention, llama_block, convolution, fft, sort, solve, sparse, random, training_step, lstm)
}


def main(name):
    torch.manual_seed(0)
    torch.zeros(1, device=DEVICE)
    print("ready", flush=True)
    with torch.no_grad() if name != "training_step" else torch.enable_grad():
        tensors = (WORKLOADS | {"unseen": unseen})[name]()
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.float().cpu().numpy().tobytes())
    print(name, digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
