/* The thread that has the pool publishes a round of pieces; it and the workers take them from a counter. The counter
 * holds the number of the round, too: who takes a piece knows that the round is still the one whose job it has read, and
 * the round cannot end before that piece is done. So the publisher waits for pieces alone, and a worker whose core was
 * taken away between two pieces holds nobody up. */
#define _GNU_SOURCE
#include "plan_threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

enum { MOST_THREADS = 64, WORKER_SPINS = 6000, WAIT_SPINS = 2000 };
#define CLOSED UINT32_MAX /* the next piece while a round is being written */

typedef void (*Job)(void *, int);

static struct {
    pthread_mutex_t busy; /* held by the call that has the pool */
    pthread_mutex_t sleep;
    pthread_cond_t wake, done;
    int workers, wanted;          /* of the publisher */
    _Atomic(Job) job;             /* of the round */
    _Atomic(void *) given;
    atomic_int pieces, helpers;   /* helpers: workers below this number may help */
    atomic_uint_fast64_t counter; /* round << 32 | next piece */
    atomic_int finished;          /* pieces of the round */
    atomic_int sleepers, waiting; /* workers that sleep; whether the publisher does */
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
        const uint32_t piece = (uint32_t)seen;
        const Job job = atomic_load_explicit(&pool.job, memory_order_relaxed);
        void *given = atomic_load_explicit(&pool.given, memory_order_relaxed);
        const int pieces = atomic_load_explicit(&pool.pieces, memory_order_relaxed);
        if (piece >= (uint32_t)pieces || helper >= atomic_load_explicit(&pool.helpers, memory_order_relaxed)) return seen;
        if (!atomic_compare_exchange_weak(&pool.counter, &seen, seen + 1)) continue;
        job(given, (int)piece);
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
    atomic_fetch_add(&pool.sleepers, 1);
    while (atomic_load(&pool.counter) == seen) pthread_cond_wait(&pool.wake, &pool.sleep);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.sleep);
}

static void *work(void *number) {
    const int me = (int)(intptr_t)number;
    for (;;) {
        const uint64_t seen = take_pieces(me);
        int spins = 0;
        while (atomic_load_explicit(&pool.counter, memory_order_acquire) == seen && spins++ < WORKER_SPINS) rest();
        if (spins >= WORKER_SPINS) sleep_until_after(seen);
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

int pool_take(int threads) {
    pthread_once(&once, prepare_pool);
    if (threads < 2 || pthread_mutex_trylock(&pool.busy)) return 0;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    hire(threads - 1);
    pool.wanted = threads - 1;
    if (pool.workers) return 1;
    pthread_mutex_unlock(&pool.busy);
    return 0;
}

void pool_leave(void) { pthread_mutex_unlock(&pool.busy); }

/* Waits for pieces that workers have taken: it spins, then sleeps, which may give a worker this core. */
static void wait_for(int pieces) {
    for (int spins = 0; spins < WAIT_SPINS; spins++) {
        if (atomic_load(&pool.finished) == pieces) return;
        rest();
    }
    pthread_mutex_lock(&pool.sleep);
    atomic_store(&pool.waiting, 1);
    while (atomic_load(&pool.finished) != pieces) pthread_cond_wait(&pool.done, &pool.sleep);
    atomic_store(&pool.waiting, 0);
    pthread_mutex_unlock(&pool.sleep);
}

void pool_share(Job job, void *given, int pieces) {
    const uint64_t round = (atomic_load(&pool.counter) >> 32) + 1;
    atomic_store(&pool.counter, round << 32 | CLOSED); /* who has read the last round's counter takes nothing any more */
    atomic_store_explicit(&pool.job, job, memory_order_relaxed);
    atomic_store_explicit(&pool.given, given, memory_order_relaxed);
    atomic_store_explicit(&pool.helpers, pool.wanted, memory_order_relaxed);
    atomic_store(&pool.finished, 0);
    atomic_store_explicit(&pool.pieces, pieces, memory_order_relaxed);
    atomic_store(&pool.counter, (round + 1) << 32);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    take_pieces(-1);
    wait_for(pieces);
}
