/* The host device: instruction set, pool and one scratch per thread. */
#include "kernels/host/dev_host_internal.h"

#include "base/mem.h"

/* Floats of scratch that one attention item of `rows` query rows needs: two states, scores, q, and
 * one tile of K and V. Laid out in op_attention.c. */
static size_t attention_floats(uint32_t rows, uint32_t width) {
    const size_t per_row = 2 * ((size_t)width + 2) + OP_ATTENTION_TILE + width;
    return rows * per_row + 2 * (size_t)OP_ATTENTION_TILE * width;
}

static bt_status create_scratch(dev_host *dev, uint32_t threads) {
    const size_t matmul = 2 * (size_t)HOST_BLOCK_ROWS * PACK_PANEL_COLUMNS;
    const size_t attention = attention_floats(dev->attention_rows, dev->width_max);
    dev->scratch_floats = (matmul > attention ? matmul : attention) + 64;
    dev->scratch_floats = dev->scratch_floats / 64 * 64;
    size_t bytes;
    if (!bt_mul_size(dev->scratch_floats * sizeof(float), threads, &bytes))
        return BT_ERR_WORKER_MEMORY;
    dev->scratch = bt_calloc_aligned(HOST_ALIGN_BYTES, bytes);
    dev->claims = bt_calloc_aligned(HOST_ALIGN_BYTES, threads * sizeof *dev->claims);
    return dev->scratch == NULL || dev->claims == NULL ? BT_ERR_WORKER_MEMORY : BT_OK;
}

bt_status dev_host_create(const dev_host_options *options, dev_host **out, bt_error *error) {
    const host_isa *isa = host_isa_find(options->isa);
    if (isa == NULL)
        return bt_fail(error, BT_ERR_CALLER_UNSUPPORTED,
                       "instruction set '%s' is unknown or not available on this processor",
                       options->isa);
    dev_host *dev = bt_calloc(1, sizeof *dev);
    if (dev == NULL) return bt_fail(error, BT_ERR_WORKER_MEMORY, "out of memory");
    dev->isa = isa;
    dev->width_max = host_round_up(options->head_dim_max, PACK_PANEL_COLUMNS);
    dev->attention_rows =
        options->group_max > HOST_ATTENTION_ROWS ? options->group_max : HOST_ATTENTION_ROWS;
    bt_status status = pool_create(options->threads, &dev->workers);
    if (status == BT_OK) status = create_scratch(dev, options->threads);
    if (status != BT_OK) {
        dev_host_destroy(dev);
        return bt_fail(error, status, "cannot start a pool of %u threads: %s", options->threads,
                       bt_status_string(status));
    }
    *out = dev;
    return BT_OK;
}

void dev_host_destroy(dev_host *dev) {
    if (dev == NULL) return;
    pool_destroy(dev->workers);
    bt_free(dev->scratch);
    bt_free(dev->claims);
    bt_free(dev);
}

uint32_t dev_host_threads(const dev_host *dev) {
    return pool_threads(dev->workers);
}

const char *dev_host_isa_name(const dev_host *dev) {
    return dev->isa->name;
}

const char *dev_host_isa_at(uint32_t index) {
    const host_isa *isa = host_isa_at(index);
    return isa == NULL ? NULL : isa->name;
}

void dev_host_run(dev_host *dev, uint32_t items,
                  void (*fn)(void *context, uint32_t item, uint32_t thread), void *context) {
    pool_run(dev->workers, items, fn, context);
}
