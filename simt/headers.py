"""What NVRTC leaves out and nvcc brings: headers of C and C++, names that need no header there; words for the rest.

Not to be mixed up with CUDA's own headers, which come from NVIDIA's wheels (simt/nvrtc.py).
"""

import re

# int64_t is spelled as in cuda/std/cstdint, so that both may be included.
STDINT = """\
#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t; typedef int64_t intptr_t; typedef uint64_t uintptr_t;
#ifndef INT32_MAX
#define INT8_MIN (-128)
#define INT8_MAX 127
#define UINT8_MAX 255
#define INT16_MIN (-32768)
#define INT16_MAX 32767
#define UINT16_MAX 65535
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define UINT32_MAX 4294967295U
#define INT64_MIN (-9223372036854775807LL - 1)
#define INT64_MAX 9223372036854775807LL
#define UINT64_MAX 18446744073709551615ULL
#endif
"""
MATH = """\
#pragma once
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
#ifndef M_PI
#define M_E 2.7182818284590452354
#define M_LOG2E 1.4426950408889634074
#define M_LOG10E 0.43429448190325182765
#define M_LN2 0.69314718055994530942
#define M_LN10 2.30258509299404568402
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_PI_4 0.78539816339744830962
#define M_1_PI 0.31830988618379067154
#define M_2_PI 0.63661977236758134308
#define M_2_SQRTPI 1.12837916709551257390
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#endif
"""
FUNCTIONS = """abs fabs sqrt cbrt hypot exp exp2 expm1 log log2 log10 log1p pow sin cos tan asin acos atan atan2 sinh
cosh tanh asinh acosh atanh erf erfc tgamma lgamma floor ceil round trunc rint nearbyint lround llround fmod remainder
fma fmin fmax fdim copysign frexp ldexp modf isnan isinf isfinite signbit"""
INTEGERS = "int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t intptr_t uintptr_t"


def in_std(names):
    """C++'s forms of C's headers have the names in namespace std as well."""
    return "namespace std { " + " ".join(f"using ::{name};" for name in names.split()) + " }\n"


FLOAT = """\
#pragma once
#ifndef FLT_MAX
#define FLT_MAX 3.402823466e+38F
#define FLT_MIN 1.175494351e-38F
#define FLT_EPSILON 1.192092896e-07F
#define DBL_MAX 1.7976931348623157e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-016
#endif
"""
LIMITS = """\
#pragma once
#ifndef INT_MAX
#define CHAR_BIT 8
#define CHAR_MAX 127
#define CHAR_MIN (-128)
#define UCHAR_MAX 255
#define SHRT_MAX 32767
#define SHRT_MIN (-32768)
#define USHRT_MAX 65535
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295U
#define LONG_MAX 9223372036854775807L
#define LONG_MIN (-9223372036854775807L - 1)
#define ULONG_MAX 18446744073709551615UL
#define LLONG_MAX 9223372036854775807LL
#define LLONG_MIN (-9223372036854775807LL - 1)
#define ULLONG_MAX 18446744073709551615ULL
#endif
"""
BUILT_IN = "#pragma once\n"  # size_t, printf, assert, memcpy, clock and the like are known to NVRTC without a header
STDDEF = "#pragma once\ntypedef decltype((char*)0 - (char*)0) ptrdiff_t;\n"
TYPES = "#pragma once\ntypedef unsigned int uint; typedef unsigned short ushort; typedef unsigned long ulong;\n"
KNOWN = "assert.h cassert ctime cstdio cstdlib cstring stdbool.h stdio.h stdlib.h string.h time.h".split()
# C++'s own, as far as libcu++ has them in namespace cuda::std.
CPLUSPLUS = "algorithm array bit complex functional initializer_list limits numeric optional tuple type_traits utility"
# <cub/cub.cuh>, which CUB refuses here as it brings what is called from the host: what a kernel calls of it, and three
# operators by the names that they had for ten years.
CUB = {
    "block": "adjacent_difference discontinuity exchange histogram load merge_sort radix_rank radix_sort reduce "
    "run_length_decode scan shuffle store",
    "warp": "exchange load merge_sort reduce scan store",
    "thread": "load operators reduce scan search store",
}
OPERATORS = """\
#include <cub/util_ptx.cuh>
#include <cuda/functional>
namespace cub { using Sum = ::cuda::std::plus<>; using Max = ::cuda::maximum<>; using Min = ::cuda::minimum<>; }
"""
INCLUDES = [f"#include <cub/{level}/{level}_{part}.cuh>" for level, parts in CUB.items() for part in parts.split()]

HEADERS = {
    **dict.fromkeys(("stdint.h", "inttypes.h"), STDINT),
    **dict.fromkeys(("cstdint", "cinttypes"), STDINT + in_std(INTEGERS)),
    "math.h": MATH,
    "cmath": MATH + in_std(FUNCTIONS),
    **dict.fromkeys(("float.h", "cfloat"), FLOAT),
    **dict.fromkeys(("limits.h", "climits"), LIMITS),
    "stddef.h": STDDEF,
    "cstddef": STDDEF + in_std("size_t ptrdiff_t"),
    "sys/types.h": TYPES,
    "cub/cub.cuh": "\n".join(["#pragma once", *INCLUDES, OPERATORS]),
    **dict.fromkeys(KNOWN, BUILT_IN),
    **{
        name: f"#pragma once\n#include <cuda/std/{name}>\nnamespace std {{ using namespace cuda::std; }}\n"
        for name in CPLUSPLUS.split()
    },
}

# Names that nvcc knows in a source that includes nothing.
WITHOUT_HEADER = {
    r"INFINITY|NAN|M_[A-Z0-9_]+": "math.h",
    r"(?:U?(?:CHAR|SHRT|INT|LONG|LLONG)_M(?:AX|IN))|CHAR_BIT": "limits.h",
    r"(?:FLT|DBL)_(?:MAX|MIN|EPSILON)": "float.h",
    r"u?int(?:8|16|32|64|ptr)_t|U?INT(?:8|16|32|64)_M(?:AX|IN)": "stdint.h",
    r"ptrdiff_t": "stddef.h",
    r"uint|ushort|ulong": "sys/types.h",
}
UNDEFINED = re.compile(r'error: identifier "(\w+)" is undefined')


def nvcc_includes(log):
    """The headers of names that NVRTC did not know and nvcc does, for another attempt."""
    names = set(UNDEFINED.findall(log))
    return sorted({header for names_, header in WITHOUT_HEADER.items() if any(re.fullmatch(names_, n) for n in names)})


HALF = r'identifier "(?:half2?|__half\w*|__\w*2half\w*|__h(?:add|sub|mul|fma|div|max|min|neg|eq|gt|lt)\w*|hexp|hsqrt)"'
HOST_CODE = (
    r"<<<|\bkernel launch\b|\bmain\s*\(|\bstd::(?:cout|cerr|vector|string|chrono|thread|mt19937|unique_ptr)|"
    r"\bcuda(?:Malloc|Free|Mem|Device|Stream|Event|Get|Set|Launch)\w*|\bcu[A-Z]\w+\s*\(|"
    r'open(?: source)? file "(?:[a-z_]+|std\w+\.h|unistd\.h|(?:cuda_runtime_api|cuda_profiler_api|nvToolsExt)\.h|'
    r'(?:helper_|cublas|cusparse|cudnn|cufft)\w*\.h|(?:opencv|Eigen|torch|ATen|c10)[\w/]*/\S+)"|\bcub::Device\w+'
)
HOST_HINT = (
    "this is compiled as device code only. Host code (main, <<<...>>>, cudaMalloc, #include <iostream>) "
    "belongs between #ifndef __CUDACC_RTC__ and #endif, or out of the file: the launch is done from Python."
)
HINTS = {  # what an error says, or its line of the source -> what to do
    HOST_CODE: HOST_HINT,
    r"not supported on \.target 'sm_90'": 'instructions of Hopper alone (wgmma, setmaxnreg) need arch="sm_90a"',
    HALF: "half is declared by #include <cuda_fp16.h>",
    r'identifier "(?:__)?nv_bfloat\w+"|identifier "__\w*bfloat16\w*"': "bfloat16 is declared by #include <cuda_bf16.h>",
    r'identifier "__nv_fp8\w*"': "fp8 is declared by #include <cuda_fp8.h>",
    r'identifier "CUDART_\w+"': "CUDART_INF_F and the like are declared by #include <math_constants.h>",
    r"(?:namespace|using|::)[^\n]*\bnvcuda\b|\bnvcuda::|\bwmma::": "nvcuda::wmma is declared by #include <mma.h>",
    r"\bcooperative_groups\b|\bcg::": "cooperative groups are declared by #include <cooperative_groups.h>",
    r"\bcuda::std::": "what stands in cuda::std is declared by a header of its name: #include <cuda/std/limits>",
    r"\bcuda::(?:barrier|(?:make_)?pipeline|atomic|atomic_ref|memcpy_async)\b": (
        "cuda::barrier is declared by #include <cuda/barrier>, and so on for cuda::pipeline and cuda::atomic"
    ),
    r'namespace "std" has no member': (
        "of namespace std there is what <cmath>, <limits>, <algorithm>, <utility> and the like declare, once they are "
        "included; CUDA's own max(a, b), min(a, b), sqrtf(x) need no header"
    ),
    r"no operator [^\n]* matches[^\n]*\n[^\n]*operand types are:[^\n]*\b(?:float|double|u?int|half)[234]\b": (
        "CUDA has no arithmetic on float2, float4 and the like: write it for .x, .y, .z and .w"
    ),
    r'identifier "__(?:shfl|shfl_up|shfl_down|shfl_xor|ballot|any|all)"|without \'\.sync\' is not supported': (
        "lanes that work together are named since 2017: __shfl_down_sync(0xffffffff, value, 16), "
        "__ballot_sync(0xffffffff, condition)"
    ),
    r"\btexture is not a template|\bidentifier \"(?:tex[123]D\w*|cudaTextureObject_t|surf[123]D\w*)\"": (
        "there are no textures: pass the array, and work out the index"
    ),
    r'file "curand\w*\.h"|identifier "curand\w*"': (
        "cuRAND is not here: pass random numbers made by NumPy, or write the generator as a __device__ function"
    ),
    r'file "thrust/|\bthrust/|\bthrust::': "Thrust is called from host code; kernels call cub::BlockReduce and its kin",
    r'namespace "cub" has no member "(?:Sum|Max|Min)"': (
        "CUB has no operators of its own any more: cuda::std::plus<>, cuda::maximum<>, cuda::minimum<> of "
        "<cuda/functional>; or include <cub/cub.cuh>, where they are known here"
    ),
    r"must be a class or namespace name\n[^\n]*\bcub::(?!Device)": (
        "CUB's primitives are declared by <cub/block/block_reduce.cuh> and so on, or by <cub/cub.cuh>"
    ),
    r'identifier "uchar"': "CUDA C++ spells it unsigned char",
    r"128-bit integer type": 'pass the option "--device-int128"',
}


def hints(errors):
    """What may help against these errors, as lines."""
    return [f"hint: {hint}" for sign, hint in HINTS.items() if any(re.search(sign, error) for error in errors)]
