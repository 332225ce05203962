/* Rows that begin at any element, read in words of 16 bytes none the less: for unaligned.cu and unaligned_ring.cu.

   A word must lie at an address that is a multiple of 16 bytes. So the words are cut by address, and not by row: word 0
   of a row is the one that the row begins in. Where that is `lead` elements behind the word's start, word j holds
   columns j * VEC - lead and those after it.

   - Rows that are PERIOD rows apart begin at the same place in a word. A block has such rows only, so that a thread's
     words hold the same columns in all of them (`Columns`).
   - The elements of x that a word meets begin inside of a word of x: they are cut out of two (`VectorWords`), once.
   - The first and the last word of a row hold elements of the rows beside it: zeros are put there, since infinity times
     the zero of x would be NaN.
   - In the first and in the last row of the matrix these words may reach out of its memory. They are not read; what
     they hold of the row, a lane for each element reads (`Fringe`). */
#pragma once
#include "../device/copy.cuh"
#include "../device/mma.cuh"
#include "../device/words.cuh"

/* The sizes that unaligned_plan.py chooses. */
template <typename Type, int Period, int Threads, int Words, int Rows> struct Sizes {
    using T = Type; // of W, x and y
    static constexpr int PERIOD = Period;   // rows between those of a group: PERIOD * cols elements fill whole words
    static constexpr int THREADS = Threads; // of a block
    static constexpr int WORDS = Words;     // that a thread asks for at once, of a row
    static constexpr int ROWS = Rows;       // of a group: a power of two
    static constexpr int VEC = 16 / sizeof(T); // elements of a word
};

/* Elements from where a word begins to p. */
template <typename T> __device__ __forceinline__ int lead_of(const T *p) {
    return (unsigned)reinterpret_cast<unsigned long long>(p) % 16 / sizeof(T);
}

/* A thread's columns of a row, VEC in each of its words. `first` is that of its first word, and may lie in front of
   the row. */
template <class S> struct Columns {
    using T = typename S::T;
    static constexpr int VEC = S::VEC;
    int first, cols;

    /* row: where a row begins; word: the thread's first. */
    __device__ __forceinline__ Columns(const T *row, int cols, int word)
        : first(word * VEC - lead_of(row)), cols(cols) {}
    __device__ __forceinline__ int column(int k) const { return first + k * S::THREADS * VEC; }
    __device__ __forceinline__ bool begins_before(int k) const { return column(k) < 0; }
    __device__ __forceinline__ bool ends_behind(int k) const { return column(k) + VEC > cols; }
    /* Whether word k holds some of a row and may be read. first, last: whether that row is the matrix's first, last. */
    __device__ __forceinline__ bool has(int k, bool first, bool last) const {
        const int least = first ? 0 : 1 - VEC, end = last ? cols - VEC + 1 : cols;
        return column(k) >= least && column(k) < end;
    }
};

/* Which bits of a thread's words are the row's own. */
template <class S> struct OwnBits {
    unsigned bits[S::WORDS][4];
    bool all[S::WORDS];

    __device__ __forceinline__ OwnBits(const Columns<S> &columns) {
        constexpr int VEC = S::VEC, SIZE = sizeof(typename S::T);
#pragma unroll
        for (int k = 0; k < S::WORDS; k++) {
            all[k] = !columns.begins_before(k) && !columns.ends_behind(k);
#pragma unroll
            for (int i = 0; i < 4; i++) bits[k][i] = 0;
#pragma unroll
            for (int i = 0; i < VEC; i++)
                if ((unsigned)(columns.column(k) + i) < columns.cols)
                    bits[k][i * SIZE / 4] |= SIZE == 4 ? ~0u : 0xffffu << 16 * (i % 2);
        }
    }
    /* Zeros for all others. */
    template <typename T, int VEC, int ROWS>
    __device__ __forceinline__ void keep(Word<T, VEC> (&w)[ROWS][S::WORDS]) const {
#pragma unroll
        for (int k = 0; k < S::WORDS; k++) {
            if (all[k]) continue;
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int i = 0; i < 4; i++) w[r][k].bits[i] &= bits[k][i];
        }
    }
};

/* The word that begins `elements` (fewer than a word's, and the same for all threads) into `low` and ends in `high`:
   whole registers up to there, then halves of two neighbours. */
template <typename T, int VEC>
__device__ __forceinline__ Word<T, VEC> shifted(const Word<T, VEC> &low, const Word<T, VEC> &high, int elements) {
    const int bytes = elements * sizeof(T);
    Word<T, VEC> word;
    auto cut = [&](int from) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int a = i + from, b = a + 1;
            const unsigned v = a < 4 ? low.bits[a] : high.bits[a - 4];
            if (sizeof(T) == 4) word.bits[i] = v;
            else word.bits[i] = __funnelshift_r(v, b < 4 ? low.bits[b] : high.bits[b - 4], 8 * (bytes & 2));
        }
    };
    switch (bytes / 4) {
    case 0: cut(0); break;
    case 1: cut(1); break;
    case 2: cut(2); break;
    default: cut(3);
    }
    return word;
}

/* The words of x that a thread's columns reach over, two for each of its own. What is outside of x is zero, and is not
   read: the words at both ends of x are read by elements where they are not whole. */
template <class S> struct VectorWords {
    using T = typename S::T;
    static constexpr int VEC = S::VEC;
    Word<T, VEC> low[S::WORDS] = {}, high[S::WORDS] = {};
    int shift; // elements from a word of x to where a thread's column begins

    /* First the whole words; the parts are waited for, so that they are better asked for last of all. */
    __device__ __forceinline__ void load_whole(const T *x, const Columns<S> &columns) {
        const int cols = columns.cols;
        shift = (unsigned)(columns.first + lead_of(x)) % VEC;
#pragma unroll
        for (int k = 0; k < S::WORDS; k++) {
            const int c = columns.column(k) - shift;
            if (c >= 0 && c <= cols - VEC) low[k] = load_word<VEC>(x + c);
            if (c >= -VEC && c <= cols - 2 * VEC) high[k] = load_word<VEC>(x + c + VEC);
        }
    }
    __device__ __forceinline__ void load_parts(const T *x, const Columns<S> &columns) {
        const int cols = columns.cols, lead = lead_of(x);
        if ((cols + lead) % VEC) load_part(x, (cols + lead) / VEC * VEC - lead, columns);
        if (lead) load_part(x, -lead, columns);
    }
    __device__ __forceinline__ Word<T, VEC> word(int k) const { return shifted<T, VEC>(low[k], high[k], shift); }

  private:
    /* The word that begins with element c of x, if it is one of the thread's. */
    __device__ __forceinline__ void load_part(const T *x, int c, const Columns<S> &columns) {
        const unsigned ahead = (c - columns.first + shift) / VEC; // words, from the thread's first lower one
        bool mine = false;
#pragma unroll
        for (int k = 0; k < S::WORDS; k++) mine |= ahead - k * S::THREADS <= 1;
        if (!mine) return;
        unsigned element[VEC];
#pragma unroll
        for (int i = 0; i < VEC; i++)
            element[i] = (unsigned)(c + i) < columns.cols ? load_word<1>(x + c + i).bits[0] : 0;
        Word<T, VEC> part;
#pragma unroll
        for (int i = 0; i < 4; i++)
            part.bits[i] = sizeof(T) == 4 ? element[i] : element[2 * i % VEC] | element[(2 * i + 1) % VEC] << 16;
#pragma unroll
        for (int k = 0; k < S::WORDS; k++) {
            if (ahead == k * S::THREADS) low[k] = part;
            if (ahead == k * S::THREADS + 1) high[k] = part;
        }
    }
};

/* The two words that reach out of the matrix, at its start and at its end: what is inside, and zeros. Lane i of each
   warp has their elements i. */
template <class S> struct Fringe {
    using T = typename S::T;
    static constexpr int VEC = S::VEC;
    using Element = Word<T, 1>;
    Element head = {}, tail = {};

    /* start, end: of the matrix, in a block that has its first, its last row; else nullptr. */
    __device__ __forceinline__ void load(const T *start, const T *end, int lane) {
        if (start && lane >= lead_of(start) && lane < VEC) head = load_word<1>(start - lead_of(start) + lane);
        if (end && lane < lead_of(end)) tail = load_word<1>(end - lead_of(end) + lane);
    }
    /* Put them in their places, among words that have not been read. All lanes call. first: whether row 0 of w is the
       matrix's first; last: which row is its last, if any. */
    template <int ROWS>
    __device__ __forceinline__ void put(Word<T, VEC> (&w)[ROWS][S::WORDS], const Columns<S> &columns, bool first,
                                        int last) const {
        if (first) {
            const Word<T, VEC> word = joined(head);
            if (columns.begins_before(0)) w[0][0] = word;
        }
        if (last >= 0) {
            const Word<T, VEC> word = joined(tail);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int k = 0; k < S::WORDS; k++)
                    if (r == last && columns.ends_behind(k)) w[r][k] = word;
        }
    }

  private:
    static __device__ __forceinline__ Word<T, VEC> joined(const Element &mine) {
        Word<T, VEC> word = {};
#pragma unroll
        for (int i = 0; i < VEC; i++)
            word.bits[i * sizeof(T) / 4] |= __shfl_sync(~0u, mine.bits[0], i) << (sizeof(T) == 4 ? 0 : 16 * (i % 2));
        return word;
    }
};

struct MultiplyAdds {
    /* sums[r] += the thread's words of row r times x. */
    template <typename T, int VEC, int ROWS, int WORDS>
    static __device__ __forceinline__ void add(float (&sums)[ROWS], const Word<T, VEC> (&w)[ROWS][WORDS],
                                               const Word<T, VEC> (&x)[WORDS], int lane) {
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int k = 0; k < WORDS; k++)
#pragma unroll
                for (int i = 0; i < VEC; i++) sums[r] += element(w[r][k], i) * element(x[k], i);
    }
};

/* As in ring.cu: the same for what four lanes hold together, in one of them. 16 bits only; ROWS is even. */
struct TensorCores {
    template <typename T, int VEC, int ROWS, int WORDS>
    static __device__ __forceinline__ void add(float (&sums)[ROWS], const Word<T, VEC> (&w)[ROWS][WORDS],
                                               const Word<T, VEC> (&x)[WORDS], int lane) {
#pragma unroll
        for (int r = 0; r < ROWS; r += 2) {
            float d[4] = {};
#pragma unroll
            for (int k = 0; k < WORDS; k++) {
                const unsigned(&a)[4] = w[r][k].bits, (&b)[4] = w[r + 1][k].bits;
                mma_m16n8k16(d, {a[0], b[0], a[1], b[1]}, x[k].bits[0], x[k].bits[1], T());
                mma_m16n8k16(d, {a[2], b[2], a[3], b[3]}, x[k].bits[2], x[k].bits[3], T());
            }
            // d holds D[g][2c], D[g][2c + 1], and the same of row g + 8, in lane 4g + c
            const bool mine = lane % 4 == lane / 8, odd = lane / 4 % 2;
            sums[r] += !mine ? 0 : odd ? d[1] : d[0];
            sums[r + 1] += !mine ? 0 : odd ? d[3] : d[2];
        }
    }
};
