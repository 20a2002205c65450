/* The matrix unit of newer x86 processors (AMX): permission to use it, and the shapes of its tiles. */

#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    TILE_ROWS = 16,
    TILE_ROW_BYTES = 64,
    REQUEST_PERMISSION = 0x1023, /* Linux allows tiles to processes that ask for them */
    TILE_DATA = 18,
};

/* What the processor reads: how many rows each of its tiles has, and bytes of a row. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Whether this process may use tiles. */
static int has_tiles(void) {
    static int known = -1;
    if (known < 0) known = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return known;
}

/* Compilers do not know how much memory tiles read: earlier stores must be complete. */
static inline __attribute__((always_inline)) void finish_writes(const void *memory) {
    __asm__ volatile("" : : "r"(memory) : "memory");
}

/* Shapes are the calling thread's, until it releases its tiles. */
static void shape_tiles(const struct tile_shapes *shapes) {
    finish_writes(shapes);
    _tile_loadconfig(shapes);
}
