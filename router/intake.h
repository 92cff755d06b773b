/* The tokenizer threads: they read and tokenize request bodies, so that a huge one never stands in
 * the way of other streams. Each HTTP thread gives jobs to them in turn over bounded rings and gets
 * them back on rings of its own. */
#ifndef BT_ROUTER_INTAKE_H
#define BT_ROUTER_INTAKE_H

#include "base/ring.h"
#include "router/api_request.h"
#include "router/control.h"

typedef struct intake intake;

/* One body to read. The giver fills the first part and keeps the job until it is back. */
typedef struct intake_job {
    api_body body;
    /* Filled by the tokenizer thread. */
    bool is_good;
    api_batch batch;     /* is_good; the giver's */
    api_failure failure; /* not is_good */
} intake_job;

typedef struct intake_options {
    const api_settings *settings;
    control *control;      /* knows the model */
    uint32_t threads;      /* of the intake */
    uint32_t http_threads; /* that give jobs */
    uint32_t depth;        /* jobs of one HTTP thread at one tokenizer thread */
} intake_options;

BT_MUST_CHECK bt_status intake_create(const intake_options *options, intake **out);
BT_MUST_CHECK bt_status intake_start(intake *in);
/* Ends the threads; jobs that are not back yet stay where they are, with their givers. */
void intake_stop(intake *in);
void intake_destroy(intake *in);

/* On the HTTP thread `http_thread`. false: every tokenizer thread has its hands full. */
BT_MUST_CHECK bool intake_give(intake *in, uint32_t http_thread, intake_job *job);
/* Rings to watch, one of each tokenizer thread, and what comes back on them (NULL = nothing). */
bt_ring *intake_ring(intake *in, uint32_t http_thread, uint32_t thread);
intake_job *intake_next(intake *in, uint32_t http_thread, uint32_t thread);

#endif
