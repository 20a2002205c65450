// Where the end of a text occurred before, and what came next: hash chains over the n-grams of a ring of tokens, as
// compressors of the LZ77 family have them. `suffix_index.py` says what is asked and `suffix_index_plain.py` is the
// same in Python, statement by statement: both give the same answers.

#include <stdint.h>

#define LEVELS 4
#define MOST_LOOKS 64     // links of a chain that are followed
#define MOST_MATCHES 16   // occurrences that have a vote

static const int64_t SIZES[LEVELS] = {16, 8, 4, 2};

struct index {
    int64_t capacity;  // a power of two
    int64_t length;    // tokens so far; those before length - capacity are gone
    int64_t longest;   // of matches
    int32_t *tokens;   // [capacity], by position modulo capacity; a negative one ends a text
    int32_t *links;    // [LEVELS, capacity], by position: the end before it of n-grams with the same hash, or 0
    int32_t *heads;    // [LEVELS, capacity], by hash: the latest end of such n-grams, or 0
};

static inline int64_t at(const struct index *index, int64_t position) { return position & (index->capacity - 1); }

// Of tokens[0], tokens[-1], ..., in a ring or in a line; -1 where a text ends among them.
static int64_t hash(const int32_t *tokens, int64_t last, int64_t mask, int64_t size) {
    uint64_t mixed = 0;
    for (int64_t back = 0; back < size; back++) {
        int32_t token = tokens[(last - back) & mask];
        if (token < 0) return -1;
        mixed = (mixed + (uint64_t)token + 1) * 0x9E3779B97F4A7C15u;
        mixed ^= mixed >> 29;
    }
    return (int64_t)(mixed >> 1);
}

void suffix_extend(struct index *index, const int32_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        int64_t position = index->length;
        index->tokens[at(index, position)] = tokens[i];
        index->length = ++position;
        for (int64_t level = 0; level < LEVELS; level++) {
            int32_t *link = &index->links[level * index->capacity + at(index, position)];
            *link = 0;
            if (position < SIZES[level] || SIZES[level] > index->capacity) continue;
            int64_t key = hash(index->tokens, position - 1, index->capacity - 1, SIZES[level]);
            if (key < 0) continue;
            int32_t *head = &index->heads[level * index->capacity + at(index, key)];
            *link = *head;
            *head = (int32_t)position;
        }
    }
}

static int64_t match_length(
    const struct index *index, int64_t end, int64_t first, const int32_t *context, int64_t count
) {
    int64_t most = end - first, same = 0;
    if (most > count) most = count;
    if (most > index->longest) most = index->longest;
    while (same < most && index->tokens[at(index, end - 1 - same)] == context[count - 1 - same]) same++;
    return same;
}

// The continuation behind the longest matches of the context's end; how many tokens it has, 0 if there is no match.
// The last `ahead` tokens of the context follow the end of the index' own text. Positions before `since` do not count.
// Of every drafted token: votes for it, and how many voted.
int64_t suffix_propose(
    const struct index *index, const int32_t *context, int64_t count, int64_t ahead, int64_t since, int64_t most,
    int32_t *tokens, int32_t *votes, int32_t *voters, int64_t *match
) {
    int64_t ends[MOST_MATCHES], lengths[MOST_MATCHES], matches = 0;
    int64_t first = index->length - index->capacity;
    if (first < since) first = since;
    if (first < 0) first = 0;
    *match = 0;
    for (int64_t level = 0; level < LEVELS && !matches; level++) {
        if (count < SIZES[level] || SIZES[level] > index->capacity) continue;
        int64_t key = hash(context, count - 1, INT64_MAX, SIZES[level]);
        if (key < 0) continue;
        int64_t end = index->heads[level * index->capacity + at(index, key)], before = index->length + 1;
        for (int64_t looks = 0; looks < MOST_LOOKS && matches < MOST_MATCHES; looks++) {
            // A link older than the ring leads anywhere: ends must fall.
            if (end <= first || end >= before) break;
            before = end;
            // The end of a text is no match for itself, unless something is known to follow it.
            if (end < index->length ? index->tokens[at(index, end)] >= 0 : ahead > 0) {
                int64_t length = match_length(index, end, first, context, count);
                if (length >= SIZES[level]) {
                    int64_t place = matches++;
                    for (; place > 0 && lengths[place - 1] < length; place--) {
                        ends[place] = ends[place - 1];
                        lengths[place] = lengths[place - 1];
                    }
                    ends[place] = end;
                    lengths[place] = length;
                }
            }
            end = index->links[level * index->capacity + at(index, end)];
        }
    }
    if (!matches) return 0;
    *match = lengths[0];
    int64_t made = 0;
    for (; made < most; made++) {
        int32_t said[MOST_MATCHES];
        int64_t all = 0, best = 0, best_votes = 0;
        for (int64_t i = 0; i < matches; i++) {
            int64_t position = ends[i] + made, behind = position - index->length;
            // Behind the end of the text comes what is drafted here: so loops go on.
            if (behind < 0) said[i] = index->tokens[at(index, position)];
            else said[i] = behind < ahead ? context[count - ahead + behind] : tokens[behind - ahead];
            all += said[i] >= 0;
        }
        if (!all) break;
        for (int64_t i = 0; i < matches; i++) {
            int64_t same = 0;
            if (said[i] < 0) continue;
            for (int64_t j = 0; j < matches; j++) same += said[j] == said[i];
            if (same > best_votes) {
                best = said[i];
                best_votes = same;
            }
        }
        tokens[made] = (int32_t)best;
        votes[made] = (int32_t)best_votes;
        voters[made] = (int32_t)all;
        int64_t left = 0;
        for (int64_t i = 0; i < matches; i++)
            if (said[i] == best) ends[left++] = ends[i];
        matches = left;
    }
    return made;
}
