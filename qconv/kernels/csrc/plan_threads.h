/* Threads for plans: one pool for all plans of the process. */
#pragma once

/* How many threads this one has now, itself among them: up to `threads`, with the pool. Where another call has it, or
 * there are no threads, 1: work alone then. */
int pool_take(int threads);

/* Calls job(given, piece) once for each piece, on the threads of the pool, and returns when all are done. Short pieces
 * take microseconds. */
void pool_share(void (*job)(void *given, int piece), void *given, int pieces, int are_short);

void pool_leave(void);

/* A lock of a few instructions that is free in the child of a fork. */
void short_lock(void);
void short_unlock(void);
