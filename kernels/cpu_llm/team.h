/* A team of threads that works through phases, each a line of things to do, `all` of them.

     Span span = first_span(team, me, all, least)    things that thread `me` begins a phase with
     Span span = take(team, phase, all, least)       the next ones that nobody has; none are left where it is empty
     meet(team, phase)                               wait until all have ended this phase

   A thread takes half of its share of what is left, from `least` to LONGEST times that: long spans first, as memory
   gives most along them, and short ones at the end, so that all end at about one time. The faster thread takes more,
   as other programs may use the processors, too. Whoever waits spins for some microseconds, which is as long as a
   phase's end takes, and then sleeps until it is woken, so that others run. */
#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
enum { SPINS = 1000, LONGEST = 24 };

typedef struct {
    int threads;
    _Atomic int arrived, done; /* threads that wait; phases that all have ended */
    _Atomic int asleep;        /* threads that the system must wake */
    _Atomic int64_t taken[2];  /* behind the first spans: of the phases with an even and an odd number */
} Team;

typedef struct {
    int64_t begin, end;
} Span;

static inline void begin(Team *team, int threads) {
    team->threads = threads;
    atomic_store(&team->arrived, 0);
    atomic_store(&team->done, 0);
    atomic_store(&team->asleep, 0);
    for (int i = 0; i < 2; i++) atomic_store(&team->taken[i], 0);
}

/* work(what, me) by every thread of a team, of as many threads as the system gives. */
static void run(Team *team, int threads, void (*work)(void *what, int me), void *what) {
#pragma omp parallel num_threads(threads)
    {
        int me = 0;
#ifdef _OPENMP
        me = omp_get_thread_num();
#pragma omp single
        begin(team, omp_get_num_threads());
#else
        begin(team, 1);
#endif
        work(what, me);
    }
}

/* How many of the things that are left a thread takes at a time. */
static inline int64_t share(const Team *team, int64_t left, int64_t least) {
    const int64_t times = left / (2 * team->threads) / least;
    return least * (times < 1 ? 1 : times < LONGEST ? times : LONGEST);
}

static inline Span span(int64_t begin, int64_t count, int64_t all) {
    return (Span){begin, begin + count < all ? begin + count : all};
}

/* It is known before the phase begins. */
static inline Span first_span(const Team *team, int me, int64_t all, int64_t least) {
    const int64_t count = share(team, all, least);
    return span(me * count, count, all);
}

static inline Span take(Team *team, int phase, int64_t all, int64_t least) {
    const int64_t first = team->threads * share(team, all, least);
    int64_t taken = atomic_load(&team->taken[phase & 1]), count;
    do {
        if (first + taken >= all) return (Span){all, all};
        count = share(team, all - first - taken, least);
    } while (!atomic_compare_exchange_weak(&team->taken[phase & 1], &taken, taken + count));
    return span(first + taken, count, all);
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#if defined(__linux__)
/* As long as *word is `value`: a futex, which looks once more before it sleeps. */
static inline void sleep_while(_Atomic int *word, int value) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0); }
static inline void wake_all(_Atomic int *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0); }
#else
static inline void sleep_while(_Atomic int *word, int value) { sched_yield(); }
static inline void wake_all(_Atomic int *word) {}
#endif

static inline void meet(Team *team, int phase) {
    if (atomic_fetch_add(&team->arrived, 1) + 1 == team->threads) {
        atomic_store(&team->arrived, 0);
        atomic_store(&team->taken[phase & 1], 0); /* nobody takes from it until the phase after next */
        atomic_store(&team->done, phase + 1);
        if (atomic_load(&team->asleep)) wake_all(&team->done);
        return;
    }
    for (int spin = 0; atomic_load_explicit(&team->done, memory_order_acquire) <= phase; spin++)
        if (spin < SPINS) relax();
        else {
            atomic_fetch_add(&team->asleep, 1);
            sleep_while(&team->done, phase);
            atomic_fetch_sub(&team->asleep, 1);
        }
}
