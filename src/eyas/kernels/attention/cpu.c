/* Paged attention in float32: one layer of a whole pass in one call.
 *
 * Decoding one token reads all keys and values of its request once and does little with them. So what counts is that
 * they are read in place, by all cores, and that nothing else is done per row and layer.
 *
 *     row     the new tokens of one request; all queries of a row, and the F heads that share a key head, are
 *             "lines": line i is query i / F, head i % F
 *     unit    up to BLOCK lines of a row
 *     chunk   CHUNK neighbouring positions. A unit, a chunk and a key head are a task; any core may do it
 *     part    a line's result for a chunk: its largest score, the sum of weights and of weighted values
 *
 * The thread that ends the last task of a unit merges its parts: there is no barrier before the end of the layer.
 *
 * Invariant: a query's result is the same to the last bit whatever else is in the pass, whether its path is a chain or
 * a branch of a tree, wherever its blocks are and however many threads there are. A query's slots are listed by
 * position; chunks begin at multiples of CHUNK; scores, sums of a chunk and the sum over chunks are each added up in
 * one order. Blocks, tiles and threads only choose what is computed together.
 *
 * What a query does not see may hold anything: it is not read, or its score is dropped (keys of later queries of a
 * row).
 *
 * Names: N tokens, H query heads, G key heads, F = H / G, C slots of the cache, K size of keys, V of values.
 */

#include "../threads.h"
#include "../vectors.h"

#include <limits.h>

/* Lines of a tile: four slots each, so 16 of 32 registers hold sums or 12 of 16. */
#if defined(__aarch64__) || defined(__AVX512VL__)
enum { TILE = 4 };
#else
enum { TILE = 3 };
#endif

enum {
    CHUNK = 128, /* positions: keys, or values, of a chunk stay in the first-level cache for all lines */
    BLOCK = 32,  /* lines */
    LINE = 16,   /* floats in a cache line */
    AHEAD = 16,  /* slots */
    WIDE = 4,    /* vectors of a value worked on at once */
};

/* Constant over all layers of a pass; cpu.py has the same fields. */
struct pass {
    const int32_t *table; /* [rows][blocks] */
    int32_t *base;        /* [rows] */
    int32_t *end;         /* [rows]: the slot after the tail */
    const int32_t *start; /* [rows]: the first token */
    const int32_t *count; /* [rows]: new tokens */
    const uint64_t *seen; /* [N]: bit t: the token sees tail slot t, where a tail is that short; null: all are chains */
    int64_t *slot;        /* [N]: where new keys and values are written */
    struct unit *units;
    struct task *tasks;
    float *parts;
    int32_t *left; /* [units][G]: open tasks; restored when a layer ends */
    const int32_t *idle; /* tokens outside all rows, which get zeros */
    int64_t rows, blocks, block_size, new_tokens, idle_count;
    int64_t unit_count, task_count, part_count;
    int64_t window, sinks; /* window 0: none */
    int64_t shared, key_heads, slots, key_size, value_size; /* F, G, C, K, V */
    int64_t q_token, q_head, k_token, k_head, v_token, v_head; /* strides, in floats */
    int64_t threads;
};

struct unit {
    int32_t row, first, lines;       /* lines of the row */
    int32_t first_chunk, end_chunk;  /* in other chunks nothing is seen */
    int32_t first_part;              /* parts: [chunk][key head][line] from here on */
};

struct task {
    int32_t unit, chunk;
};

/* A part: the largest score, the sum of weights, the weighted values. */
enum { MOST = 0, TOTAL = 1, MIXED = 2 };

static long smaller(long a, long b) { return a < b ? a : b; }

static float exponential_of(float x) { return exponential(all(x))[0]; }

INLINE vector hyperbolic_tangent(vector x) {
    const integers sign = (integers)x & INT32_MIN;
    const vector e = exponential((vector)((integers)x | INT32_MIN) * 2.0f);
    return (vector)((integers)((1.0f - e) / (1.0f + e)) | sign);
}

/* --- lines that see the same slots ------------------------------------------------------------------------------ */

/* scores[r][s] = q[r] . key[s] for a tile: up to TILE lines, four slots. */
INLINE void score(const int rows, const float *const *q, const float *const *key, long K, float *scores) {
    vector sum[TILE][4];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int s = 0; s < 4; s++) sum[r][s] = (vector){0};
    long whole = 0;
    for (; whole + LANES <= K; whole += LANES) {
        vector key_k[4];
        UNROLL for (int s = 0; s < 4; s++) key_k[s] = *(const vector *)(key[s] + whole);
        UNROLL for (int r = 0; r < rows; r++) {
            const vector q_k = *(const vector *)(q[r] + whole);
            UNROLL for (int s = 0; s < 4; s++) sum[r][s] += q_k * key_k[s];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        four total = sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
        for (long k = whole; k < K; k++) total += (four){key[0][k], key[1][k], key[2][k], key[3][k]} * q[r][k];
        *(four *)(scores + r * CHUNK) = total;
    }
}

/* Scores become weights e^(score - most); `part` gets the largest score and the sum of weights. */
static void weigh(float *scores, long count, float scale, float softcap, float *part) {
    enum { STEP = 4 * LANES }; /* four vectors at once: they are independent */
    const long whole = (count + STEP - 1) / STEP * STEP;
    for (long j = 0; j < whole; j += LANES) {
        vector *s = (vector *)(scores + j);
        *s = softcap > 0 ? hyperbolic_tangent(*s * (scale / softcap)) * softcap : *s * scale;
    }
    for (long j = count; j < whole; j++) scores[j] = -INFINITY; /* weight 0, which changes no sum */
    vector high[4], total[4];
    UNROLL for (int i = 0; i < 4; i++) high[i] = all(-INFINITY), total[i] = (vector){0};
    for (long j = 0; j < whole; j += STEP) UNROLL for (int i = 0; i < 4; i++) {
        const vector s = ((const vector *)(scores + j))[i];
        const integers above = (integers)(s > high[i]);
        high[i] = (vector)(((integers)s & above) | ((integers)high[i] & ~above));
    }
    float most = -INFINITY;
    for (int i = 0; i < 4; i++)
        for (int lane = 0; lane < LANES; lane++) most = high[i][lane] > most ? high[i][lane] : most;
    for (long j = 0; j < whole; j += STEP) {
        vector *s = (vector *)(scores + j), weight[4];
        UNROLL for (int i = 0; i < 4; i++) weight[i] = exponential(s[i] - most);
        UNROLL for (int i = 0; i < 4; i++) s[i] = weight[i], total[i] += weight[i];
    }
    const four each = sums(total[0], total[1], total[2], total[3]);
    part[MOST] = most;
    part[TOTAL] = (each[0] + each[1]) + (each[2] + each[3]);
}

/* Four neighbouring weights of a line. ARM multiplies by one lane of a register, so they are loaded at once; x86
 * spreads a float over a register while loading it, so they are left in memory. */
#if defined(__aarch64__)
typedef four weights;
INLINE weights read_weights(const float *x) { return *(const four *)x; }
#else
typedef const float *weights;
INLINE weights read_weights(const float *x) { return x; }
#endif

/* mixed[r][:] = sum over j < count of weight[r][j] * values[slot[j]][:] for a tile: up to TILE lines, some vectors. */
INLINE void mix(const int rows, const int vectors, const float *weight, const float *values, long V,
                const int32_t *slot, long count, float *mixed, long stride) {
    vector sum[TILE][WIDE];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < vectors; c++) sum[r][c] = (vector){0};
    long j = 0;
    for (; j + 4 <= count; j += 4) {
        weights weight_r[TILE];
        UNROLL for (int r = 0; r < rows; r++) weight_r[r] = read_weights(weight + r * CHUNK + j);
        UNROLL for (int i = 0; i < 4; i++) {
            const vector *value = (const vector *)(values + slot[j + i] * V);
            UNROLL for (int c = 0; c < vectors; c++) {
                const vector value_c = value[c];
                UNROLL for (int r = 0; r < rows; r++) sum[r][c] += value_c * weight_r[r][i];
            }
        }
    }
    for (; j < count; j++) {
        const vector *value = (const vector *)(values + slot[j] * V);
        UNROLL for (int c = 0; c < vectors; c++)
            UNROLL for (int r = 0; r < rows; r++) sum[r][c] += value[c] * weight[r * CHUNK + j];
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vectors; c++) ((vector *)(mixed + r * stride))[c] = sum[r][c];
}

INLINE void mix_all(const int rows, const float *weight, const float *values, long V, const int32_t *slot, long count,
                    float *mixed, long stride) {
    long c = 0;
    for (; c + WIDE * LANES <= V; c += WIDE * LANES)
        mix(rows, WIDE, weight, values + c, V, slot, count, mixed + c, stride);
    for (; c + LANES <= V; c += LANES) mix(rows, 1, weight, values + c, V, slot, count, mixed + c, stride);
    /* Slot by slot: otherwise compilers may vectorise the sums of some lines with rounded products, and of others with
     * fused ones. */
    for (int r = 0; r < rows && c < V; r++) {
        float *left = mixed + r * stride;
        for (long i = c; i < V; i++) left[i] = 0;
        for (long j = 0; j < count; j++)
            for (long i = c; i < V; i++) left[i] += weight[r * CHUNK + j] * values[slot[j] * V + i];
    }
}

INLINE void fetch(const float *x, long size) {
    for (long i = 0; i < size; i += LINE) __builtin_prefetch(x + i);
}

/* Optionally prefetches keys some slots ahead, and values for when all scores are there: blocks are anywhere, so the
 * CPU cannot guess which comes next. */
INLINE void score_all(const int rows, const int fetches, const float *const *q, const float *keys, const float *values,
                      long K, long V, const int32_t *slot, long count, float *scores) {
    for (long j = 0; j < count; j += 4) {
        const float *key[4];
        for (long i = j; fetches && i < smaller(j + 4, count); i++) {
            if (i + AHEAD < count) fetch(keys + slot[i + AHEAD] * K, K);
            fetch(values + slot[i] * V, V);
        }
        UNROLL for (int s = 0; s < 4; s++) key[s] = keys + slot[j + s] * K;
        score(rows, q, key, K, scores + j);
    }
}

/* Call a macro with the number of lines in a tile as a constant. */
#define TILES(call) \
    switch (rows) { case 1: call(1); break; case 2: call(2); break; case 3: call(3); break; default: call(TILE); }

/* mixed[:] += sum over first <= j < end of weight[j] * values[slot[j]][:], for one line, continuing after `mix`. */
static void mix_further(const float *weight, const float *values, long V, const int32_t *slot, long first, long end,
                        float *mixed) {
    for (long j = first; j < end; j++) {
        const float *value = values + slot[j] * V;
        long c = 0;
        for (; c + LANES <= V; c += LANES) *(vector *)(mixed + c) += *(const vector *)(value + c) * weight[j];
        for (; c < V; c++) mixed[c] += weight[j] * value[c];
    }
}

/* The parts of up to BLOCK lines. Each sees the first counts[line] of these slots, no fewer than the line before it
 * sees, and no others of the chunk; `slot` has room for CHUNK. */
static void attend(const float *const *q, long lines, const float *keys, const float *values, long K, long V,
                   int32_t *slot, const int32_t *counts, float scale, float softcap, float *parts) {
    float weight[BLOCK * CHUNK];
    const long stride = MIXED + V, tiles = (lines + TILE - 1) / TILE, most = counts[lines - 1];
    for (long j = most; j % 4; j++) slot[j] = slot[most - 1]; /* scored in fours; excess ones are dropped */
    for (long t = 0; t < tiles; t++) { /* as even as possible */
        const long first = lines * t / tiles, rows = lines * (t + 1) / tiles - first;
        const int fetches = t == 0 && lines < BLOCK; /* many lines take longer than memory */
        const long count = counts[first + rows - 1];
#define SCORE(n) score_all(n, fetches, q + first, keys, values, K, V, slot, count, weight + first * CHUNK)
        TILES(SCORE)
    }
    for (long i = 0; i < lines; i++) weigh(weight + i * CHUNK, counts[i], scale, softcap, parts + i * stride);
    for (long t = 0; t < tiles; t++) {
        const long first = lines * t / tiles, rows = lines * (t + 1) / tiles - first;
        const long count = counts[first]; /* what all of them see */
#define MIX(n) mix_all(n, weight + first * CHUNK, values, V, slot, count, parts + first * stride + MIXED, stride)
        TILES(MIX)
        for (long i = first; i < first + rows; i++)
            mix_further(weight + i * CHUNK, values, V, slot, count, counts[i], parts + i * stride + MIXED);
    }
}

/* --- visibility
 * ------------------------------------------------------------------------------------------------------ */

/* Whether bits say which tail slots a row's queries see; otherwise each sees all up to its own. */
static int has_bits(const struct pass *pass, long row) {
    return pass->seen && pass->end[row] - pass->base[row] <= 64;
}

static long position_of(const struct pass *pass, long row, long query) {
    if (!has_bits(pass, row)) return pass->base[row] + query;
    return pass->base[row] + __builtin_popcountll(pass->seen[pass->start[row] + query]) - 1;
}

static int32_t place_of(const struct pass *pass, long row, long slot) {
    return pass->table[row * pass->blocks + slot / pass->block_size] * pass->block_size + slot % pass->block_size;
}

/* List the slots of a chunk that a query sees, by position. */
static long list_slots(const struct pass *pass, long row, long query, long chunk, int32_t *slots) {
    const long base = pass->base[row], own = position_of(pass, row, query);
    const long begin = chunk * CHUNK, end = smaller(begin + CHUNK, own + 1);
    const long nearest = pass->window ? own - pass->window + 1 : 0; /* positions from here on are seen */
    const int branches = has_bits(pass, row);
    uint64_t bits = branches ? pass->seen[pass->start[row] + query] : 0;
    for (long p = base; p < begin; p++) bits &= bits - 1;
    const int32_t *block = pass->table + row * pass->blocks + begin / pass->block_size; /* that of p, while slots are p */
    long inside = begin % pass->block_size, count = 0;
    for (long p = begin; p < end; p++) {
        if (p < base || !branches) {
            if (p >= nearest || p < pass->sinks) slots[count++] = *block * pass->block_size + inside;
            if (++inside == pass->block_size) block++, inside = 0;
        } else { /* the next node of the path */
            const long slot = base + __builtin_ctzll(bits);
            bits &= bits - 1;
            if (p >= nearest || slot < pass->sinks) slots[count++] = place_of(pass, row, slot);
        }
    }
    return count;
}

/* Whether all queries of a unit see all positions of a chunk, in the same slots. */
static int is_shared(const struct pass *pass, const struct unit *unit, long chunk) {
    const long begin = chunk * CHUNK, end = begin + CHUNK, row = unit->row;
    const long first = unit->first / pass->shared, last = (unit->first + unit->lines - 1) / pass->shared;
    if (end > (has_bits(pass, row) ? pass->base[row] : position_of(pass, row, first) + 1)) return 0;
    if (!pass->window || end <= pass->sinks) return 1;
    for (long query = first; query <= last; query++)
        if (begin <= position_of(pass, row, query) - pass->window) return 0;
    return 1;
}

/* Whether later queries of a row see what earlier ones see, in the same slots and before anything else. */
static int is_nested(const struct pass *pass, long row) { return !pass->window && !has_bits(pass, row); }

/* --- a layer ------------------------------------------------------------------------------------------------------ */

struct layer {
    const struct pass *pass;
    const float *q, *keys, *values;
    const float *sink; /* [H]: scores without a key; null: there are none */
    float *output;
    float scale, softcap;
};

static void run_task(const struct pass *pass, const struct layer *layer, long index, long g) {
    const struct unit *unit = pass->units + pass->tasks[index].unit;
    const long chunk = pass->tasks[index].chunk, F = pass->shared, K = pass->key_size, V = pass->value_size;
    const long stride = MIXED + V, lines = unit->lines;
    float *parts = pass->parts;
    parts += (unit->first_part + ((chunk - unit->first_chunk) * pass->key_heads + g) * lines) * stride;
    const float *keys = layer->keys + g * pass->slots * K, *values = layer->values + g * pass->slots * V;
    const float *q[BLOCK];
    for (long i = 0; i < lines; i++) {
        const long query = (unit->first + i) / F, head = (unit->first + i) % F;
        q[i] = layer->q + (pass->start[unit->row] + query) * pass->q_token + (g * F + head) * pass->q_head;
    }
    int32_t slots[CHUNK], counts[BLOCK];
    const int shared = is_shared(pass, unit, chunk), nested = is_nested(pass, unit->row);
    for (long i = 0, next; i < lines; i = next) {
        const long query = (unit->first + i) / F, last = (unit->first + lines - 1) / F;
        next = shared || nested ? lines : smaller(lines, (query + 1) * F - unit->first);
        const long count = list_slots(pass, unit->row, nested ? last : query, chunk, slots);
        for (long j = i; j < next; j++) {
            counts[j] = (int32_t)count;
            if (nested) /* the last query sees the most */
                counts[j] = (int32_t)smaller(count, position_of(pass, unit->row, (unit->first + j) / F) + 1 - chunk * CHUNK);
            if (counts[j] > 0) continue;
            parts[j * stride + MOST] = -INFINITY;
            i = j + 1; /* lines that see nothing come first */
        }
        if (i < next)
            attend(q + i, next - i, keys, values, K, V, slots, counts + i, layer->scale, layer->softcap,
                   parts + i * stride);
    }
}

/* Merge the parts of a unit's lines. */
static void merge(const struct pass *pass, const struct layer *layer, const struct unit *unit, long g) {
    const long F = pass->shared, V = pass->value_size, stride = MIXED + V, lines = unit->lines;
    const long next = pass->key_heads * lines * stride, chunks = unit->end_chunk - unit->first_chunk;
    for (long i = 0; i < lines; i++) {
        const float *parts = pass->parts + (unit->first_part + g * lines + i) * stride;
        const long token = pass->start[unit->row] + (unit->first + i) / F, head = g * F + (unit->first + i) % F;
        float *output = layer->output + (token * pass->key_heads * F + head) * V;
        float most = layer->sink ? layer->sink[head] : -INFINITY;
        for (long c = 0; c < chunks; c++) most = parts[c * next + MOST] > most ? parts[c * next + MOST] : most;
        memset(output, 0, V * sizeof(float));
        float total = layer->sink ? exponential_of(layer->sink[head] - most) : 0;
        for (long c = 0; c < chunks; c++) {
            const float *part = parts + c * next;
            if (part[MOST] == -INFINITY) continue; /* nothing was seen here */
            const float weight = exponential_of(part[MOST] - most);
            total += part[TOTAL] * weight;
            for (long v = 0; v < V; v++) output[v] += part[MIXED + v] * weight;
        }
        for (long v = 0; v < V; v++) output[v] /= total;
    }
}

/* The lines `first` to `end` of a row, in a pass that may advance by `ahead` slots. */
static struct unit unit_of(const struct pass *pass, long row, long first, long end, long ahead) {
    long least = LONG_MAX, most = 0;
    for (long query = first / pass->shared; query <= (end - 1) / pass->shared; query++) {
        const long position = position_of(pass, row, query);
        least = smaller(least, position), most = position > most ? position : most;
    }
    const long nearest = pass->window && !pass->sinks && least >= pass->window ? least + 1 - pass->window : 0;
    return (struct unit){.row = (int32_t)row, .first = (int32_t)first, .lines = (int32_t)(end - first),
                         .first_chunk = (int32_t)(nearest / CHUNK), .end_chunk = (int32_t)((most + ahead) / CHUNK + 1)};
}

/* Counts the units of a pass from number `from` on, up to `most_parts` parts but at least one unit, with their tasks
 * and parts; returns the number of the next unit, or 0 at the end. Lists them if there is memory for that. */
long plan_blocks(struct pass *pass, long from, long most_parts, long ahead) {
    const long G = pass->key_heads;
    long number = 0;
    struct unit *units = pass->units;
    pass->unit_count = pass->task_count = pass->part_count = 0;
    for (long row = 0; row < pass->rows; row++) {
        const long lines = pass->count[row] * pass->shared;
        for (long first = 0; first < lines; first += BLOCK) {
            if (number++ < from) continue;
            struct unit unit = unit_of(pass, row, first, smaller(first + BLOCK, lines), ahead);
            const long chunks = unit.end_chunk - unit.first_chunk, parts = chunks * G * unit.lines;
            if (pass->unit_count && pass->part_count + parts > most_parts) return number - 1;
            unit.first_part = (int32_t)pass->part_count;
            for (long g = 0; units && g < G; g++) pass->left[pass->unit_count * G + g] = (int32_t)chunks;
            for (long c = 0; units && c < chunks; c++)
                pass->tasks[pass->task_count + c] =
                    (struct task){.unit = (int32_t)pass->unit_count, .chunk = (int32_t)(unit.first_chunk + c)};
            if (units) units[pass->unit_count] = unit;
            pass->unit_count++, pass->task_count += chunks, pass->part_count += parts;
        }
    }
    return 0;
}

/* Advance every row's new tokens by one slot, in a pass of chains that was planned that far: chunks that nothing sees
 * yet contribute nothing. */
void advance_blocks(struct pass *pass) {
    for (long r = 0; r < pass->rows; r++) {
        pass->base[r]++, pass->end[r]++;
        for (long i = 0; i < pass->count[r]; i++)
            pass->slot[pass->start[r] + i] = place_of(pass, r, pass->base[r] + i);
    }
}

static void run_tasks(const void *of, long first, long end) {
    const struct layer *layer = of;
    const struct pass *pass = layer->pass;
    const long G = pass->key_heads;
    for (long t = first; t < end; t++) {
        const long u = pass->tasks[t / G].unit, g = t % G;
        run_task(pass, layer, t / G, g);
        int32_t *left = pass->left + u * G + g;
        if (__atomic_sub_fetch(left, 1, __ATOMIC_ACQ_REL) == 0) {
            merge(pass, layer, pass->units + u, g);
            *left = pass->units[u].end_chunk - pass->units[u].first_chunk;
        }
    }
}

/* Sizes that callers need to prepare a pass. */
int chunk_positions(void) { return CHUNK; }
int pass_bytes(void) { return sizeof(struct pass); }
int unit_bytes(void) { return sizeof(struct unit); }

/* Write the new keys and values [N, G, .] to their slots in keys and values [G, C, .], then attend q [N, H, K] of all
 * units to output [N, H, V]. `softcap` 0 means none; `sink` may be null. */
void attend_blocks(const struct pass *pass, const float *q, const float *k, const float *v, float *keys, float *values,
                  const float *sink, float *output, float scale, float softcap) {
    const long G = pass->key_heads, C = pass->slots, K = pass->key_size, V = pass->value_size;
    for (long n = 0; n < pass->new_tokens; n++)
        for (long g = 0; g < G; g++) {
            const long place = g * C + pass->slot[n];
            memcpy(keys + place * K, k + n * pass->k_token + g * pass->k_head, K * sizeof(float));
            memcpy(values + place * V, v + n * pass->v_token + g * pass->v_head, V * sizeof(float));
        }
    const long size = G * pass->shared * V;
    for (long i = 0; i < pass->idle_count; i++) memset(output + pass->idle[i] * size, 0, size * sizeof(float));
    const struct layer layer = {pass, q, keys, values, sink, output, scale, softcap};
    do_pieces(run_tasks, &layer, pass->task_count * G, (int)pass->threads);
}
