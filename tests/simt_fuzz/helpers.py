"""Small device functions that generated kernels call, as CUDA C++. A kernel gets those that it names."""

ASM1 = """__device__ __forceinline__ {0} {1}({0} a) {{
    {0} r;
    asm("{2} %0, %1;" : "=r"(r) : "r"(a));
    return r;
}}
"""
ASM2 = """__device__ __forceinline__ {0} {1}({0} a, {0} b) {{
    {0} r;
    asm("{2} %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}}
"""
ASM3 = """__device__ __forceinline__ {0} {1}({0} a, unsigned b, unsigned c) {{
    {0} r;
    asm("{2} %0, %1, %2, %3{3};" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}}
"""
CANONICAL = """__device__ __forceinline__ {0} bits({1} x) {{
    {0} r = {2};
    return (r & {3}) > {4} ? {5} : r;  // which NaN it is, is not specified
}}
"""
# name -> source of a helper; a kernel gets those that it names
HELPERS = {
    "nonzero": "__device__ __forceinline__ unsigned nonzero(unsigned x) { return x ? x : 3u; }\n",
    "quotient": """__device__ __forceinline__ int quotient(int a, int b) {
    return b == 0 || b == -1 ? a : a / b;  // INT_MIN / -1 is undefined
}
""",
    "remainder_of": """__device__ __forceinline__ int remainder_of(int a, int b) {
    return b == 0 || b == -1 ? b : a % b;
}
""",
    "to_int": """__device__ __forceinline__ int to_int(float x) {
    return (int)fminf(fmaxf(x, -2e9f), 2e9f);  // a NaN becomes -2e9
}
""",
    "bfe_u32": ASM3.format("unsigned", "bfe_u32", "bfe.u32", ""),
    "bfe_s32": ASM3.format("int", "bfe_s32", "bfe.s32", ""),
    "bfe_u64": """__device__ __forceinline__ unsigned long long bfe_u64(unsigned long long a, unsigned b, unsigned c) {
    unsigned long long r;
    asm("bfe.u64 %0, %1, %2, %3;" : "=l"(r) : "l"(a), "r"(b), "r"(c));
    return r;
}
""",
    "bfi_b32": """__device__ __forceinline__ unsigned bfi_b32(unsigned a, unsigned b, unsigned c, unsigned d) {
    unsigned r;
    asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "r"(d));
    return r;
}
""",
    "bfind_u32": ASM1.format("unsigned", "bfind_u32", "bfind.u32"),
    "majority": ASM3.format("unsigned", "majority", "lop3.b32", ", 0xe8"),
    "lop3_2d": ASM3.format("unsigned", "lop3_2d", "lop3.b32", ", 0x2d"),
    "prmt_f4e": ASM3.format("unsigned", "prmt_f4e", "prmt.b32.f4e", ""),
    "prmt_rc8": ASM3.format("unsigned", "prmt_rc8", "prmt.b32.rc8", ""),
    "prmt_ecl": ASM3.format("unsigned", "prmt_ecl", "prmt.b32.ecl", ""),
    "add_sat": ASM2.format("int", "add_sat", "add.sat.s32"),
    "sub_sat": ASM2.format("int", "sub_sat", "sub.sat.s32"),
    "mad_hi": ASM3.format("int", "mad_hi", "mad.hi.s32", ""),
    "mad_wide": """\
__device__ __forceinline__ unsigned long long mad_wide(unsigned a, unsigned b, unsigned long long c) {
    unsigned long long r;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(r) : "r"(a), "r"(b), "l"(c));
    return r;
}
""",
    "saturate_u8": """__device__ __forceinline__ unsigned saturate_u8(int a) {
    unsigned r;
    asm("cvt.sat.u8.s32 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}
""",
    "saturate_s16": """__device__ __forceinline__ int saturate_s16(int a) {
    short r;
    asm("cvt.sat.s16.s32 %0, %1;" : "=h"(r) : "r"(a));
    return r;
}
""",
    "pair_sum": "__device__ __forceinline__ unsigned pair_sum(uint2 v) { return v.x + 3u * v.y; }\n",
    "quad_sum": "__device__ __forceinline__ unsigned quad_sum(uint4 v) { return (v.x ^ v.y) + (v.z ^ v.w); }\n",
    "bytes_sum": "__device__ __forceinline__ unsigned bytes_sum(uchar4 v) { return v.x + 2u * v.y + v.z * v.w; }\n",
    "shorts_sum": "__device__ __forceinline__ int shorts_sum(short2 v) { return v.x - v.y; }\n",
    "wides_sum": """__device__ __forceinline__ unsigned long long wides_sum(ulonglong2 v) { return v.x ^ 5u * v.y; }
""",
    "doubles_sum": "__device__ __forceinline__ double doubles_sum(double2 v) { return v.x - v.y; }\n",
    "floats_sum": "__device__ __forceinline__ float floats_sum(float2 v) { return v.x + v.y; }\n",
    "float4_sum": "__device__ __forceinline__ float float4_sum(float4 v) { return (v.x + v.y) + (v.z + v.w); }\n",
    "fold": """template <int N, typename T>
__device__ __forceinline__ T fold(T a, T b) {
#pragma unroll
    for (int k = 0; k < N; k++) a = k % 2 ? a + b : a ^ (b << k);
    return a;
}
""",
    "order": """template <typename T>
__device__ __forceinline__ void order(T &a, T &b) {
    if (b < a) {
        T t = a;
        a = b;
        b = t;
    }
}
""",
    "collatz": """__device__ __forceinline__ unsigned collatz(unsigned x, unsigned limit) {
    for (unsigned k = 0; k < limit; k++) {
        if (x <= 1u) return k;
        x = x & 1u ? 3u * x + 1u : x >> 1;
    }
    return x;
}
""",
    "gcd": """__device__ __forceinline__ unsigned gcd(unsigned a, unsigned b) {
    while (b) {
        unsigned t = a % b;
        a = b;
        b = t;
    }
    return a;
}
""",
    "horner": """template <int N>
__device__ __forceinline__ float horner(float x, const float (&c)[N]) {
    float y = c[N - 1];
#pragma unroll
    for (int k = N - 2; k >= 0; k--) y = fmaf(y, x, c[k]);
    return y;
}
""",
}
BITS = {
    "f": CANONICAL.format("unsigned", "float", "__float_as_uint(x)", "0x7fffffffu", "0x7f800000u", "0x7fc00000u"),
    "d": CANONICAL.format(
        "unsigned long long",
        "double",
        "(unsigned long long)__double_as_longlong(x)",
        "0x7fffffffffffffffull",
        "0x7ff0000000000000ull",
        "0x7ff8000000000000ull",
    ),
    "h": CANONICAL.format("unsigned", "__half", "__half_as_ushort(x)", "0x7fffu", "0x7c00u", "0x7e00u"),
    "p": """__device__ __forceinline__ unsigned bits(__half2 x) {
    return bits(__low2half(x)) | bits(__high2half(x)) << 16;
}
""",
    "b": CANONICAL.format("unsigned", "__nv_bfloat16", "__bfloat16_as_ushort(x)", "0x7fffu", "0x7f80u", "0x7fc0u"),
}
