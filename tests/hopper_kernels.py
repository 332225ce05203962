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
