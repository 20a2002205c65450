/* Work in pieces, done by the calling thread and by those of a pool (threads.c). */

#include <stdint.h>

/* Does pieces `first` to `end` of some work. The grouping and order of pieces are undefined. */
typedef void pieces(const void *work, long first, long end);

/* Does pieces 0 to `count` by at most `threads` threads, and returns when all are done. */
void do_pieces(pieces *some, const void *work, long count, int threads);
