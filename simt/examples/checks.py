"""What the examples compute, by NumPy in float64, and the sizes on which they are tried."""

import math

import numpy as np

from simt.examples.launching import blocks, close, same, unset

CHECKS = {}  # name: (function, instances of its templates)


def check(*instances):
    """Enter a function as the check of the file of its name."""

    def entered(function):
        CHECKS[function.__name__] = function, instances
        return function

    return entered


# Element by element


@check()
def saxpy(launch):
    for n in 1, 255, 256, 1000:
        x, y = launch.floats(n), launch.floats(n)
        for kernel, grid in ("saxpy", blocks(n, 256)), ("saxpy_grid_stride", 2):
            got = y.copy()
            launch(kernel, grid, 256, n, 2.5, x, got)
            close(kernel, got, 2.5 * x.astype(float) + y)


@check()
def gelu(launch):
    erf = np.vectorize(math.erf)
    for n in 1, 3, 1030:
        x = 4 * launch.floats(n)
        x[0] = -100
        wide = x.astype(float)
        y = unset(n)
        launch("gelu_erf", blocks(n, 128), 128, x, y, n)
        close("gelu_erf", y, 0.5 * wide * (1 + erf(wide / math.sqrt(2))))
        y = unset(n)
        launch("gelu_tanh", blocks(n, 512), 128, x, y, n)
        close("gelu_tanh", y, tanh_gelu(wide))
    x, y = launch.floats(66).astype(np.float16), unset(66, dtype=np.float16)
    launch("gelu_half2", 1, 64, x, y, 33)
    close("gelu_half2", y, tanh_gelu(x.astype(float)), 1e-3)


def tanh_gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@check()
def grey(launch):
    for width, height in (1, 1), (33, 17):
        rgb, out = launch.random.integers(0, 256, (height, width, 3), np.uint8), unset(height, width, dtype=np.uint8)
        launch("grey", (blocks(width, 16), blocks(height, 16)), (16, 16), rgb, out, width, height)
        assert np.abs(out - rgb @ np.array([0.21, 0.72, 0.07])).max() < 1.001  # a byte, rounded down
        rgba, out = launch.random.integers(0, 256, (height * width, 4), np.uint8), unset(height * width, dtype=np.uint8)
        launch("grey_rgba", blocks(height * width, 64), 64, rgba, out, height * width)
        same("grey_rgba", out, (rgba[:, :3] @ np.array([77, 150, 29])) >> 8)


@check()
def mandelbrot(launch):
    width, height, most = 37, 21, 60
    steps = unset(height, width, dtype=np.int32)
    corner = [np.float64(v) for v in (-2.1, 1.2, 0.08)]
    launch("mandelbrot", (blocks(width, 8), blocks(height, 8)), (8, 8), steps, width, height, *corner, most)
    wanted = np.zeros((height, width), int)
    for y in range(height):
        for x in range(width):
            z, c, n = 0j, complex(-2.1 + x * 0.08, 1.2 - y * 0.08), 0
            while n < most and abs(z) <= 2:
                z, n = z * z + c, n + 1
            wanted[y, x] = n
    apart = np.abs(steps - wanted)  # at the edge, one rounding decides on a step
    assert apart.max() <= 1 and (apart > 0).mean() < 0.01, f"mandelbrot: {(apart > 0).sum()} points differ"


# Sums


@check()
def dot(launch):
    for n in 1, 257, 5000:
        a, b, got = launch.floats(n), launch.floats(n), np.zeros(1, np.float32)
        launch("dot", min(blocks(n, 256), 8), 256, a, b, got, n)
        close("dot", got, [a.astype(float) @ b])
    a, b, got = launch.floats(404), launch.floats(404), np.zeros(1, np.float32)
    launch("dot_warp", 2, 64, a, b, got, 101)
    close("dot_warp", got, [a.astype(float) @ b])


@check("unrolled<64>", "unrolled<512>", "with_cub<32>", "with_cub<128>")
def reduction(launch):
    for n in 1, 127, 1001:
        x = launch.floats(n)
        for kernel in "interleaved_divergent", "interleaved_conflicts", "sequential", "shuffle", "groups":
            out = unset(blocks(n, 256 if kernel == "sequential" else 128))
            dynamic = 512 if kernel in ("interleaved_divergent", "interleaved_conflicts", "sequential") else 0
            launch(kernel, len(out), 128, x, out, n, shared=dynamic)
            close(kernel, [out.sum(dtype=float)], [x.sum(dtype=float)])
        for kernel, threads in (
            ("unrolled<64>", 64),
            ("unrolled<512>", 512),
            ("with_cub<32>", 32),
            ("with_cub<128>", 128),
        ):
            out = unset(2)
            launch(kernel, 2, threads, x, out, n)
            close(kernel, [out.sum(dtype=float)], [x.sum(dtype=float)])


@check()
def scan_hillis_steele(launch):
    for n, threads in (1, 32), (33, 64), (500, 512), (1024, 1024):
        x = launch.ints(-99, 100, n)
        for kernel in "hillis_steele", "hillis_steele_in_place", "warp_scan":
            y = unset(n, dtype=np.int32)
            launch(kernel, 1, threads, x, y, n, shared=8 * threads if kernel == "hillis_steele" else 0)
            same(kernel, y, np.cumsum(x))


@check()
def scan_blelloch(launch):
    for n in 1, 256, 257, 5000:
        x, count = launch.ints(-99, 100, n), blocks(n, 256)
        y, sums, total = unset(n, dtype=np.int32), unset(count, dtype=np.int32), np.zeros(1, np.int32)
        before = unset(count, dtype=np.int32)
        launch("scan_blocks", count, 128, x, y, sums, n)
        launch("scan_blocks", 1, 128, sums, before, total, count)
        launch("add_sums", count, 128, y, before, n)
        same("scan_blelloch", y, np.cumsum(x) - x)
        same("scan_blelloch", total, [x.sum()])


@check()
def histogram(launch):
    for n, top in (1, 256), (3000, 256), (3000, 2):
        data = launch.random.integers(0, top, n, np.uint8)
        for kernel in "histogram_global", "histogram_shared", "histogram_aggregated":
            bins = np.zeros(256, np.uint32)
            launch(kernel, 3, 128, data, bins, n)
            same(kernel, bins, np.bincount(data, minlength=256))


# Rows


@check()
def softmax(launch):
    for rows, columns in (1, 1), (5, 33), (3, 300):
        x = 10 * launch.floats(rows, columns)
        x[0, 0] = 200  # exp(200) is no float
        wanted = np.exp(x - x.max(1, keepdims=True).astype(float))
        wanted /= wanted.sum(1, keepdims=True)
        y = unset(rows, columns)
        launch("softmax_naive", 1, 32, x, y, rows, columns)
        close("softmax_naive", y, wanted)
        y = unset(rows, columns)
        launch("softmax_block", rows, 64, x, y, columns, shared=256)
        close("softmax_block", y, wanted)
        y = unset(rows, columns)
        launch("softmax_online", blocks(rows, 2), 64, x, y, rows, columns)
        close("softmax_online", y, wanted)


@check("layer_norm_block<128>")
def layer_norm(launch):
    for rows, columns in (1, 1), (5, 37), (3, 300):
        x, weight, bias = launch.floats(rows, columns) + 100, launch.floats(columns), launch.floats(columns)
        wide = x.astype(float)
        scale = 1 / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
        wanted = (wide - wide.mean(1, keepdims=True)) * scale * weight + bias
        y = unset(rows, columns)
        launch("layer_norm_block<128>", rows, 128, x, weight, bias, y, columns, 1e-5)
        close("layer_norm_block", y, wanted, 1e-4)
        y = unset(rows, columns)
        launch("layer_norm_welford", blocks(rows, 4), 64, x, weight, bias, y, rows, columns, 1e-5)
        close("layer_norm_welford", y, wanted, 1e-4)
        y = unset(rows, columns)
        launch("rms_norm_cub", blocks(rows, 4), 128, x, weight, y, rows, columns, 1e-5)
        close("rms_norm_cub", y, wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight)


@check()
def top_k(launch):
    for rows, columns, k in (1, 1, 1), (3, 130, 7), (2, 50, 50):
        x = launch.ints(-20, 20, rows, columns).astype(np.float32)  # many are equal: the first one wins
        x[0, -1] = -np.inf
        values, places = unset(rows, k), unset(rows, k, dtype=np.int32)
        launch("top_k", rows, 32, x, values, places, columns, k, shared=32 * 8 + columns)
        wanted = np.argsort(-x, axis=1, kind="stable")[:, :k]
        same("top_k", places, wanted)
        same("top_k", values, np.take_along_axis(x, wanted, 1))


# Order


@check()
def bitonic_sort(launch):
    for n in 2, 64, 512:
        x = launch.floats(n).round(1)
        y = x.copy()
        launch("bitonic_shared", 1, n // 2, y, n, shared=4 * n)
        same("bitonic_shared", y, np.sort(x))
        y, k = x.copy(), 2
        while k <= n:
            j = k // 2
            while j:
                launch("bitonic_step", blocks(n, 64), min(n, 64), y, j, k)
                j //= 2
            k *= 2
        same("bitonic_step", y, np.sort(x))


@check()
def radix_sort(launch):
    for n in 1, 128, 700:
        keys = launch.random.integers(0, 2**32, n, np.uint32)
        keys[n // 2] = 2**32 - 1
        now, grid = keys.copy(), blocks(n, 128)
        for shift in range(0, 32, 4):
            counts, after = unset(16 * grid, dtype=np.uint32), unset(n, dtype=np.uint32)
            launch("count_digits", grid, 128, now, counts, n, shift)
            launch("scan_counts", 1, 128, counts, 16 * grid)
            launch("scatter", grid, 128, now, after, counts, n, shift)
            digits = (now >> shift) & 15
            same("scatter", after, now[np.argsort(digits, kind="stable")])
            now = after
        same("radix_sort", now, np.sort(keys))
    for n in 1, 509, 512:
        keys, after = launch.random.integers(0, 2**32, n, np.uint32), unset(n, dtype=np.uint32)
        launch("sort_tile", 1, 128, keys, after, n)
        same("sort_tile", after, np.sort(keys))


@check()
def merge(launch):
    for m, n in (1, 1), (0, 5), (300, 77), (64, 64):
        a, b = np.sort(launch.ints(0, 60, m)), np.sort(launch.ints(0, 60, n))
        c = unset(m + n, dtype=np.int32)
        launch("merge", 2, blocks(blocks(m + n, 5), 2), a, m, b, n, c, 5)
        same("merge", c, np.sort(np.concatenate([a, b])))


@check()
def compaction(launch):
    for n in 1, 256, 1000:
        x = launch.ints(-5, 6, n)
        x[0] = 3
        wanted, grid = x[x > 0], blocks(n, 256)
        before, sums = unset(n, dtype=np.int32), unset(grid, dtype=np.int32)
        launch("flags_and_sums", grid, 256, x, before, sums, n)
        offsets, out = (np.cumsum(sums) - sums).astype(np.int32), unset(len(wanted), dtype=np.int32)
        launch("scatter_kept", grid, 256, x, before, offsets, out, n)
        same("scatter_kept", out, wanted)
        for kernel in "by_ballot", "by_coalesced_group", "by_active_mask":
            out, count = unset(len(wanted), dtype=np.int32), np.zeros(1, np.int32)
            launch(kernel, grid, 256, x, out, count, n)
            same(kernel, count, [len(wanted)])
            same(kernel, np.sort(out), np.sort(wanted))


# Neighbours


@check("transpose_tiled<0>", "transpose_tiled<1>")
def transpose(launch):
    for width, height in (1, 1), (33, 70), (64, 32):
        x, grid = launch.floats(height, width), (blocks(width, 32), blocks(height, 32))
        for kernel in "transpose_naive", "transpose_tiled<0>", "transpose_tiled<1>":
            y = unset(width, height)
            report = launch(kernel, grid, (32, 8), x, y, width, height)
            same(kernel, y, x.T)
            assert (report.bank_conflicts > 0) == (kernel == "transpose_tiled<0>" and height > 1), kernel


@check()
def convolution(launch):
    weights, square = launch.floats(7), launch.floats(7, 7)
    launch.module.set("weights", weights)
    launch.module.set("filter", square)
    for n in 1, 5, 200:
        x = launch.floats(n)
        wanted = np.lib.stride_tricks.sliding_window_view(np.pad(x.astype(float), 3), 7) @ weights
        for kernel, dynamic in ("convolution_1d", 0), ("convolution_1d_tiled", 4 * (64 + 6)):
            y = unset(n)
            launch(kernel, blocks(n, 64), 64, x, y, n, shared=dynamic)
            close(kernel, y, wanted)
    for width, height in (1, 1), (23, 31):
        x = launch.floats(height, width)
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x.astype(float), 3), (7, 7))
        wanted = np.einsum("yxij,ij->yx", windows, square)
        for kernel, tile in ("convolution_2d", 16), ("convolution_2d_tiled", 10):
            y = unset(height, width)
            launch(kernel, (blocks(width, tile), blocks(height, tile)), (16, 16), x, y, width, height)
            close(kernel, y, wanted)


@check()
def stencil(launch):
    for n in 2, 3, 13:
        x = launch.floats(n, n, n)
        wide, wanted = x.astype(float), x.astype(float)
        near = sum(np.roll(wide, step, axis) for axis in range(3) for step in (1, -1))
        inner = (slice(1, -1),) * 3
        wanted[inner] = (0.4 * wide + 0.1 * near)[inner]
        y = unset(n, n, n)
        launch("stencil_3d", (blocks(n, 4),) * 3, (4, 4, 4), x, y, n, 0.4, 0.1)
        close("stencil_3d", y, wanted)
        y = x.copy()
        launch("stencil_3d_coarsened", (blocks(n, 6),) * 2, (8, 8), x, y, n, 0.4, 0.1)
        close("stencil_3d_coarsened", y, wanted)
    a = launch.floats(14, 19)
    wanted, b = a.astype(float), unset(14, 19)
    for _ in range(6):
        near = sum(np.roll(wanted, step, axis) for axis in range(2) for step in (1, -1))
        wanted[1:-1, 1:-1] = near[1:-1, 1:-1] / 4
    launch("jacobi", 3, 64, a, b, 19, 14, 6)
    close("jacobi", a, wanted)


@check()
def life(launch):
    for width, height in (1, 3), (20, 35):
        cells = launch.random.integers(0, 2, (height, width), np.uint8)
        grid, around = (
            (blocks(width, 16), blocks(height, 16)),
            [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1) if x or y],
        )
        alive = sum(np.roll(cells, step, (0, 1)) for step in around)
        after = unset(height, width, dtype=np.uint8)
        launch("life", grid, (16, 16), cells, after, width, height)
        same("life", after, (alive == 3) | ((alive == 2) & (cells == 1)))
        padded = np.pad(cells, 1)
        alive = sum(np.roll(padded, step, (0, 1)) for step in around)[1:-1, 1:-1]
        after = unset(height, width, dtype=np.uint8)
        launch("life_tiled", grid, (16, 16), cells, after, width, height)
        same("life_tiled", after, (alive == 3) | ((alive == 2) & (cells == 1)))


@check()
def nbody(launch):
    for n in 1, 50, 130:
        bodies = np.concatenate([launch.floats(n, 3), 1 + launch.random.random((n, 1), np.float32)], 1)
        velocities, accelerations = launch.floats(n, 3), unset(n, 3)
        where = bodies[:, :3].astype(float)
        apart = where[None] - where[:, None]
        inverse = ((apart**2).sum(2) + 1e-3) ** -1.5 * bodies[:, 3]
        wanted = np.einsum("ij,ijd->id", inverse, apart)
        launch("forces", blocks(n, 32), 32, bodies, accelerations, n, shared=512)
        close("forces", accelerations, wanted)
        faster, moved = velocities + 0.01 * wanted, bodies.copy()
        launch("integrate", blocks(n, 32), 32, moved, velocities, accelerations, 0.01, n)
        close("integrate", velocities, faster)
        close("integrate", moved[:, :3], where + 0.01 * faster)


# Clusters, sparse matrices, graphs


@check()
def kmeans(launch):
    for n, k in (1, 1), (300, 5), (100, 40):
        points, centres = launch.floats(n, 3), launch.floats(k, 3)
        labels, sums, counts = unset(n, dtype=np.int32), np.zeros((k, 3), np.float32), np.zeros(k, np.int32)
        launch("assign", blocks(n, 64), 64, points, centres, labels, n, k, shared=12 * k)
        apart = ((points[:, None].astype(float) - centres) ** 2).sum(2)
        close("assign", apart[range(n), labels], apart.min(1))
        launch("add_points", blocks(n, 64), 64, points, labels, sums, counts, n, k, shared=16 * k)
        same("add_points", counts, np.bincount(labels, minlength=k))
        launch("divide", k, 3, centres_after := centres.copy(), sums, counts)
        members = [points[labels == c].astype(float) for c in range(k)]
        close("divide", centres_after, [m.mean(0) if len(m) else centre for m, centre in zip(members, centres)])


@check()
def spmv(launch):
    for rows, columns, share in (1, 1, 1.0), (70, 45, 0.2), (33, 90, 0.9):
        dense = launch.floats(rows, columns) * (launch.random.random((rows, columns)) < share)
        dense[rows // 2] = 0 if rows > 1 else dense[0]  # a row without elements
        r, c = np.nonzero(dense)
        values, x = dense[r, c].astype(np.float32), launch.floats(columns)
        wanted = dense.astype(float) @ x
        r, c = r.astype(np.int32), c.astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(np.bincount(r, minlength=rows))]).astype(np.int32)
        for kernel, threads in ("spmv_csr_scalar", rows), ("spmv_csr_vector", 32 * rows):
            y = unset(rows)
            launch(kernel, blocks(threads, 64), 64, starts, c, values, x, y, rows)
            close(kernel, y, wanted)
        width = int(np.diff(starts).max())
        ell_columns, ell = np.full((width, rows), -1, np.int32), unset(width, rows)
        place = np.arange(len(r)) - starts[r]
        ell_columns[place, r], ell[place, r] = c, values
        y = unset(rows)
        launch("spmv_ell", blocks(rows, 64), 64, ell_columns, ell, x, y, rows, width)
        close("spmv_ell", y, wanted)
        y = np.zeros(rows, np.float32)
        launch("spmv_coo", blocks(len(r), 64), 64, r, c, values, x, y, len(r))
        close("spmv_coo", y, wanted)


@check()
def bfs(launch):
    for nodes, edges in (1, 0), (100, 90), (400, 1200):
        pairs = launch.ints(0, nodes, edges, 2)
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        ends = np.append(pairs[:, 1], 0).astype(np.int32)  # one more, so that it is no empty array
        starts = np.concatenate([[0], np.cumsum(np.bincount(pairs[:, 0], minlength=nodes))]).astype(np.int32)
        wanted = np.full(nodes, -1)
        wanted[0], now = 0, [0]
        while now:
            after = {int(e) for n in now for e in ends[starts[n] : starts[n + 1]] if wanted[e] < 0}
            wanted[list(after)] = wanted[now[0]] + 1
            now = list(after)
        levels, changed = np.full(nodes, -1, np.int32), np.ones(1, np.int32)
        levels[0], level = 0, 0
        while changed[0]:
            changed[0] = 0
            given = starts, ends, levels, level, changed, nodes
            launch("bfs_level", blocks(nodes, 64), 64, *given, check_races=False)  # see the file
            level += 1
        same("bfs_level", levels, wanted)
        levels, frontier, level = np.full(nodes, -1, np.int32), np.zeros(1, np.int32), 0
        levels[0] = 0
        while len(frontier):
            after, size = unset(nodes, dtype=np.int32), np.zeros(1, np.int32)
            level += 1
            grid = blocks(len(frontier), 64)
            launch("bfs_frontier", grid, 64, starts, ends, levels, level, frontier, len(frontier), after, size)
            frontier = after[: size[0]].copy()
        same("bfs_frontier", levels, wanted)


# Matrix products


def product(launch, m, n, k, dtype=np.float32):
    """A, B, and their product in float64."""
    a, b = launch.floats(m, k).astype(dtype), launch.floats(k, n).astype(dtype)
    return a, b, a.astype(float) @ b.astype(float)


@check()
def matmul_naive(launch):
    for m, n, k in (1, 1, 1), (17, 33, 5), (40, 20, 50):
        a, b, wanted = product(launch, m, n, k)
        wide, high = blocks(n, 16), blocks(m, 16)
        for kernel, grid in ("matmul", (wide, high)), ("matmul_uncoalesced", (high, wide)):
            c = unset(m, n)
            launch(kernel, grid, (16, 16), a, b, c, m, n, k)
            close(kernel, c, wanted)
        before = launch.floats(m, n)
        c = before.copy()
        launch("sgemm", (blocks(m, 16), blocks(n, 16)), 256, m, n, k, 0.5, a, b, -2.0, c)
        close("sgemm", c, 0.5 * wanted - 2 * before.astype(float))


@check()
def matmul_tiled(launch):
    for m, n, k in (1, 1, 1), (17, 33, 5), (40, 20, 50):
        a, b, wanted = product(launch, m, n, k)
        c = unset(m, n)
        launch("matmul_tiled", (blocks(n, 16), blocks(m, 16)), (16, 16), a, b, c, m, n, k)
        close("matmul_tiled", c, wanted)
        for tile in 4, 8:
            c, dynamic = unset(m, n), 8 * tile * tile
            grid = blocks(n, tile), blocks(m, tile)
            launch("matmul_dynamic", grid, (tile, tile), a, b, c, m, n, k, tile, shared=dynamic)
            close("matmul_dynamic", c, wanted)


@check()
def matmul_registers(launch):
    for m, n, k in (1, 1, 1), (33, 50, 19):
        a, b, wanted = product(launch, m, n, k)
        c = unset(m, n)
        launch("matmul_coarsened", (blocks(n, 32), blocks(m, 32)), 256, a, b, c, m, n, k)
        close("matmul_coarsened", c, wanted)
    for m, n, k in (32, 32, 8), (64, 96, 40):
        a, b, wanted = product(launch, m, n, k)
        c = unset(m, n)
        launch("matmul_vectorised", (n // 32, m // 32), 64, a, b, c, m, n, k)
        close("matmul_vectorised", c, wanted)


@check()
def matmul_double_buffered(launch):
    for m, n, k in (16, 16, 16), (32, 48, 80):
        a, b, wanted = product(launch, m, n, k)
        for kernel in "by_registers", "by_primitives", "by_pipeline":
            c = unset(m, n)
            launch(kernel, (n // 16, m // 16), (16, 16), a, b, c, n, k)
            close(kernel, c, wanted)


@check()
def matmul_wmma(launch):
    for m, n, k in (16, 16, 16), (32, 48, 80):
        a, b, wanted = product(launch, m, n, k, np.float16)
        c = unset(m, n)
        launch("wmma_naive", (1, 2), (96, 1), a, b, c, m, n, k)
        close("wmma_naive", c, wanted)
    a, b, _ = product(launch, 64, 32, 48)
    before = launch.floats(64, 32)
    bits = [(x.view(np.uint32) + 0x8000 >> 16).astype(np.uint16) for x in (a, np.ascontiguousarray(b.T))]  # bfloat16
    a, b = ((x.astype(np.uint32) << 16).view(np.float32).astype(float) for x in bits)
    c = before.copy()
    launch("wmma_shared", (1, 2), 128, *bits, c, 32, 48, 0.5, 3.0)
    close("wmma_shared", c, 0.5 * a @ b.T + 3 * before.astype(float))


@check()
def attention(launch):
    for tokens, keys in (1, 1), (5, 19), (33, 40):
        q, k, v = launch.floats(tokens, 32), launch.floats(keys, 32), launch.floats(keys, 32)
        s, o, scale = unset(tokens, keys), unset(tokens, 32), 32**-0.5
        launch("scores", (blocks(keys, 16), blocks(tokens, 4)), (16, 4), q, k, s, tokens, keys, 32, scale)
        launch("softmax_rows", tokens, 32, s, keys)
        launch("weighted_sum", (1, blocks(tokens, 4)), (32, 4), s, v, o, tokens, keys, 32)
        close("attention", o, attended(q, k, v, False))
        for causal in False, True:
            o = unset(tokens, 32)
            launch("flash", blocks(tokens, 32), 32, q, k, v, o, tokens, keys, scale, np.bool_(causal))
            close("flash", o, attended(q, k, v, causal), 1e-4)


def attended(q, k, v, causal):
    scores = q.astype(float) @ k.astype(float).T * 32**-0.5
    if causal:
        scores[np.arange(len(k)) > np.arange(len(q))[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights @ v.astype(float) / weights.sum(1, keepdims=True)
