/* Work in pieces, done by the thread that asks for it and by those of a pool (threads.c). */

#include <stdint.h>

/* Does pieces `first` to `end` of some work. Which pieces come together, and in which order, is not known beforehand. */
typedef void pieces(const void *work, long first, long end);

/* Does pieces 0 to `count` by at most so many threads, and returns when all are done. */
void do_pieces(pieces *some, const void *work, long count, int threads);
