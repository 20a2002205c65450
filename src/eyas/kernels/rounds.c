/* Rounds on a CPU: layouts of live tokens, and outcomes. Results are those of round_layout.py and round_outcome.py;
 * nothing is padded, and logits are packed: those of live tokens, row after row.
 *
 * Names: R rows, Q = 1 + depth tokens of a row, N live tokens, S slots, L the ring, K most drafts of a row.
 */

#include <stdint.h>
#include <string.h>

/* Structs with the same fields in exact_rounds.py. */
struct round {
    int64_t *length, *drafted;             /* [S] */
    const int64_t *limit, *follows;        /* [S] */
    int64_t *tokens;                       /* [S][L] */
    const int64_t *slot, *asked, *samples; /* [R] */
    const int64_t *drafts;                 /* [R][K] */
    const float *sure;                     /* [R][K] */
    int64_t *depth;                        /* [R] */
    const int64_t *table;                  /* [S][P] */
    int64_t ring, most, blocks;            /* L, K, P */
};

/* A layout, by row and by token. */
struct layout {
    int64_t *row, *slot, *base, *count;         /* of each live row, its index first */
    int64_t *in_cache, *position, *id, *place;  /* of each token; place: in the ring of all slots */
    int32_t *packed;                            /* the rows as attention reads them (PackedRows), in room for all */
    int64_t width;                              /* blocks of each there */
};

long round_bytes(void) { return sizeof(struct round); }
long layout_bytes(void) { return sizeof(struct layout); }

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Tokens of a row that the target verifies: none if the request is at its limit. */
static int64_t live_of(const struct round *round, int64_t row, int64_t depth) {
    const int64_t slot = round->slot[row];
    if (round->limit[slot] - round->length[slot] <= 1) return 0;
    return depth ? 1 + round->depth[row] : 1;
}

/* The tokens from each row's base on, and the ids `shift` positions after them in the ring. Blocks are listed for
 * `ahead` more. There is room for `room` rows. */
static void take(const struct round *round, struct layout *out, long rows, long room, long block_size, int64_t shift,
                 int64_t ahead) {
    long N = 0;
    out->width = 0;
    for (long r = 0; r < rows; r++) {
        const int64_t used = (out->base[r] + out->count[r] + ahead + block_size - 1) / block_size;
        out->width = used > out->width ? used : out->width;
    }
    int32_t *base = out->packed, *end = base + room, *start = end + room, *count = start + room, *blocks = count + room;
    for (long r = 0; r < rows; r++) {
        const int64_t first = out->slot[r] * round->ring, *table = round->table + out->slot[r] * round->blocks;
        base[r] = (int32_t)out->base[r], end[r] = (int32_t)(out->base[r] + out->count[r]);
        start[r] = (int32_t)N, count[r] = (int32_t)out->count[r];
        for (int64_t b = 0; b < out->width; b++) blocks[r * out->width + b] = (int32_t)table[b]; /* more than is read */
        for (int64_t p = out->base[r]; p < out->base[r] + out->count[r]; p++, N++) {
            out->in_cache[N] = table[p / block_size] * block_size + p % block_size;
            out->position[N] = p;
            out->place[N] = first + p % round->ring;
            out->id[N] = round->tokens[first + (p + shift) % round->ring];
        }
    }
}

/* The newest token of each row and its drafts. Returns the number of live rows. */
long lay_out_verify(const struct round *round, long rows, long depth, long block_size, struct layout *out) {
    long live_rows = 0, N = 0;
    for (long r = 0; r < rows; r++) {
        const int64_t live = live_of(round, r, depth), slot = round->slot[r];
        if (!live) continue;
        out->row[live_rows] = r, out->slot[live_rows] = slot;
        out->base[live_rows] = round->length[slot], out->count[live_rows] = live;
        live_rows++;
    }
    take(round, out, live_rows, rows, block_size, 0, 0);
    for (long r = 0; r < live_rows; N += out->count[r++])
        memcpy(out->id + N + 1, round->drafts + out->row[r] * round->most, (out->count[r] - 1) * sizeof(int64_t));
    return live_rows;
}

/* States that each row's drafter has not read, except the last `kept`, with the tokens after them; there must be room
 * for L of each row. With a depth, drafts per row are written back; states read always are. */
long lay_out_draft(const struct round *round, long rows, long depth, long kept, long block_size, struct layout *out) {
    long live_rows = 0;
    for (long r = 0; r < rows; r++) {
        const int64_t slot = round->slot[r], length = round->length[slot], drafted = round->drafted[slot];
        const int64_t room = round->limit[slot] - length - 1;
        const int64_t live = round->follows[slot] && room > 0 ? length - kept - drafted : 0;
        if (depth) round->depth[r] = live > 0 ? smaller(round->asked[r], room - 1) : 0;
        if (live <= 0) continue;
        out->row[live_rows] = r, out->slot[live_rows] = slot;
        out->base[live_rows] = drafted, out->count[live_rows] = live;
        round->drafted[slot] = length - kept;
        live_rows++;
    }
    take(round, out, live_rows, rows, block_size, 1, 0);
    return live_rows;
}

/* The slot of draft number `made` of each of these rows; `ahead` more may follow. */
void lay_out_next(const struct round *round, long rows, long made, long ahead, long block_size, struct layout *out) {
    for (long r = 0; r < rows; r++) {
        out->slot[r] = round->slot[out->row[r]];
        out->base[r] = round->length[out->slot[r]] + made - 1, out->count[r] = 1;
    }
    take(round, out, rows, rows, block_size, 0, ahead);
}

/* The total over all rows. */
long live_tokens(const struct round *round, long rows, long depth) {
    long N = 0;
    for (long r = 0; r < rows; r++) N += live_of(round, r, depth);
    return N;
}

/* Advance the rows by the target's tokens, packed or [R][Q]; line[R][3 + 3 depth] as in round_outcome.settle. */
void settle(const struct round *round, long rows, long depth, const int64_t *token, int packed, int64_t *line) {
    for (long r = 0; r < rows; r++, line += 3 + 3 * depth) {
        const int64_t slot = round->slot[r], live = live_of(round, r, depth), length = round->length[slot];
        const int64_t *drafts = round->drafts + r * round->most;
        int64_t accepted = 0, fresh = 0;
        while (accepted + 1 < live && token[accepted] == drafts[accepted]) accepted++;
        if (live && round->samples[r]) fresh = smaller(accepted + 1, round->limit[slot] - length - 1);
        for (int64_t i = 0; i < fresh; i++)
            round->tokens[slot * round->ring + (length + 1 + i) % round->ring] = token[i];
        round->length[slot] = length + fresh;
        line[0] = fresh, line[1] = accepted;
        for (long q = 0; q <= depth; q++) line[2 + q] = q < live || !packed ? token[q] : 0;
        for (long k = 0; k < depth; k++) {
            const double sure = round->sure[r * round->most + k];
            line[3 + depth + k] = drafts[k];
            memcpy(line + 3 + 2 * depth + k, &sure, sizeof sure);
        }
        token += packed ? live : 1 + depth;
    }
}
