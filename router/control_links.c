/* The workers' connections: sockets and framing on one side, the dispatch on the other. */
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "router/control_internal.h"

static void free_link(control_link *l) {
    bt_id_map_remove(&l->control->links, bt_id_of(l->id));
    proto_link_destroy(l->link);
    bt_free(l);
}

static void on_message(void *context, proto_link *link, const proto_message *message) {
    (void)link;
    control_link *l = context;
    if (l->is_closing) return;
    dispatch_on_message(l->control->dispatch, l->id, message, control_now(l->control));
}

static void on_closed(void *context, proto_link *link, bt_status status, const char *text) {
    (void)link;
    control_link *l = context;
    control *c = l->control;
    dispatch_link id = l->id;
    bool is_news = !l->is_closing;
    if (is_news)
        bt_log_debug("control", "link %llu closed: %s (%s)", (unsigned long long)id, text,
                     bt_status_string(status));
    free_link(l);
    if (is_news) dispatch_on_closed(c->dispatch, id, control_now(c));
}

static void on_accept(void *context, int fd, const char *peer) {
    control *c = context;
    control_link *l = NULL;
    if (c->links.count < c->links.count_max) l = bt_calloc(1, sizeof(*l));
    if (l == NULL) {
        bt_log_warn("control", "no room for the connection of %s", peer);
        close(fd);
        return;
    }
    l->control = c;
    l->id = c->next_link++;
    const proto_link_events events = {
        .on_message = on_message, .on_closed = on_closed, .context = l};
    const proto_link_options options = {.blocks = c->blocks};
    bt_status status =
        proto_link_create(bt_loop_get_base(c->loop), fd, &options, &events, &l->link);
    if (status != BT_OK) {
        bt_log_warn("control", "the connection of %s failed: %s", peer, bt_status_string(status));
        bt_free(l);
        return;
    }
    bt_id_map_put(&c->links, bt_id_of(l->id), l);
    dispatch_on_opened(c->dispatch, l->id, control_now(c));
}

void control_link_send(void *context, dispatch_link link, proto_message *message) {
    control *c = context;
    control_link *l = bt_id_map_get(&c->links, bt_id_of(link));
    if (l == NULL || l->is_closing) {
        proto_message_drop_payload(message);
        return;
    }
    proto_link_send(l->link, message);
}

void control_link_close(void *context, dispatch_link link) {
    control *c = context;
    control_link *l = bt_id_map_get(&c->links, bt_id_of(link));
    if (l == NULL || l->is_closing) return;
    l->is_closing = true;
    proto_link_finish(l->link);
}

bt_status control_links_open(control *c, bt_error *error) {
    const proto_listener_events events = {.on_accept = on_accept, .context = c};
    bt_status status = bt_id_map_init(&c->links, CONTROL_LINKS_MAX);
    c->next_link = 1;
    if (status != BT_OK) return bt_fail(error, status, "no memory for the workers' connections");
    return proto_listener_open(bt_loop_get_base(c->loop), &c->options.address, &events,
                               &c->listener, error);
}

void control_links_close(control *c) {
    proto_listener_close(c->listener);
    c->listener = NULL;
    for (size_t i = 0; c->links.entries != NULL && i <= c->links.mask; i++) {
        control_link *l = c->links.entries[i].value;
        if (c->links.entries[i].value == NULL) continue;
        proto_link_destroy(l->link);
        bt_free(l);
    }
    bt_id_map_fini(&c->links);
}

uint16_t control_port(const control *c) {
    return proto_listener_port(c->listener);
}
