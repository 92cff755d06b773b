/* Starts node processes (node.c) and plays the router's part between them. Every wait has a limit
 * and fails the test with the node's output. */
#ifndef BT_TESTS_HANDOFF_CONTROLLER_H
#define BT_TESTS_HANDOFF_CONTROLLER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"
#include "note.h"

enum { CONTROLLER_NODES_MAX = 6, CONTROLLER_NOTES_MAX = 256, CONTROLLER_WAIT_MS = 60000 };

typedef struct controller_node {
    pid_t process;
    int socket;
    char log[64]; /* its output */
    bool is_prefill;
    xfer_peer self;
    uint32_t address_bytes;
    uint8_t address[NOTE_ADDRESS_MAX];
    uint64_t chunks; /* the last NOTE_CHUNKS */
} controller_node;

/* A note that came and was not waited for yet. */
typedef struct controller_note {
    controller_node *from;
    note_kind kind;
    int32_t status;
    xfer_peer peer;
    uint64_t number;
    row_slot slots[NOTE_SAMPLES_MAX];
} controller_note;

typedef struct controller_options {
    const char *tls;
    const char *log_folder;
    uint32_t pages;
    size_t page_bytes;
    uint32_t cap;
    record_checksum checksum;
} controller_options;

typedef struct controller {
    controller_options options;
    controller_node nodes[CONTROLLER_NODES_MAX];
    controller_note notes[CONTROLLER_NOTES_MAX];
    uint32_t note_count;
    uint64_t next_incarnation;
    uint64_t next_number;
} controller;

void controller_init(controller *c, const controller_options *options);
/* Starts a node in place `index` and waits until it listens. ports: a range or NULL. */
controller_node *controller_start(controller *c, uint32_t index, bool is_prefill,
                                  const char *ports);
/* Connects two nodes to each other and waits until the pair is proven. */
void controller_pair(controller *c, controller_node *prefill, controller_node *decode);

/* Reserves at decode and starts at prefill; returns the sample's number, or 0 when decode was full.
 */
uint64_t controller_begin(controller *c, controller_node *prefill, controller_node *decode,
                          const sample *shape, uint32_t deadline_ms);
/* Reads what nodes say, waiting at most wait_ms for something; false: nothing came. */
bool controller_listen(controller *c, int wait_ms);
/* Takes the first stored note like that, of any peer or number when those are 0. */
bool controller_take(controller *c, const controller_node *from, note_kind kind, uint64_t number,
                     xfer_peer peer, controller_note *out);
/* As take, listening until it comes; fails the test after CONTROLLER_WAIT_MS. */
controller_note controller_wait(controller *c, const controller_node *from, note_kind kind,
                                uint64_t number, xfer_peer peer);
void controller_tell(controller *c, controller_node *to, const note *n);

/* A node's output, as an error message of the test. */
void controller_show_log(const controller_node *node);
/* SIGKILL, reaped. Its notes are forgotten. */
void controller_kill(controller *c, controller_node *node);
/* Asks a node to check itself and end; fails the test unless it ends with status 0. */
void controller_finish(controller *c, controller_node *node);
/* Kills what is left (after a failed assertion). */
void controller_fini(controller *c);

#endif
