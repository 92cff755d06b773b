/* Steps in the compute thread give the bits of model_step called directly, and come back through
 * the descriptor. ThreadSanitizer watches the hand-over in its build. */
#include "kernels/compute_host.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "kernels/model/model_generate.h"

enum { PAGE_TOKENS = 16, PAGES = 8, TOKENS = 40, CAP = 64 };

static const model_geometry geometry = {.family = MODEL_FAMILY_LLAMA,
                                        .vocab_size = 300,
                                        .context_tokens = 128,
                                        .hidden_size = 32,
                                        .intermediate_size = 48,
                                        .layers = 2,
                                        .heads = 4,
                                        .kv_heads = 2,
                                        .head_dim = 8,
                                        .norm_epsilon = 1e-5F,
                                        .rope_theta = 10000.0,
                                        .has_tied_embeddings = true};

typedef struct lab {
    model *model;
    kv_page_layout kv;
    uint8_t *memory;
    model_runner_options options;
} lab;

static void set_up(lab *l) {
    bt_error error;
    assert_int_equal(model_generate(&geometry, 1, &l->model, &error), BT_OK);
    l->kv = model_kv_layout(l->model, PAGE_TOKENS, KV_DTYPE_BF16);
    l->memory = bt_calloc(PAGES, kv_page_bytes(&l->kv));
    assert_non_null(l->memory);
    l->options = (model_runner_options){.threads = 2,
                                        .tokens_max = TOKENS,
                                        .rows_max = 1,
                                        .kv = l->kv,
                                        .kv_memory = l->memory,
                                        .kv_page_count = PAGES};
}

static void tear_down(lab *l) {
    bt_free(l->memory);
    model_destroy(l->model);
}

/* A prompt of TOKENS ids over pages 5, 1, 3; everything a batch points to. */
typedef struct prompt {
    int32_t ids[TOKENS];
    uint32_t token_offsets[2], page_offsets[2], first_position, pages[3];
    uint8_t samples;
    sampler_params sampling;
    sampler_row row;
    int32_t support_ids[CAP];
    float support_logprobs[CAP];
    model_batch batch;
} prompt;

static void make_prompt(prompt *p) {
    memset(p, 0, sizeof *p);
    for (int32_t i = 0; i < TOKENS; i++)
        p->ids[i] = i * 7 % 300;
    p->token_offsets[1] = TOKENS;
    p->page_offsets[1] = 3;
    memcpy(p->pages, (uint32_t[]){5, 1, 3}, sizeof p->pages);
    p->samples = 1;
    p->sampling = (sampler_params){.temperature = 1,
                                   .top_p = 1,
                                   .top_k = 20,
                                   .mask_mode = SAMPLER_MASK_SUPPORT,
                                   .mask_max_tokens = CAP,
                                   .wants_logprob = 1,
                                   .seed = 3};
    p->row = (sampler_row){.support_ids = p->support_ids, .support_logprobs = p->support_logprobs};
    p->batch = (model_batch){.sequences = 1,
                             .tokens = TOKENS,
                             .token_offsets = p->token_offsets,
                             .token_ids = p->ids,
                             .first_positions = &p->first_position,
                             .page_offsets = p->page_offsets,
                             .page_ids = p->pages,
                             .samples = &p->samples,
                             .sampling = &p->sampling,
                             .rows = &p->row};
}

typedef struct outcome {
    uint32_t count;
    bt_status status;
} outcome;

static void on_done(void *context, bt_status status) {
    outcome *o = context;
    o->count++;
    o->status = status;
}

static void wait_done(compute *c, outcome *o) {
    const uint32_t before = o->count;
    while (o->count == before) {
        struct pollfd p = {.fd = compute_threaded_get_fd(c), .events = POLLIN};
        assert_int_equal(poll(&p, 1, -1), 1);
        compute_threaded_poll(c);
    }
}

static void steps_equal_direct_ones(void **state) {
    (void)state;
    lab l;
    set_up(&l);
    static prompt direct, threaded;
    make_prompt(&direct);
    make_prompt(&threaded);
    model_runner *runner = NULL;
    bt_error error;
    assert_int_equal(model_runner_create(l.model, &l.options, &runner, &error), BT_OK);
    assert_int_equal(model_step(runner, &direct.batch), BT_OK);
    model_runner_destroy(runner);
    memset(l.memory, 0, PAGES * kv_page_bytes(&l.kv));

    compute *c = NULL;
    outcome o = {0};
    assert_int_equal(compute_host_create(l.model, &l.options, &c, &error), BT_OK);
    c->on_done = on_done;
    c->context = &o;
    for (uint32_t round = 0; round < 20; round++) {
        make_prompt(&threaded);
        c->ops->start(c, &threaded.batch);
        assert_int_equal(o.count, round); /* never inside the call */
        wait_done(c, &o);
        assert_int_equal(o.status, BT_OK);
        assert_int_equal(threaded.row.token, direct.row.token);
        assert_int_equal(threaded.row.support_count, direct.row.support_count);
        assert_memory_equal(threaded.support_ids, direct.support_ids, sizeof direct.support_ids);
        assert_memory_equal(threaded.support_logprobs, direct.support_logprobs,
                            sizeof direct.support_logprobs);
    }
    compute_threaded_poll(c); /* nothing to report */
    assert_int_equal(o.count, 20);
    c->ops->destroy(c);
    tear_down(&l);
}

static void a_bad_batch_is_a_status(void **state) {
    (void)state;
    lab l;
    set_up(&l);
    static prompt p;
    make_prompt(&p);
    p.pages[1] = PAGES; /* no such page */
    compute *c = NULL;
    outcome o = {0};
    bt_error error;
    assert_int_equal(compute_host_create(l.model, &l.options, &c, &error), BT_OK);
    c->on_done = on_done;
    c->context = &o;
    c->ops->start(c, &p.batch);
    wait_done(c, &o);
    assert_int_equal(o.status, BT_ERR_CALLER_ARGUMENT);
    c->ops->destroy(c);
    tear_down(&l);
}

static void destroy_waits_for_a_step(void **state) {
    (void)state;
    lab l;
    set_up(&l);
    static prompt p;
    make_prompt(&p);
    compute *c = NULL;
    outcome o = {0};
    bt_error error;
    assert_int_equal(compute_host_create(l.model, &l.options, &c, &error), BT_OK);
    c->on_done = on_done;
    c->context = &o;
    c->ops->start(c, &p.batch);
    c->ops->destroy(c);
    assert_int_equal(o.count, 0);
    tear_down(&l); /* nobody uses the memory any more */
}

static void the_tail_of_a_page_is_zeroed_in_every_block(void **state) {
    (void)state;
    lab l;
    set_up(&l);
    compute *c = NULL;
    bt_error error;
    assert_int_equal(compute_host_create(l.model, &l.options, &c, &error), BT_OK);
    const size_t page_bytes = kv_page_bytes(&l.kv);
    memset(l.memory, 0xff, PAGES * page_bytes);
    c->ops->zero_tail(c, 2, 5);
    const size_t token_bytes = l.kv.head_dim * kv_element_bytes(l.kv.dtype);
    for (size_t at = 0; at < PAGES * page_bytes; at++) {
        const size_t token = at % kv_head_bytes(&l.kv) / token_bytes;
        const bool is_zero = at / page_bytes == 2 && token >= 5;
        assert_int_equal(l.memory[at], is_zero ? 0 : 0xff);
    }
    c->ops->zero_tail(c, 3, PAGE_TOKENS); /* a full page has no tail */
    assert_int_equal(l.memory[4 * page_bytes - 1], 0xff);
    c->ops->destroy(c);
    tear_down(&l);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_equal_direct_ones),
        cmocka_unit_test(a_bad_batch_is_a_status),
        cmocka_unit_test(destroy_waits_for_a_step),
        cmocka_unit_test(the_tail_of_a_page_is_zeroed_in_every_block),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
