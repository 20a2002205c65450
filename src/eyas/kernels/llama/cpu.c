/* The layers of a decoder over one pass, in one call: the steps of block.py in order; what a drafter does before its
 * only layer and after it, like the fused drafter; and a chain of its drafts, depth after depth.
 *
 * Little is computed between two products. But Python code there finds the CPU's caches full of weights, and takes
 * several times as long as elsewhere, which for a token or two is much of the whole pass.
 *
 * The steps themselves are compiled elsewhere (elementwise.c, packed_linear.c, quantised_linear.c, attention/cpu.c),
 * and come here as pointers, so every number equals that of the same steps called one by one, to the last bit.
 *
 * Names: N tokens, D hidden size, H query heads, G key heads, K head dim, R rotary dim, I intermediate size.
 */

#include <stdint.h>
#include <string.h>
#include <time.h>

/* Phases that can be timed; cpu.py has the same. */
enum { PRODUCTS, HEAD, ATTENTION, NORMS, GATES, PHASES };

struct steps {
    void (*norm)(const float *x, long x_stride, long N, long D, const float *weight, float eps, float *y, long y_stride,
                 int threads);
    void (*product)(const float *x, long M, long K, const char *panels, int halved, const float *bias, long N, float *y,
                    int threads);
    void (*quantised_product)(const float *x, long M, long K, const void *parts, long part_count, float *y,
                              long y_stride, void *workspace, int threads);
    void (*norm_heads)(float *x, long N, long B, long K, long stride, const float *weight, float eps, int threads);
    void (*rotate)(const float *x, long N, long B, long K, long R, long stride, const float *cos, const float *sin,
                   float *y, int threads);
    void (*attend)(const void *wave, const float *q, const float *k, const float *v, float *keys, float *values,
                   const float *sink, float *output, float scale, float softcap);
    void (*gate)(const float *x, long N, long I, int activation, float *y, int threads);
    void (*most_likely)(const float *x, long N, long V, int64_t *place, float *chance, int threads);
    void (*advance)(void *wave);
    void (*packed_rows)(const void *part, long K, const int64_t *ids, long count, float *y); /* of an embedding */
};

/* Structs with the same fields in cpu.py. */
struct product {
    const char *panels;
    const float *bias;
    const void *parts; /* of a quantised product; null: panels and bias are float */
    int64_t inputs, outputs, halved, part_count;
};

struct norm {
    const float *weight; /* null: none */
    float eps;
};

struct layer {
    struct norm attention_norm, mlp_norm;               /* [D]: before products */
    struct norm attention_output_norm, mlp_output_norm; /* [D]: before outputs are added */
    struct norm qk_norm;                                /* [H + G][K] */
    float *keys, *values;                               /* of the cache */
    const float *sink;                                  /* [H]: sink logits of attention; null: none */
    struct product qkv, output, gate_up, down;
    int64_t window, rotation; /* index of the pass's rotation */
    int64_t activation;
    float scale, softcap;
};

struct run {
    const struct steps *steps;
    const struct layer *layers;
    const void *const *waves; /* attention over the pass: in every layer one call for each wave of its window */
    const int64_t *wave_ends; /* the end of every window's waves */
    float *const *states;     /* [layer_count + 1]: destinations of x before each layer and after the last; null: none */
    const float *cos, *sin;   /* [rotations][N][R] */
    const float *input;       /* the input of the first layer's products; null: the norm of x, as in all others */
    float *x;                 /* [N][D]: input and output */
    float *memory;            /* numbers_per_token for every token, and the workspace of quantised products */
    double *spent;            /* [PHASES]: seconds are added here; null: not timed */
    int64_t layer_count, state_stride;
    int64_t tokens, hidden, heads, key_heads, head_dim, rotary_dim, intermediate, threads;
};

/* Embedding, last norm and head of a target: tokens in, logits after some of them out. */
struct ends {
    const float *embedding; /* [V][D]; null: it is packed */
    const void *packed_embedding;
    const int64_t *token;   /* [N] */
    const int64_t *kept;    /* [M]: the tokens whose logits are wanted; null: all */
    struct norm norm;       /* [D] */
    struct product head;    /* D to V */
    float *normed;          /* [M][D] */
    float *logits;          /* [M][V] */
    int64_t kept_count;     /* M */
};

/* A drafter's depth: the inputs of its layer, and the norm after it. `run.input`, `run.cos` and `run.sin` are
 * written here. */
struct depth {
    const float *embedding;            /* [V][D]; null: it is packed */
    const void *packed_embedding;
    const float *cos, *sin;            /* [positions][R] */
    const int64_t *token, *position;   /* [N] */
    const float *hidden;               /* [N][D] */
    struct norm token_norm, hidden_norm, last_norm; /* [D] */
    float *normed;                     /* [N][D]: the norm of the state after the layer */
    int64_t normed_residual;           /* whether the residual of the layer is the normed state */
};

/* The first depth's input: the target's states of several layers side by side, combined into one. */
struct fusion {
    const float *states;      /* [N][count * size] */
    struct norm all_norm;     /* [count * size] */
    const struct norm *norms; /* [count], each [size]; null: none */
    struct product linear;    /* to D, `depth.hidden` */
    float *normed;            /* [N][count * size] */
    int64_t count, size;
};

/* A chain of drafts: at every depth the likeliest token, which the next depth reads. */
struct chain {
    struct product head;       /* D to the draft vocabulary, W */
    const int64_t *target_ids; /* [W] */
    int64_t *position;         /* [N]: of the next depth; `depth.position` */
    float *logits;             /* [N][W] */
    int64_t *token;            /* [depths][N]: drafted, as target ids */
    float *chance;             /* [depths][N]: their probability by a softmax */
    int64_t depths, feeds_normed; /* whether the next depth reads the normed state */
    float logit_scale;
};

long run_bytes(void) { return sizeof(struct run); }
long layer_bytes(void) { return sizeof(struct layer); }
long ends_bytes(void) { return sizeof(struct ends); }
long depth_bytes(void) { return sizeof(struct depth); }
long fusion_bytes(void) { return sizeof(struct fusion); }
long chain_bytes(void) { return sizeof(struct chain); }

long numbers_per_token(long D, long H, long G, long K, long I) { return 2 * D + (3 * H + 3 * G) * K + 3 * I; }

static double begun(const struct run *run) {
    struct timespec time;
    if (!run->spent) return 0;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static void spend(const struct run *run, int phase, double since) {
    if (run->spent) run->spent[phase] += begun(run) - since;
}

static void multiply_rows(const struct run *run, const struct product *by, const float *x, long rows, float *y, int phase) {
    const double since = begun(run);
    if (by->parts) {
        float *workspace = run->memory + run->tokens * numbers_per_token(run->hidden, run->heads, run->key_heads,
                                                                         run->head_dim, run->intermediate);
        run->steps->quantised_product(x, rows, by->inputs, by->parts, by->part_count, y, by->outputs, workspace,
                                      (int)run->threads);
    } else
        run->steps->product(x, rows, by->inputs, by->panels, (int)by->halved, by->bias, by->outputs, y,
                            (int)run->threads);
    spend(run, phase, since);
}

static void multiply(const struct run *run, const struct product *by, const float *x, float *y) {
    multiply_rows(run, by, x, run->tokens, y, PRODUCTS);
}

static void norm(const struct run *run, const struct norm *by, const float *x, float *y) {
    const long D = run->hidden;
    const double since = begun(run);
    run->steps->norm(x, D, run->tokens, D, by->weight, by->eps, y, D, (int)run->threads);
    spend(run, NORMS, since);
}

/* x += more, which is normed first if the layer does that */
static void add(const struct run *run, float *more, const struct norm *by) {
    float *restrict x = run->x;
    const long count = run->tokens * run->hidden;
    if (by->weight) norm(run, by, more, more);
    for (long i = 0; i < count; i++) x[i] += more[i];
}

static void note_state(const struct run *run, long layer) {
    float *state = run->states ? run->states[layer] : 0;
    const long D = run->hidden;
    for (long n = 0; state && n < run->tokens; n++)
        memcpy(state + n * run->state_stride, run->x + n * D, D * sizeof(float));
}

void run_layers(const struct run *run) {
    const long N = run->tokens, D = run->hidden, K = run->head_dim, R = run->rotary_dim, I = run->intermediate;
    const long H = run->heads, G = run->key_heads, B = H + G;
    const int threads = (int)run->threads;
    float *normed = run->memory, *more = normed + N * D;
    float *qkv = more + N * D, *turned = qkv + N * (B + G) * K, *attended = turned + N * B * K;
    float *gate_up = attended + N * H * K, *gated = gate_up + N * 2 * I;

    for (long l = 0; l < run->layer_count; l++) {
        const struct layer *layer = run->layers + l;
        const float *input = l ? 0 : run->input;
        note_state(run, l);

        if (!input) norm(run, &layer->attention_norm, run->x, normed);
        multiply(run, &layer->qkv, input ? input : normed, qkv);
        const double attends = begun(run);
        if (layer->qk_norm.weight)
            run->steps->norm_heads(qkv, N, B, K, (B + G) * K, layer->qk_norm.weight, layer->qk_norm.eps, threads);
        const long turn = layer->rotation * N * R;
        run->steps->rotate(qkv, N, B, K, R, (B + G) * K, run->cos + turn, run->sin + turn, turned, threads);
        for (long w = layer->window ? run->wave_ends[layer->window - 1] : 0; w < run->wave_ends[layer->window]; w++)
            run->steps->attend(run->waves[w], turned, turned + H * K, qkv + B * K, layer->keys, layer->values,
                               layer->sink, attended, layer->scale, layer->softcap);
        spend(run, ATTENTION, attends);
        multiply(run, &layer->output, attended, more);
        add(run, more, &layer->attention_output_norm);

        norm(run, &layer->mlp_norm, run->x, normed);
        multiply(run, &layer->gate_up, normed, gate_up);
        const double gates = begun(run);
        run->steps->gate(gate_up, N, I, (int)layer->activation, gated, threads);
        spend(run, GATES, gates);
        multiply(run, &layer->down, gated, more);
        add(run, more, &layer->mlp_output_norm);
    }
    note_state(run, run->layer_count);
}

/* A whole pass: x is written here. */
void run_target(const struct run *run, const struct ends *ends) {
    const long N = run->tokens, D = run->hidden, M = ends->kept_count;
    if (ends->embedding)
        for (long n = 0; n < N; n++) memcpy(run->x + n * D, ends->embedding + ends->token[n] * D, D * sizeof(float));
    else
        run->steps->packed_rows(ends->packed_embedding, D, ends->token, N, run->x);
    run_layers(run);
    for (long m = 0; ends->kept && m < M; m++)
        memcpy(ends->normed + m * D, run->x + ends->kept[m] * D, D * sizeof(float));
    run->steps->norm(ends->kept ? ends->normed : run->x, D, M, D, ends->norm.weight, ends->norm.eps, ends->normed, D,
                     (int)run->threads);
    multiply_rows(run, &ends->head, ends->normed, M, ends->logits, HEAD);
}

/* The normed embedding of every token and, beside it, its normed state; x is either the latter or the state itself. */
static void enter(const struct run *run, const struct depth *depth) {
    const long N = run->tokens, D = run->hidden, R = run->rotary_dim;
    const int threads = (int)run->threads;
    float *input = (float *)run->input;
    for (long n = 0; n < N; n++) {
        const float *embedded = depth->embedding + depth->token[n] * D;
        if (!depth->embedding) {
            run->steps->packed_rows(depth->packed_embedding, D, depth->token + n, 1, run->memory);
            embedded = run->memory;
        }
        run->steps->norm(embedded, D, 1, D, depth->token_norm.weight, depth->token_norm.eps, input + n * 2 * D, 2 * D, 1);
        memcpy((float *)run->cos + n * R, depth->cos + depth->position[n] * R, R * sizeof(float));
        memcpy((float *)run->sin + n * R, depth->sin + depth->position[n] * R, R * sizeof(float));
    }
    run->steps->norm(depth->hidden, D, N, D, depth->hidden_norm.weight, depth->hidden_norm.eps, input + D, 2 * D, threads);
    for (long n = 0; n < N; n++) {
        const float *residual = depth->normed_residual ? input + n * 2 * D + D : depth->hidden + n * D;
        if (residual != run->x + n * D) memcpy(run->x + n * D, residual, D * sizeof(float));
    }
}

void run_depth(const struct run *run, const struct depth *depth) {
    enter(run, depth);
    run_layers(run);
    norm(run, &depth->last_norm, run->x, depth->normed);
}

/* The first depth, from the target's states; `depth->hidden` is written here. */
void run_read(const struct run *run, const struct depth *depth, const struct fusion *fusion) {
    const long N = run->tokens, size = fusion->size, width = fusion->count * size;
    const float *states = fusion->states;
    if (fusion->all_norm.weight) {
        const struct norm *by = &fusion->all_norm;
        run->steps->norm(states, width, N, width, by->weight, by->eps, fusion->normed, width, (int)run->threads);
        states = fusion->normed;
    }
    for (long i = 0; fusion->norms && i < fusion->count; i++) {
        const struct norm *by = fusion->norms + i;
        run->steps->norm(states + i * size, width, N, size, by->weight, by->eps, fusion->normed + i * size, width,
                         (int)run->threads);
    }
    multiply(run, &fusion->linear, fusion->norms ? fusion->normed : states, (float *)depth->hidden);
    run_depth(run, depth);
}

/* `first` is the second depth without its tokens; the first draft follows from `first->normed`. */
void run_chain(const struct run *run, const struct depth *first, const struct chain *chain) {
    const long N = run->tokens, W = chain->head.outputs;
    struct depth depth = *first;
    for (long made = 1;; made++) {
        int64_t *token = chain->token + (made - 1) * N;
        multiply_rows(run, &chain->head, depth.normed, N, chain->logits, HEAD);
        if (chain->logit_scale != 1.0f)
            for (long i = 0; i < N * W; i++) chain->logits[i] *= chain->logit_scale;
        run->steps->most_likely(chain->logits, N, W, token, chain->chance + (made - 1) * N, (int)run->threads);
        for (long n = 0; n < N; n++) token[n] = chain->target_ids[token[n]];
        if (made == chain->depths) return;
        if (made > 1) { /* one further, after the state of the depth before */
            depth.hidden = chain->feeds_normed ? depth.normed : run->x;
            for (long n = 0; n < N; n++) chain->position[n]++;
            for (long w = 0; w < run->wave_ends[0]; w++) run->steps->advance((void *)run->waves[w]);
        }
        depth.token = token;
        run_depth(run, &depth);
    }
}
