/* The fields of a body that has a list of prompts. Each has one value for all *items* of the batch,
 * or a list with one for each; read item by item, in order. */
#ifndef BT_ROUTER_API_LISTS_H
#define BT_ROUTER_API_LISTS_H

#include "router/api_fields.h"

typedef struct api_lists {
    const api_fields *fields; /* as they came, borrowed */
    uint32_t count;           /* of items */
    bool is_list[API_FIELDS_MAX];
    bt_json_iter iters[API_FIELDS_MAX];
} api_lists;

/* Entries of an array. */
uint64_t api_list_length(const bt_json *array);
/* The array has an array in it, or nothing but null: one value for each item of a field whose
 * values are lists themselves. */
bool api_list_is_nested(const bt_json *array);

void api_lists_init(api_lists *lists, const api_fields *fields, uint32_t count);
/* The field, an array, has one value for each item. Fails, with both lengths, when it has not. */
void api_lists_add(api_lists *lists, size_t field);
/* The fields of the next item. */
void api_lists_next(api_lists *lists, api_fields *item_out);

#endif
