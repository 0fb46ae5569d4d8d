/* The thread that has the pool publishes a round of pieces; it and the workers take them from a counter. The counter
 * holds the number of the round, too: who takes a piece knows that the round is still the one whose job it has read,
 * and the round cannot end before that piece is done. So the publisher waits for pieces alone, and a worker whose core
 * was taken away between two pieces holds nobody up. Workers take the pieces of the end, so that a thread has about the
 * same part of an image in one op after the other: its cache holds it. */
#define _GNU_SOURCE
#include "plan_threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { MOST_THREADS = 64 };
/* Rounds of waiting before a worker yields its core, before it sleeps, and before the publisher sleeps. */
enum { WORKER_SPINS = 200, YIELDS = 5000, WAIT_SPINS = 2000 };
/* Nanoseconds until workers are woken again, and of a wait that is too long; then calls work alone ALONE times it.
 * After LONELY calls in which no worker helped they do so for LATE nanoseconds, as workers get no core then. */
enum { SOON = 1000000, LATE = 8 * SOON, STALL = 200000, ALONE = 20, LONELY = 8 };
#define CLOSED UINT32_MAX /* pieces taken while a round is being written */
enum { MOST_OF_END = 255 };
#define ONE_OF_END ((uint64_t)1 << 32)
#define ONE_ROUND ((uint64_t)1 << 40)

typedef void (*Job)(void *, int);

static struct {
    pthread_mutex_t busy; /* held by the call that has the pool */
    pthread_mutex_t sleep;
    pthread_cond_t wake, done;
    int workers, wanted;          /* of the publisher */
    int64_t woken;                /* when workers were woken */
    int lonely;                   /* calls in which no worker has helped, one after the other */
    int64_t alone_until;          /* times of the clock, 0 for none */
    _Atomic(Job) job;             /* of the round */
    _Atomic(void *) given;
    atomic_int pieces, helpers;   /* helpers: workers below this number may help */
    atomic_uint_fast64_t counter; /* round << 40 | pieces taken of the end << 32 | of the start */
    atomic_int finished;          /* pieces of the round */
    atomic_int has_helped;        /* whether a worker has taken a piece in this call */
    atomic_int sleeping, waiting; /* whether a worker sleeps that was not woken; whether the publisher does */
} pool;
static pthread_mutex_t short_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

void short_lock(void) { pthread_mutex_lock(&short_mutex); }
void short_unlock(void) { pthread_mutex_unlock(&short_mutex); }

static void rest(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void empty_pool(void) {
    memset(&pool, 0, sizeof pool);
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
}

static void in_child(void) {
    pthread_mutex_init(&short_mutex, NULL);
    empty_pool();
}

static void prepare_pool(void) {
    empty_pool();
    pthread_atfork(short_lock, short_unlock, in_child);
}

/* Takes pieces of the round until there are none; returns the counter then. */
static uint64_t take_pieces(int helper) {
    uint64_t seen = atomic_load(&pool.counter);
    for (;;) {
        const uint32_t of_start = (uint32_t)seen, of_end = (uint32_t)(seen / ONE_OF_END) & MOST_OF_END;
        const Job job = atomic_load_explicit(&pool.job, memory_order_relaxed);
        void *given = atomic_load_explicit(&pool.given, memory_order_relaxed);
        const int pieces = atomic_load_explicit(&pool.pieces, memory_order_relaxed);
        const int helpers = atomic_load_explicit(&pool.helpers, memory_order_relaxed);
        if (of_start >= (uint32_t)pieces - of_end || helper >= helpers) return seen;
        const int at_end = helper >= 0 && pieces <= MOST_OF_END;
        if (!atomic_compare_exchange_weak(&pool.counter, &seen, seen + (at_end ? ONE_OF_END : 1))) continue;
        if (helper >= 0) atomic_store_explicit(&pool.has_helped, 1, memory_order_relaxed);
        job(given, (int)(at_end ? (uint32_t)pieces - 1 - of_end : of_start));
        if (atomic_fetch_add(&pool.finished, 1) + 1 == pieces && atomic_load(&pool.waiting)) {
            pthread_mutex_lock(&pool.sleep);
            pthread_cond_signal(&pool.done);
            pthread_mutex_unlock(&pool.sleep);
        }
        seen = atomic_load(&pool.counter);
    }
}

static void sleep_until_after(uint64_t seen) {
    pthread_mutex_lock(&pool.sleep);
    atomic_store(&pool.sleeping, 1);
    while (atomic_load(&pool.counter) == seen) pthread_cond_wait(&pool.wake, &pool.sleep);
    pthread_mutex_unlock(&pool.sleep);
}

static void *work(void *number) {
    const int me = (int)(intptr_t)number;
    for (;;) {
        const uint64_t seen = take_pieces(me);
        for (int spins = 0; atomic_load_explicit(&pool.counter, memory_order_acquire) == seen; spins++) {
            if (spins < WORKER_SPINS)
                rest();
            else if (spins < WORKER_SPINS + YIELDS)
                sched_yield(); /* to the publisher, which may want this very core */
            else
                sleep_until_after(seen);
        }
    }
    return NULL;
}

/* Threads are made while they can be. */
static void hire(int workers) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.workers < workers) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, work, (void *)(intptr_t)pool.workers)) break;
        pool.workers++;
    }
    pthread_attr_destroy(&attributes);
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Whether the pool rests: the clock is read only after a stall. */
static int is_alone(void) {
    if (pool.alone_until == 0) return 0;
    if (now() < pool.alone_until) return 1;
    pool.alone_until = 0;
    return 0;
}

int pool_take(int threads) {
    pthread_once(&once, prepare_pool);
    if (threads < 2 || pthread_mutex_trylock(&pool.busy)) return 1;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    hire(threads - 1);
    pool.wanted = threads - 1;
    if (pool.workers && !is_alone()) return threads;
    pthread_mutex_unlock(&pool.busy);
    return 1;
}

void pool_leave(void) {
    pool.lonely = atomic_exchange(&pool.has_helped, 0) ? 0 : pool.lonely + 1;
    if (pool.lonely >= LONELY && pool.alone_until == 0) pool.alone_until = now() + LATE, pool.lonely = 0;
    pthread_mutex_unlock(&pool.busy);
}

/* Waits for pieces that workers have taken: it spins, then sleeps, which may give a worker this core. Where a short
 * piece takes long, a core was taken away: then calls work alone for a while, so that such stalls take a small share of
 * it. */
static void wait_for(int pieces, int are_short) {
    for (int spins = 0; spins < WAIT_SPINS; spins++) {
        if (atomic_load(&pool.finished) == pieces) return;
        rest();
    }
    const int64_t start = now();
    pthread_mutex_lock(&pool.sleep);
    atomic_store(&pool.waiting, 1);
    while (atomic_load(&pool.finished) != pieces) pthread_cond_wait(&pool.done, &pool.sleep);
    atomic_store(&pool.waiting, 0);
    pthread_mutex_unlock(&pool.sleep);
    const int64_t stop = now();
    if (are_short && stop - start > STALL) pool.alone_until = stop + ALONE * (stop - start);
}

static void wake_workers(void) {
    const int64_t time = now();
    if (pool.woken != 0 && time - pool.woken < SOON) return;
    pool.woken = time;
    pthread_mutex_lock(&pool.sleep);
    atomic_store(&pool.sleeping, 0);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.sleep);
}

void pool_share(Job job, void *given, int pieces, int are_short) {
    if (is_alone()) {
        for (int piece = 0; piece < pieces; piece++) job(given, piece);
        return;
    }
    const uint64_t round = atomic_load(&pool.counter) / ONE_ROUND + 1;
    /* From here on nobody who has read the last round's counter can take a piece. */
    atomic_store(&pool.counter, round * ONE_ROUND | CLOSED);
    atomic_store_explicit(&pool.job, job, memory_order_relaxed);
    atomic_store_explicit(&pool.given, given, memory_order_relaxed);
    atomic_store_explicit(&pool.helpers, pool.wanted, memory_order_relaxed);
    atomic_store(&pool.finished, 0);
    atomic_store_explicit(&pool.pieces, pieces, memory_order_relaxed);
    atomic_store(&pool.counter, (round + 1) * ONE_ROUND);
    if (atomic_load(&pool.sleeping)) wake_workers();
    take_pieces(-1);
    wait_for(pieces, are_short);
}
