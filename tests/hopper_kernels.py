"""Pieces of CUDA C++ for the tests of Hopper's instructions: inline PTX, and the pipelined matmul."""

PRELUDE = r"""
struct alignas(64) CUtensorMap { unsigned long long opaque[16]; };
typedef unsigned long long u64;
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void init(u64* bar, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at(bar)), "r"(count) : "memory");
}
__device__ void arrive(u64* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(bar)) : "memory");
}
__device__ void expect(u64* bar, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(bar)), "r"(bytes) : "memory");
}
__device__ bool complete(u64* bar, unsigned parity) {
  unsigned done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(at(bar)), "r"(parity) : "memory");
  return done;
}
__device__ void wait(u64* bar, unsigned parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
               :: "r"(at(bar)), "r"(parity) : "memory");
}
__device__ bool elected() {
  unsigned yes;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }" : "=r"(yes));
  return yes;
}
__device__ void load2(void* to, const CUtensorMap* map, int column, int row, u64* bar) {
  asm volatile(
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
    :: "r"(at(to)), "l"(map), "r"(column), "r"(row), "r"(at(bar)) : "memory");
}
__device__ void store2(const CUtensorMap* map, int column, int row, void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
               :: "l"(map), "r"(column), "r"(row), "r"(at(from)) : "memory");
}
__device__ void load_line(void* to, const void* from, unsigned bytes, u64* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(at(to)), "l"(from), "r"(bytes), "r"(at(bar)) : "memory");
}
__device__ void store_line(void* to, void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(to), "r"(at(from)), "r"(bytes) : "memory");
}
__device__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// swizzle: 0 none, 1 of 128 bytes, 2 of 64, 3 of 32
__device__ u64 descriptor(unsigned start, unsigned leading, unsigned stride, u64 swizzle) {
  return (start & 0x3FFFF) >> 4 | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | swizzle << 62;
}
"""


def wgmma(n, d="f32", kind="f16", registers=False, signs=(1, 1), trans=(0, 0)):
    """A device function: void wgmma(D, A, descriptor of B, accumulate). D: float or unsigned d[]; A: a descriptor, or
    unsigned a[4]."""
    count = n // (2 if d == "f32" else 4)
    k = 8 if kind == "tf32" else 16
    letter, type_ = ("f", "float") if d == "f32" else ("r", "unsigned")
    first = 4 if registers else 1
    outputs = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    names = ", ".join(f"%{i}" for i in range(count))
    a = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if registers else f"%{count}"
    given = ", ".join(f'"r"(a[{i}])' for i in range(4)) if registers else '"l"(a)'
    flags = [*signs] + ([] if kind == "tf32" else [trans[1]] if registers else [*trans])
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, %{count + first + 1}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{kind}.{kind} {{{names}}}, {a}, %{count + first}, p, "
        f"{', '.join(map(str, flags))}; }}"
    )
    parameter = "unsigned (&a)[4]" if registers else "u64 a"
    return (
        f"__device__ void wgmma({type_} (&d)[{count}], {parameter}, u64 b, int accumulate) {{\n"
        f'  asm volatile("{text}" : {outputs} : {given}, "l"(b), "r"(accumulate));\n}}\n'
    )


# C = A B^T, A (m, k) and B (n, k) in f16, C in float. Blocks of 128 x 128, steps of 64 in k, three stages: one warp
# brings the tiles, two warpgroups multiply, 64 rows of C each.
GEMM = (
    PRELUDE
    + wgmma(128)
    + r"""
constexpr int TILE = 128, STEP = 64, STAGES = 3, HALF = TILE * STEP * 2;  // HALF: bytes of a tile of A, and of B
extern "C" __global__ void __launch_bounds__(288) gemm(const __grid_constant__ CUtensorMap a,
    const __grid_constant__ CUtensorMap b, float* c, int n, int k) {
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ u64 full[STAGES], empty[STAGES];
  int steps = k / STEP, warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) init(&full[s], 1), init(&empty[s], 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warpgroup == 2) {
    if (elected()) for (int i = 0; i < steps; i++) {
      int s = i % STAGES;
      wait(&empty[s], i / STAGES % 2 ^ 1);
      expect(&full[s], 2 * HALF);
      load2(tiles + s * 2 * HALF, &a, i * STEP, blockIdx.y * TILE, &full[s]);
      load2(tiles + s * 2 * HALF + HALF, &b, i * STEP, blockIdx.x * TILE, &full[s]);
    }
    return;
  }
  float d[64];
  for (int i = 0; i < steps; i++) {
    int s = i % STAGES;
    wait(&full[s], i / STAGES % 2);
    unsigned tile = at(tiles) + s * 2 * HALF;
    wgmma_fence();
    #pragma unroll
    for (int j = 0; j < STEP; j += 16)
      wgmma(d, descriptor(tile + warpgroup * 64 * STEP * 2 + j * 2, 0, 1024, 1),
            descriptor(tile + HALF + j * 2, 0, 1024, 1), i + j > 0);
    wgmma_commit();
    wgmma_wait();
    if (threadIdx.x % 32 == 0) arrive(&empty[s]);  // each warp: it knows of its own wgmma only
  }
  long long row = blockIdx.y * TILE + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  int column = blockIdx.x * TILE + threadIdx.x % 4 * 2;
  #pragma unroll
  for (int i = 0; i < 64; i += 4) {
    *(float2*)(c + row * n + column + 2 * i) = make_float2(d[i], d[i + 1]);
    *(float2*)(c + (row + 8) * n + column + 2 * i) = make_float2(d[i + 2], d[i + 3]);
  }
}
"""
)

# Causal attention of one head, 64 wide: O = softmax(Q K^T / 8, in powers of 2) V. One warpgroup has 64 rows; a fifth
# warp brings K and V in two stages. P stays in registers; O goes out through Q's place in shared memory.
ATTENTION = (
    PRELUDE
    + "#include <cuda_fp16.h>\n"
    + wgmma(64).replace("void wgmma(", "void scores(")
    + wgmma(64, registers=True, trans=(0, 1))
    + r"""
constexpr int TILE = 64 * 64 * 2;  // bytes
extern "C" __global__ void __launch_bounds__(160) attention(const __grid_constant__ CUtensorMap q,
    const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,
    const __grid_constant__ CUtensorMap o) {
  extern __shared__ __align__(1024) unsigned char s[];
  __shared__ u64 full[2], empty[2], ready;
  int tiles = blockIdx.x + 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) init(&full[i], 1), init(&empty[i], 4);
    init(&ready, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    if (elected()) {
      expect(&ready, TILE);
      load2(s, &q, 0, blockIdx.x * 64, &ready);
      for (int t = 0; t < tiles; t++) {
        unsigned char* place = s + TILE + t % 2 * 2 * TILE;
        wait(&empty[t % 2], t / 2 % 2 ^ 1);
        expect(&full[t % 2], 2 * TILE);
        load2(place, &k, 0, t * 64, &full[t % 2]);
        load2(place + TILE, &v, 0, t * 64, &full[t % 2]);
      }
    }
    return;
  }
  float out[32], total[2] = {0, 0};
  for (int i = 0; i < 32; i++) out[i] = 0;
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  wait(&ready, 0);
  for (int t = 0; t < tiles; t++) {
    wait(&full[t % 2], t / 2 % 2);
    unsigned place = at(s) + TILE + t % 2 * 2 * TILE;
    float d[32];
    wgmma_fence();
    #pragma unroll
    for (int j = 0; j < 64; j += 16)
      scores(d, descriptor(at(s) + j * 2, 0, 1024, 1), descriptor(place + j * 2, 0, 1024, 1), j > 0);
    wgmma_commit();
    wgmma_wait();
    unsigned p[16];
    #pragma unroll
    for (int i = 0; i < 32; i += 2) {
      int r = blockIdx.x * 64 + row + 8 * (i / 2 % 2), c = t * 64 + 8 * (i / 4) + lane % 4 * 2;
      __half2 pair = __floats2half2_rn(c <= r ? exp2f(d[i] / 8) : 0, c < r ? exp2f(d[i + 1] / 8) : 0);
      p[i / 2] = *(unsigned*)&pair;
      total[i / 2 % 2] += __low2float(pair) + __high2float(pair);
    }
    wgmma_fence();
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      unsigned a[4] = {p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]};
      wgmma(out, a, descriptor(place + TILE + j * 16 * 128, 0, 1024, 1), 1);
    }
    wgmma_commit();
    wgmma_wait();
    if (lane == 0) arrive(&empty[t % 2]);
  }
  for (int i = 0; i < 2; i++)
    for (int m = 1; m < 4; m *= 2) total[i] += __shfl_xor_sync(~0u, total[i], m);
  asm volatile("bar.sync 1, 128;" ::: "memory");  // all four warps have read Q
  #pragma unroll
  for (int i = 0; i < 32; i += 2) {
    int byte = (row + 8 * (i / 2 % 2)) * 128 + (8 * (i / 4) + lane % 4 * 2) * 2;
    float by = 1 / total[i / 2 % 2];
    *(__half2*)(s + (byte ^ (byte >> 3 & 0x70))) = __floats2half2_rn(out[i] * by, out[i + 1] * by);
  }
  proxy_fence();
  asm volatile("bar.sync 2, 128;" ::: "memory");
  if (threadIdx.x == 0) {
    store2(&o, 0, blockIdx.x * 64, s);
    commit_stores();
    wait_stores_read();
  }
}
"""
)
