/* One walker for each list, all moved on together: a batch is read in one pass over its body. */
#include "router/api_lists.h"

#include <string.h>

#include "base/assert.h"

uint64_t api_list_length(const bt_json *array) {
    bt_json_iter iter;
    bt_json item;
    uint64_t length = 0;
    bt_json_iter_init(&iter, array);
    while (bt_json_next_item(&iter, &item)) {
        length++;
    }
    return length;
}

bool api_list_is_nested(const bt_json *array) {
    bt_json_iter iter;
    bt_json item;
    bool has_null = false;
    bt_json_iter_init(&iter, array);
    while (bt_json_next_item(&iter, &item)) {
        if (item.kind != BT_JSON_NULL) return item.kind == BT_JSON_ARRAY;
        has_null = true;
    }
    return has_null;
}

void api_lists_init(api_lists *lists, const api_fields *fields, uint32_t count) {
    memset(lists, 0, sizeof(*lists));
    lists->fields = fields;
    lists->count = count;
}

void api_lists_add(api_lists *lists, size_t field) {
    const api_fields *fields = lists->fields;
    const bt_json *value = &fields->values[field];
    BT_ASSERT(value->kind == BT_JSON_ARRAY);
    const uint64_t length = api_list_length(value);
    if (length != lists->count) {
        (void)api_fail(fields->failure, 400, API_ERROR_SCHEMA,
                       "%s is a list of %llu, but there are %u prompts.", fields->names[field],
                       (unsigned long long)length, lists->count);
        return;
    }
    lists->is_list[field] = true;
    bt_json_iter_init(&lists->iters[field], value);
}

void api_lists_next(api_lists *lists, api_fields *item_out) {
    *item_out = *lists->fields;
    for (size_t field = 0; field < lists->fields->count; field++) {
        bt_json value;
        if (!lists->is_list[field]) continue;
        const bool has_one = bt_json_next_item(&lists->iters[field], &value);
        BT_ASSERT(has_one);
        item_out->values[field] = value;
        item_out->is_null[field] = value.kind == BT_JSON_NULL;
        item_out->is_given[field] = value.kind != BT_JSON_NULL;
    }
}
