/* A team of threads that works through phases, each a line of tasks.

     int64_t task = take(team, phase)   the next task of a phase that nobody has: the faster thread takes more
     meet(team, phase)                  wait until all have ended this phase

   Tasks are handed out one at a time, and not in equal shares, as other programs may use the processors, too. Whoever
   waits spins for some microseconds, which is as long as a phase's end takes, and then sleeps until it is
   woken, so that others run.

   The first task of a thread is the one with its own number, so it is known before the phase begins. */
#pragma once
#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
enum { SPINS = 1000 };

typedef struct {
    int threads;
    _Atomic int arrived, done; /* threads that wait; phases that all have ended */
    _Atomic int asleep;        /* threads that the system must wake */
    _Atomic int64_t next[2];   /* task of the phases with an even and an odd number */
} Team;

static inline void begin(Team *team, int threads) {
    team->threads = threads;
    atomic_store(&team->arrived, 0);
    atomic_store(&team->done, 0);
    atomic_store(&team->asleep, 0);
    for (int i = 0; i < 2; i++) atomic_store(&team->next[i], threads);
}

static inline int64_t take(Team *team, int phase) {
    return atomic_fetch_add_explicit(&team->next[phase & 1], 1, memory_order_relaxed);
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
        atomic_store(&team->next[phase & 1], team->threads); /* nobody takes from it until the phase after next */
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
