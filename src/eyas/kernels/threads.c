/* A thread pool that all kernels share: for work of some microseconds, on machines that do other work too.
 *
 * The caller takes pieces of its work, and so do the threads of the pool: many pieces at first, few at the end. A
 * thread that is not running takes nothing, and delays the others only by pieces taken before. Idle threads look for
 * work for SPIN nanoseconds, then sleep; so does a thread that waits for the last pieces.
 *
 * If other processes want the CPUs, threads are preempted while holding pieces, again and again. Waiting for them costs
 * more than they contribute. So time lost by waiting is counted: if it exceeds MOST_LOST of a window of WINDOW
 * nanoseconds, the next ALONE nanoseconds do without the pool; then it is tried again.
 *
 * One thread uses the pool at a time. A caller that finds it in use works alone, and so does a piece that submits work.
 *
 * Invariant: pieces are taken by compare-and-exchange of a word that holds the number of the work and of its next
 * piece. A thread that slept through the end of some work finds another number there and takes nothing.
 */

#define _GNU_SOURCE
#include "threads.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_THREADS = 256,
    SPIN = 100 * 1000,
    HELD_UP = 100 * 1000, /* shorter waits are for running threads */
    WINDOW = 50 * 1000 * 1000,
    ALONE = 1000 * 1000 * 1000,
    PAUSES = 32, /* between looks at the clock */
};
#define MOST_LOST 0.3

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __asm__ volatile("yield")
#endif

#define ALIGNED __attribute__((aligned(128)))

/* The current work; read before a piece is taken, and valid if one was. */
static struct {
    pieces *some;
    const void *work;
    long count;
    int shares; /* threads that may take part */
} job;

static ALIGNED uint64_t next;   /* number of the work << 32, its next piece */
static ALIGNED uint32_t number; /* of the work: changes with new work */
static ALIGNED uint32_t done;   /* pieces of it */
static ALIGNED int asleep;      /* threads of the pool */
static int waits;               /* whether the caller sleeps until all is done */
static int taken;               /* whether the pool is in use */
static int made;                /* threads of the pool */

/* Nanoseconds: end of working alone, start of the window, loss within it, total waiting. */
static int64_t alone_until, window_began, lost, waited_in_all;

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * (int64_t)1000000000 + time.tv_nsec;
}

static void sleep_while(uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, 0, 0, 0);
}
static void wake(uint32_t *word, int threads) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, threads, 0, 0, 0); }

/* Take pieces of this work until none is left. */
static void help(uint32_t of) {
    for (;;) {
        uint64_t seen = __atomic_load_n(&next, __ATOMIC_ACQUIRE);
        pieces *some = __atomic_load_n(&job.some, __ATOMIC_RELAXED);
        const void *work = __atomic_load_n(&job.work, __ATOMIC_RELAXED);
        const long count = __atomic_load_n(&job.count, __ATOMIC_RELAXED);
        const int shares = __atomic_load_n(&job.shares, __ATOMIC_RELAXED);
        const long first = (uint32_t)seen, left = count - first; /* below 2^31 pieces */
        if (seen >> 32 != of || left <= 0) return;
        const long size = left > 2 * shares ? left / (2 * shares) : 1;
        if (!__atomic_compare_exchange_n(&next, &seen, seen + size, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
        some(work, first, first + size);
        if (__atomic_add_fetch(&done, size, __ATOMIC_SEQ_CST) == count && __atomic_load_n(&waits, __ATOMIC_SEQ_CST))
            wake(&done, 1);
    }
}

static void *worker(void *which) {
    const long place = (long)which; /* per thread: some work limits them */
    uint32_t known = 0;
    for (;;) {
        const int64_t until = now() + SPIN;
        uint32_t seen;
        for (int tries = 0; (seen = __atomic_load_n(&number, __ATOMIC_ACQUIRE)) == known; tries++) {
            PAUSE();
            if (tries % PAUSES || now() < until) continue;
            __atomic_add_fetch(&asleep, 1, __ATOMIC_SEQ_CST);
            sleep_while(&number, known);
            __atomic_sub_fetch(&asleep, 1, __ATOMIC_SEQ_CST);
        }
        known = seen;
        if (place < __atomic_load_n(&job.shares, __ATOMIC_RELAXED)) help(known);
    }
    return 0;
}

/* Threads are not copied when a process forks. */
static void forget_threads(void) { made = taken = asleep = waits = 0; }

static void make_threads(int wanted) {
    static int hooked;
    sigset_t all, before;
    if (!hooked) hooked = pthread_atfork(0, 0, forget_threads) == 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals go to the threads that existed before */
    while (made < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, 0, worker, (void *)(long)(made + 1))) break;
        pthread_setname_np(thread, "eyas-kernels");
        pthread_detach(thread);
        made++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* Wait until all pieces are done, and count long waits. */
static void wait_for_others(long count) {
    const int64_t began = now();
    for (int tries = 1; __atomic_load_n(&done, __ATOMIC_ACQUIRE) != count; tries++) {
        PAUSE();
        if (tries % PAUSES || now() < began + SPIN) continue;
        __atomic_store_n(&waits, 1, __ATOMIC_SEQ_CST);
        for (uint32_t seen; (seen = __atomic_load_n(&done, __ATOMIC_SEQ_CST)) != count;) sleep_while(&done, seen);
        __atomic_store_n(&waits, 0, __ATOMIC_SEQ_CST);
    }
    const int64_t ended = now(), waited = ended - began;
    waited_in_all += waited;
    if (waited > HELD_UP) lost += waited;
    if (ended < window_began + WINDOW) return;
    /* A window that ends late includes an idle time without loss: it is discarded. */
    if (lost > MOST_LOST * (ended - window_began) && ended < window_began + 2 * WINDOW) alone_until = ended + ALONE;
    window_began = ended, lost = 0;
}

void do_pieces(pieces *some, const void *work, long count, int threads) {
    threads = threads > MOST_THREADS ? MOST_THREADS : threads > count ? (int)count : threads;
    if (threads < 2 || __atomic_exchange_n(&taken, 1, __ATOMIC_ACQUIRE)) {
        if (count > 0) some(work, 0, count);
        return;
    }
    if (alone_until && now() < alone_until) {
        some(work, 0, count);
    } else {
        if (alone_until) alone_until = 0, window_began = now(), lost = 0;
        if (made < threads - 1) make_threads(threads - 1);
        const uint32_t of = number + 1;
        __atomic_store_n(&next, (uint64_t)of << 32 | UINT32_MAX, __ATOMIC_RELAXED); /* unused while this is written */
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        __atomic_store_n(&job.some, some, __ATOMIC_RELAXED);
        __atomic_store_n(&job.work, work, __ATOMIC_RELAXED);
        __atomic_store_n(&job.count, count, __ATOMIC_RELAXED);
        __atomic_store_n(&job.shares, threads, __ATOMIC_RELAXED);
        __atomic_store_n(&done, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&next, (uint64_t)of << 32, __ATOMIC_RELEASE);
        __atomic_store_n(&number, of, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&asleep, __ATOMIC_SEQ_CST)) wake(&number, INT_MAX);
        help(of);
        wait_for_others(count);
    }
    __atomic_store_n(&taken, 0, __ATOMIC_RELEASE);
}

/* Total nanoseconds of waiting for last pieces. */
int64_t nanoseconds_waited(void) { return waited_in_all; }
