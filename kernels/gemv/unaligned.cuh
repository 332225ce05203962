/* Rows that begin at any element, read in words of 16 bytes none the less: for unaligned.cu and unaligned_ring.cu.

   A word must lie at an address that is a multiple of 16 bytes. So the words are cut by address, and not by row: word j
   of a row is the j-th from the start of the line (LINE bytes) that the row begins in, `lead` elements behind that
   start, and it holds columns j * VEC - lead and those after it.

   - Rows that are PERIOD rows apart begin at the same place in a line, if PERIOD * cols elements are whole words.
     Such rows make a group: what a word of W must be multiplied with lies in the same place of x for all of them.
   - That place is no word of x, but `shifted` cuts it out of two of them. They come from shared memory, where zeros
     stand around x.
   - The first and the last word of a row hold elements of the rows beside it: zeros are put there, since infinity times
     the zero of x would be NaN.
   - In the first and in the last row of the matrix these words may reach out of its memory. They are not read; what
     they hold of the row is read element by element (`Fringe`). */
#pragma once
#include "../device/copy.cuh"
#include "../device/words.cuh"

/* The sizes that unaligned_plan.py chooses. */
template <typename Type, int Period, int Threads, int Words, int Rows, int Line> struct Sizes {
    using T = Type; // of W, x and y
    static constexpr int PERIOD = Period;   // rows between those of a group, 1 to 8: PERIOD * cols fill whole words
    static constexpr int THREADS = Threads; // of a block
    static constexpr int WORDS = Words;     // that a thread asks for at once, of a row
    static constexpr int ROWS = Rows;       // of a group: a power of two
    static constexpr int LINE = Line;       // bytes, from whose multiples words are counted
    static constexpr int VEC = 16 / sizeof(T); // elements of a word
};

template <class S> struct RowGroup {
    using T = typename S::T;
    static constexpr int PERIOD = S::PERIOD, ROWS = S::ROWS, VEC = S::VEC;
    long long rows, first; // of the matrix; the group's first row, and the others are PERIOD rows apart
    const T *start;        // of the first row
    int cols, lead;

    static __device__ __forceinline__ long long first_row(unsigned group) {
        return (long long)(group / PERIOD) * (PERIOD * ROWS) + group % PERIOD;
    }
    __device__ __forceinline__ RowGroup(const T *W, long long rows, int cols, unsigned group)
        : rows(rows), first(first_row(group)), start(W + first * cols), cols(cols),
          lead((unsigned)reinterpret_cast<unsigned long long>(start) % S::LINE / sizeof(T)) {}

    __device__ __forceinline__ bool has(int r) const { return first + r * PERIOD < rows; }
    __device__ __forceinline__ bool begins_matrix(int r) const { return r == 0 && first == 0; }
    __device__ __forceinline__ bool ends_matrix(int r) const { return first + r * PERIOD == rows - 1; }
    /* Elements of a row in its first and in its last word, or 0 where these are whole. */
    __device__ __forceinline__ int head() const { return (unsigned)-lead % VEC; }
    __device__ __forceinline__ int tail() const { return (unsigned)(lead + cols) % VEC; }
    /* The first whole word of a row. */
    __device__ __forceinline__ int first_whole() const { return (unsigned)(lead + VEC - 1) / VEC; }
    __device__ __forceinline__ int column(int word) const { return word * VEC - lead; }

    /* Do (r, k, from, there) for word `word` + k * THREADS of row r of the group: whether it is there, to be read. */
    template <class Do> __device__ __forceinline__ void each_word(int word, Do act) const {
        const T *from = start - lead + word * VEC;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const unsigned low = begins_matrix(r) ? first_whole() : lead / VEC;
            const unsigned high = (unsigned)(lead + cols + (ends_matrix(r) ? 0 : VEC - 1)) / VEC;
#pragma unroll
            for (int k = 0; k < S::WORDS; k++) {
                const unsigned j = word + k * S::THREADS;
                act(r, k, from + k * S::THREADS * VEC, has(r) && j >= low && j < high);
            }
            from += (long long)PERIOD * cols;
        }
    }
};

/* The two words that reach out of the matrix, at its start and at its end: what is inside, and zeros. Thread t < VEC
   reads element t of each; in shared memory they become words. */
template <class S> struct Fringe {
    using T = typename S::T;
    static constexpr int VEC = S::VEC;
    T head = T(0.f), tail = T(0.f);

    __device__ __forceinline__ void load(const RowGroup<S> &group, int t) {
        if (t >= VEC) return;
        const int first = VEC - group.head();
        if (group.first == 0 && t >= first) head = group.start[t - first];
        const long long ahead = group.rows - 1 - group.first; // of the matrix's last row
        if (ahead % S::PERIOD == 0 && ahead < S::PERIOD * S::ROWS && t < group.tail())
            tail = group.start[(ahead + 1) * group.cols - group.tail() + t];
    }
    __device__ __forceinline__ void store(T *to, int t) const {
        if (t < VEC) to[t] = head, to[VEC + t] = tail;
    }
};

/* Zeros for what is not of columns 0 .. cols - 1: the elements of a word that begins at column c. */
template <typename T, int VEC>
__device__ __forceinline__ void keep_columns(Word<T, VEC> &word, int c, int cols) {
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        const unsigned own = sizeof(T) == 4 ? ~0u : 0xffffu << 16 * (i % 2);
        if (c + i < 0 || c + i >= cols) word.bits[i * sizeof(T) / 4] &= ~own;
    }
}

/* The word that begins `elements` (fewer than a word's) into `low` and ends in `high`. Two steps move whole
   registers, the third halves of them. */
template <typename T, int VEC>
__device__ __forceinline__ Word<T, VEC> shifted(const Word<T, VEC> &low, const Word<T, VEC> &high, int elements) {
    const int bytes = elements * sizeof(T);
    unsigned v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = i < 4 ? low.bits[i] : high.bits[i - 4];
#pragma unroll
    for (int i = 0; i < 6; i++) v[i] = bytes & 8 ? v[i + 2] : v[i];
#pragma unroll
    for (int i = 0; i < 5; i++) v[i] = bytes & 4 ? v[i + 1] : v[i];
    Word<T, VEC> word;
#pragma unroll
    for (int i = 0; i < 4; i++) word.bits[i] = sizeof(T) == 4 ? v[i] : __funnelshift_r(v[i], v[i + 1], 8 * (bytes & 2));
    return word;
}

/* sum[r] += the thread's words of row r times x; `word` is the first of them. x_words: where the lower half of what
   this one meets stands; fringe: as Fringe stored it. */
template <class S, typename T = typename S::T>
__device__ __forceinline__ void add_products(float (&sum)[S::ROWS], Word<T, S::VEC> (&w)[S::ROWS][S::WORDS],
                                             const T *x_words, const T *fringe, const RowGroup<S> &group, int word) {
    constexpr int VEC = S::VEC;
#pragma unroll
    for (int k = 0; k < S::WORDS; k++) {
        const T *at = x_words + k * S::THREADS * VEC;
        const Word<T, VEC> x_word = shifted(load_word<VEC>(at), load_word<VEC>(at + VEC), group.head());
        const int c = group.column(word + k * S::THREADS);
        if (c < 0 || c + VEC > group.cols)
#pragma unroll
            for (int r = 0; r < S::ROWS; r++) {
                if (c < 0 && group.begins_matrix(r)) w[r][k] = load_word<VEC>(fringe);
                if (c >= 0 && group.ends_matrix(r)) w[r][k] = load_word<VEC>(fringe + VEC);
                keep_columns(w[r][k], c, group.cols);
            }
#pragma unroll
        for (int r = 0; r < S::ROWS; r++)
#pragma unroll
            for (int i = 0; i < VEC; i++) sum[r] += element(w[r][k], i) * element(x_word, i);
    }
}
