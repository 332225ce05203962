"""Wrong answers to the exercises of chapter 19. Each says the mistake that it makes.

WRONG maps an exercise's number to its wrong answers, and each of them to a pair: the answer, and words that
the check's verdict must hold. RIGHT has the answers that they were made from.
"""

from wrong.warp_gemv import changed

# Exercise 1: tokens a second


def _tokens(
    fixed_too=False, alone_too=False, once=False, all_cards=False, last_whole=False, no_last=False, bytes_once=False
):
    def tokens_per_second(cards, layers, kernels, last, read, exchanges, way, message, link):
        each = sum((fixed / cards if fixed_too else fixed) + 1e6 * size / cards / read for size, fixed in kernels)
        sent = cards if all_cards else 1 if bytes_once else cards - 1
        moved = exchanges * (way + 1e6 * sent * message / link) if cards > 1 or alone_too else 0
        end = 0 if no_last else last[1] + 1e6 * last[0] / (1 if last_whole else cards) / read
        return 1e6 / (layers * each + (1 if once else layers) * moved + end)

    return tokens_per_second


def _slowest(per_layer=False, negative=False, of_two=False, zero=False):
    def slowest_exchange(cards, speedup, layers, kernels, last, read, exchanges):
        def free(cards):
            each = sum(fixed + 1e6 * size / cards / read for size, fixed in kernels)
            return layers * each + last[1] + 1e6 * last[0] / cards / read

        left = free(1) / speedup - free(2 if of_two else cards)
        if left < 0 and not negative:
            return 0 if zero else None
        return left / (layers * (1 if per_layer else exchanges))

    return slowest_exchange


# Exercise 2: two devices

PUSH = r"""
extern "C" __global__ void
push(float *x, const float *box, float *their_box, const unsigned *flag, unsigned *their_flag,
     unsigned *number, int n) {
    const unsigned now = *number + 1;
    const int turn = now % 2 * n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) their_box[turn + i] = x[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        *(volatile unsigned *)their_flag = now;
        while ((int)(*(volatile unsigned *)flag - now) < 0) {
        }
        __threadfence_system();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] += box[turn + i];
    if (threadIdx.x == 0) *number = now;
}
"""
BEHIND = "        }\n        __threadfence_system();"
TELL = "*(volatile unsigned *)their_flag = now;"
LOOK = "while ((int)(*(volatile unsigned *)flag - now) < 0) {"


def _push(*changes):
    return changed(PUSH, *changes)


# Exercise 3: meetings

MEETINGS = r"""
__device__ void meet(const unsigned *flag, unsigned *their_flag, unsigned number) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        *(volatile unsigned *)their_flag = number;
        while ((int)(*(volatile unsigned *)flag - number) < 0) {
        }
        __threadfence_system();
    }
    __syncthreads();
}
extern "C" __global__ void
pulled(float *x, float *box, const float *their_box, const unsigned *flag, unsigned *their_flag,
       unsigned *number, int n) {
    const unsigned now = *number + 1;
    const int turn = now % 2 * n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) box[turn + i] = x[i];
    meet(flag, their_flag, now);
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] += their_box[turn + i];
    if (threadIdx.x == 0) *number = now;
}
extern "C" __global__ void
halves(float *x, float *their_x, const unsigned *flag, unsigned *their_flag, unsigned *number, int rank,
       int n) {
    const unsigned now = *number + 1;
    meet(flag, their_flag, 2 * now - 1);
    for (int i = rank * n / 2 + threadIdx.x; i < (rank + 1) * n / 2; i += blockDim.x)
        x[i] = their_x[i] = x[i] + their_x[i];
    meet(flag, their_flag, 2 * now);
    if (threadIdx.x == 0) *number = now;
}
"""
FIRST, LAST = "    meet(flag, their_flag, 2 * now - 1);\n", "    meet(flag, their_flag, 2 * now);\n"


def _meetings(*changes):
    return changed(MEETINGS, *changes)


# Exercise 4: words that are their own flag

SENT = r"""
__device__ void send(float4 *to, float4 v) {
    asm volatile("st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ float4 look(const float4 *at) {
    float4 v;
    asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
    return v;
}
__device__ bool has_come(float v) { return __float_as_uint(v) != 0x80000000; }
__device__ float sendable(float v) { return has_come(v) ? v : 0.0f; }
extern "C" __global__ void
sent(float4 *x, float4 *box, float4 *their_box, const unsigned *number, int words) {
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= words) return;
    const int at = *number % 2 * words + k;
    const float4 v = x[k];
    send(their_box + at, make_float4(sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w)));
    float4 a;
    do {
        a = look(box + at);
    } while (!has_come(a.x) || !has_come(a.y) || !has_come(a.z) || !has_come(a.w));
    send(box + at, make_float4(-0.0f, -0.0f, -0.0f, -0.0f));
    x[k] = make_float4(v.x + a.x, v.y + a.y, v.z + a.z, v.w + a.w);
}
"""
WAIT = "!has_come(a.x) || !has_come(a.y) || !has_come(a.z) || !has_come(a.w)"
BACK = "    send(box + at, make_float4(-0.0f, -0.0f, -0.0f, -0.0f));\n"


def _sent(*changes):
    return changed(SENT, *changes)


# Exercise 5: sites

SITES = r"""
using u64 = unsigned long long;
__device__ void send(u64 *to, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}
__device__ u64 look(const u64 *at) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}
extern "C" __global__ void
add_sums(float *x, const unsigned *token, const u64 *box, u64 *their_box, int site, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const unsigned now = *token;
    const float own = x[i];
    send(their_box + site * n + i, (u64)now << 32 | __float_as_uint(own));
    u64 word;
    do word = look(box + site * n + i);
    while ((unsigned)(word >> 32) != now);
    x[i] = own + __uint_as_float((unsigned)word);
}
"""
SEND = "    send(their_box + site * n + i, (u64)now << 32 | __float_as_uint(own));\n"
TAKE = "    u64 word;\n    do word = look(box + site * n + i);\n    while ((unsigned)(word >> 32) != now);\n"
ONE_WAITS = (
    "    if (threadIdx.x == 0)\n        while ((unsigned)(look(box + site * n + i) >> 32) != now) {\n        }\n"
    "    __syncthreads();\n    u64 word = look(box + site * n + i);\n"
)
TWO_STORES = (
    "    ((volatile float *)(their_box + site * n + i))[0] = own;\n"
    "    ((volatile unsigned *)(their_box + site * n + i))[1] = now;\n"
)


def _sites(*changes):
    return changed(SITES, *changes)


TOKENS_RIGHT, SLOWEST_RIGHT = _tokens(), _slowest()
RIGHT = {1: (TOKENS_RIGHT, SLOWEST_RIGHT), 2: PUSH, 3: MEETINGS, 4: SENT, 5: SITES}
WRONG = {
    1: {
        "fixed times are divided, too": ((_tokens(fixed_too=True), SLOWEST_RIGHT), "expected"),
        "one card exchanges": ((_tokens(alone_too=True), SLOWEST_RIGHT), "tokens_per_second(1, "),
        "exchanges once a token": ((_tokens(once=True), SLOWEST_RIGHT), "tokens_per_second(2, "),
        "a copy for itself": ((_tokens(all_cards=True), SLOWEST_RIGHT), "tokens_per_second(2, "),
        "one copy however many cards": ((_tokens(bytes_once=True), SLOWEST_RIGHT), "tokens_per_second(4, "),
        "the last one is not divided": ((_tokens(last_whole=True), SLOWEST_RIGHT), "tokens_per_second(2, "),
        "the last one is forgotten": ((_tokens(no_last=True), SLOWEST_RIGHT), "tokens_per_second(1, "),
        "µs for all exchanges of a layer": ((TOKENS_RIGHT, _slowest(per_layer=True)), "slowest_exchange(2, "),
        "less than no time": ((TOKENS_RIGHT, _slowest(negative=True)), "expected None"),
        "0 where there is none": ((TOKENS_RIGHT, _slowest(zero=True)), "expected None"),
        "two cards always": ((TOKENS_RIGHT, _slowest(of_two=True)), "slowest_exchange(4, "),
    },
    2: {
        "fences of one card": (PUSH.replace("_system", ""), "between devices it takes __threadfence_system()"),
        "the reader's fence is of one card": (
            _push((BEHIND, BEHIND.replace("_system", ""))), "with a wide enough scope (__threadfence_system()",
        ),
        "no fence of the reader": (_push((BEHIND, "        }")), "there is no acquire"),
        "no fence of the writer": (
            _push(("        __threadfence_system();\n        *", "        *")), "no release covers it",
        ),
        "no barrier in front": (_push(("    __syncthreads();\n    if", "    if")), "a barrier before that fence"),
        "the barrier behind the fence": (
            _push(
                ("    __syncthreads();\n    if (threadIdx.x == 0) {\n        __threadfence_system();\n",
                 "    __threadfence_system();\n    __syncthreads();\n    if (threadIdx.x == 0) {\n"),
            ),
            "no release covers it",
        ),
        "no barrier behind the wait": (
            _push(("    }\n    __syncthreads();\n    for", "    }\n    for")), "race on box",
        ),
        "a flag that must be equal": (
            _push((LOOK, LOOK.replace("(int)(", "(").replace("- now) < 0", "!= now)"))), "waits on and on for a 1",
        ),
        "an atomic of one card": (_push((TELL, "atomicExch(their_flag, now);")), "atomicAdd_system"),
        "looking over the link": (
            _push(
                (TELL, "*(volatile unsigned *)(flag) = now;"),
                (LOOK, "while ((int)(*(volatile unsigned *)their_flag - now) < 0) {"),
            ),
            "and loads",
        ),
        "flags by all threads": (
            _push(
                ("    if (threadIdx.x == 0) {\n        __thr", "    {\n        __thr"),
                (TELL, "*(volatile unsigned *)their_flag = now;"),
            ),
            "writes",
        ),
    },
    3: {
        "the last one gone, one box": (
            _meetings((" = now % 2 * n", " = 0")), "a barrier of both at the end",
        ),
        "the last one gone in both": (_meetings((LAST, ""), (FIRST, FIRST.replace("2 * now - 1", "now"))), "by halves"),
        "the first one gone in halves": (_meetings((FIRST, ""), (LAST, LAST.replace("2 * now", "now"))), "by halves"),
        "the first one gone in pulled": (
            _meetings(
                ("    meet(flag, their_flag, now);\n", ""),
                ("their_box[turn + i];\n", "their_box[turn + i];\n    meet(flag, their_flag, now);\n"),
            ),
            "by pulled",
        ),
        "both stay": (
            _meetings(
                ("    meet(flag, their_flag, now);\n", "    meet(flag, their_flag, 2 * now - 1);\n"),
                ("their_box[turn + i];\n", "their_box[turn + i];\n    meet(flag, their_flag, 2 * now);\n"),
            ),
            "wanted: 32, a single flag",
        ),
        "boxes out of step": (
            _meetings(("x[i] += their_box[turn + i]", "x[i] += their_box[n - turn + i]")), "by pulled",
        ),
        "the same number again": (_meetings(("meet(flag, their_flag, now)", "meet(flag, their_flag, 1)")), "race on"),
    },
    4: {
        "-0 is sent": (_sent(("return has_come(v) ? v : 0.0f", "return v")), "Each of the two waits"),
        "words are not put back": (_sent((BACK, "")), "wrong at"),
        "put back in the peer's box": (_sent((BACK, BACK.replace("box + at", "their_box + at"))), "at "),
        "half a word is put back": (
            _sent((BACK, BACK.replace("-0.0f, -0.0f, -0.0f, -0.0f", "-0.0f, -0.0f, a.z, a.w"))),
            "not all of that was put back",
        ),
        "0 is put back": (_sent((BACK, BACK.replace("-0.0f", "0.0f"))), "wrong at"),
        "one box": (_sent(("*number % 2 * words + k", "k")), "at "),
        "0 is not there yet": (
            _sent(("__float_as_uint(v) != 0x80000000", "v != 0.0f"), ("? v : 0.0f", "? v : 1e-30f")), "at ",
        ),
        "one number for a word": (_sent((WAIT, "!has_come(a.x)")), "only the first 8 bytes have come"),
        "the last number for a word": (_sent((WAIT, "!has_come(a.w)")), "only the last 8 bytes have come"),
        "all numbers at once": (_sent((WAIT, WAIT.replace("||", "&&"))), "bytes have come"),
        "a whole word of -0 only": (
            _sent(
                ("make_float4(sendable(v.x), sendable(v.y), sendable(v.z), sendable(v.w))",
                 "has_come(v.x) || has_come(v.y) || has_come(v.z) || has_come(v.w) ? v : make_float4(0, 0, 0, 0)"),
            ),
            "Each of the two waits",
        ),
        "no look past the end": (_sent(("    if (k >= words) return;\n", "")), "at "),
        "twice over the link": (_sent((BACK, BACK + "    send(their_box + 2 * words + k, v);\n")), "32 bytes go over"),
    },
    5: {
        "one mailbox for all sites": (SITES.replace("site * n + i", "i"), "at "),
        "the site for a flag": (SITES.replace("const unsigned now = *token;", "const unsigned now = site + 1;"), "at "),
        "any flag": (_sites((" != now", " == 0")), "wrong at"),
        "waits first": (_sites((SEND, ""), (TAKE, TAKE + SEND)), "Each of the two waits"),
        "two stores": (_sites((SEND, TWO_STORES)), "race on box"),
        "boxes by turns": (SITES.replace("site * n + i", "(now % 2 + site) * n + i"), "at "),
        "looks over the link": (
            _sites(
                (SEND, SEND.replace("their_box", "(u64 *)box")), (TAKE, TAKE.replace("box", "their_box")),
            ),
            "and loads",
        ),
        "past the end": (_sites(("    if (i >= n) return;\n", "")), "at "),
        "one block only": (_sites(("blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x")), "at "),
        "twice the own": (_sites(("own + __uint", "own + own + 0 * __uint")), "wrong at"),
        "one thread waits for all": (_sites((TAKE, ONE_WAITS)), "before it has come"),
        "empties its own mailbox": (
            SITES.replace("    x[i] = own", "    send((u64 *)box + site * n + i, 0);\n    x[i] = own"),
            "it writes its own mailbox",
        ),
    },
}  # fmt: skip
