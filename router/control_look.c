/* What other threads may know of the cluster: copied under a mutex, a few times a second and
 * whenever readiness changes. */
#include <string.h>

#include "router/control_internal.h"

static void add_eos(api_model *model, int32_t id) {
    for (uint32_t i = 0; i < model->eos_count; i++) {
        if (model->eos_ids[i] == id) return;
    }
    if (model->eos_count < PROTO_STOP_IDS_MAX) model->eos_ids[model->eos_count++] = id;
}

/* The tokens that end a sequence are those of the model's card and of the tokenizer's files. */
static void fill_model(const control *c, const dispatch_view *view, api_model *model) {
    const api_settings *settings = c->options.settings;
    int32_t own[TOKENIZER_EOS_MAX];
    uint32_t own_count = tokenizer_eos(settings->tokenizer, own);
    /* While nobody is joined the last cluster's model stands: requests wait for its workers. */
    if (view->vocab_size == 0 && model->is_known) return;
    memset(model, 0, sizeof(*model));
    model->is_known = view->vocab_size > 0;
    model->vocab_size = view->vocab_size;
    model->context_tokens = view->context_tokens;
    if (settings->context_max > 0 && settings->context_max < model->context_tokens)
        model->context_tokens = settings->context_max;
    model->room_tokens = model->context_tokens;
    if (view->sequence_tokens_max > 0 && view->sequence_tokens_max < model->room_tokens)
        model->room_tokens = (uint32_t)view->sequence_tokens_max;
    for (uint32_t i = 0; i < view->eos_count; i++) {
        add_eos(model, view->eos_ids[i]);
    }
    for (uint32_t i = 0; i < own_count; i++) {
        add_eos(model, own[i]);
    }
}

void control_publish(control *c) {
    api_snapshot *fresh = &c->fresh;
    dispatch_look(c->dispatch, &fresh->view);
    uint32_t count = dispatch_look_workers(c->dispatch, fresh->workers, API_WORKERS_MAX);
    fresh->worker_count = count < API_WORKERS_MAX ? count : API_WORKERS_MAX;
    fill_model(c, &fresh->view, &fresh->model);
    pthread_mutex_lock(&c->mutex);
    c->snapshot.model = fresh->model;
    c->snapshot.view = fresh->view;
    c->snapshot.worker_count = fresh->worker_count;
    memcpy(c->snapshot.workers, fresh->workers, fresh->worker_count * sizeof(fresh->workers[0]));
    pthread_mutex_unlock(&c->mutex);
    c->is_stale = false;
}

void control_get_model(control *c, api_model *out) {
    pthread_mutex_lock(&c->mutex);
    *out = c->snapshot.model;
    pthread_mutex_unlock(&c->mutex);
}

void control_get_snapshot(control *c, api_snapshot *out) {
    pthread_mutex_lock(&c->mutex);
    out->model = c->snapshot.model;
    out->view = c->snapshot.view;
    out->worker_count = c->snapshot.worker_count;
    memcpy(out->workers, c->snapshot.workers, out->worker_count * sizeof(out->workers[0]));
    pthread_mutex_unlock(&c->mutex);
}

bool control_is_ready(control *c) {
    pthread_mutex_lock(&c->mutex);
    bool is_ready = c->snapshot.view.is_ready;
    pthread_mutex_unlock(&c->mutex);
    return is_ready;
}
