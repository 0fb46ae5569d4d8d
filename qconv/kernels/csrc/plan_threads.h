/* Threads for plans: one pool for all plans of the process. */
#pragma once

/* Whether this thread has the pool now, with up to `threads` threads, itself among them. Another call that has it, or a
 * lack of threads, is a no: work alone then. */
int pool_take(int threads);

/* Calls job(given, piece) once for each piece, on the threads of the pool, and returns when all are done. Short pieces
 * take microseconds. */
void pool_share(void (*job)(void *given, int piece), void *given, int pieces, int are_short);

void pool_leave(void);

/* A lock of a few instructions that is free in the child of a fork. */
void short_lock(void);
void short_unlock(void);
