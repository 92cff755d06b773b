/* Folders of weights made here: whole ones, and every way in which index and shards disagree. */
#include "base/safetensors_set.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "base/fault.h"
#include "base/json_file.h"
#include "tests/support/safetensors_writer.h"

static int set_up(void **state) {
    static test_folder folder;
    folder = test_folder_make();
    *state = &folder;
    return 0;
}

static int tear_down(void **state) {
    test_folder_remove(*state);
    return 0;
}

/* A file with the named tensors (up to a NULL), each of one bf16 value: its place in the list. */
static void write_shard(const test_folder *folder, const char *file, const char *const *names) {
    safetensors_writer w = {0};
    for (uint16_t i = 0; names[i] != NULL; i++) {
        test_bytes data = {0};
        test_bytes_add_u16(&data, i);
        safetensors_writer_tensor(&w, names[i], "BF16", 0, 1, &data);
        test_bytes_fini(&data);
    }
    test_bytes bytes = safetensors_writer_finish(&w);
    assert_int_equal(test_bytes_write(&bytes, folder->path, file), BT_OK);
    test_bytes_fini(&bytes);
    safetensors_writer_fini(&w);
}

static void write_index(const test_folder *folder, const char *text) {
    test_bytes bytes = {0};
    test_bytes_add_text(&bytes, text);
    assert_int_equal(test_bytes_write(&bytes, folder->path, "model.safetensors.index.json"), BT_OK);
    test_bytes_fini(&bytes);
}

static void write_two_shards(const test_folder *folder) {
    write_shard(folder, "one.safetensors", (const char *const[]){"b", "d", NULL});
    write_shard(folder, "two.safetensors", (const char *const[]){"c", "a", "unnamed", NULL});
}

static const char good_index[] =
    "{\"metadata\": {\"total_size\": 8}, \"weight_map\": {\"d\": \"one.safetensors\", \"a\": "
    "\"two.safetensors\", \"b\": \"one.safetensors\", \"c\": \"two.safetensors\"}}";

static void shards_are_one_table(void **state) {
    const test_folder *folder = *state;
    static const char *const names[] = {"a", "b", "c", "d", "unnamed"};
    static const uint16_t values[] = {1, 0, 0, 1, 2};
    bt_safetensors_set *set = NULL;
    bt_error error = {0};
    write_two_shards(folder);
    write_index(folder, good_index);
    if (bt_safetensors_set_open(folder->path, &set, &error) != BT_OK) fail_msg("%s", error.text);
    assert_int_equal(bt_safetensors_set_count(set), BT_ARRAY_COUNT(names));
    for (size_t i = 0; i < BT_ARRAY_COUNT(names); i++) {
        uint16_t value;
        const bt_safetensors_tensor *tensor = bt_safetensors_set_at(set, i);
        assert_string_equal(tensor->name, names[i]);
        assert_ptr_equal(bt_safetensors_set_find(set, names[i]), tensor);
        memcpy(&value, tensor->data, sizeof value);
        assert_int_equal(value, values[i]);
    }
    assert_null(bt_safetensors_set_find(set, "e"));
    bt_safetensors_set_close(set);
}

static void a_single_file_goes_before_an_index(void **state) {
    const test_folder *folder = *state;
    bt_safetensors_set *set = NULL;
    write_shard(folder, "model.safetensors", (const char *const[]){"x", NULL});
    write_index(folder, "not even JSON");
    assert_int_equal(bt_safetensors_set_open(folder->path, &set, NULL), BT_OK);
    assert_int_equal(bt_safetensors_set_count(set), 1);
    bt_safetensors_set_close(set);
}

static void check_refusal(const test_folder *folder, const char *sentence) {
    bt_safetensors_set *set = NULL;
    bt_error error = {0};
    const bt_status status = bt_safetensors_set_open(folder->path, &set, &error);
    if (status != BT_ERR_CALLER_FILE || strstr(error.text, sentence) == NULL)
        fail_msg("wanted '%s', got %d '%s'", sentence, status, error.text);
    assert_null(set);
}

static void what_does_not_fit_together_is_refused(void **state) {
    const test_folder *folder = *state;
    static const struct {
        const char *index;
        const char *sentence;
    } cases[] = {
        {"", "model.safetensors.index.json: is empty"},
        {"{\"weight_map\": {\"a\": ", "malformed JSON"},
        {"{\"weight_map\": {\"a\": \"one.safetensors\", \"a\": \"two.safetensors\"}}",
         "duplicate object key"},
        {"[]", "is not a JSON object"},
        {"{}", "weight_map is missing, empty or not an object"},
        {"{\"weight_map\": {}}", "weight_map is missing, empty or not an object"},
        {"{\"weight_map\": [\"a\"]}", "weight_map is missing, empty or not an object"},
        {"{\"weight_map\": {\"a\": 3}}", "not the name of a .safetensors file in this folder"},
        {"{\"weight_map\": {\"a\": \"../one.safetensors\"}}",
         "not the name of a .safetensors file"},
        {"{\"weight_map\": {\"a\": \"/etc/one.safetensors\"}}", "not the name of a .safetensors"},
        {"{\"weight_map\": {\"a\": \"x/../one.safetensors\"}}", "not the name of a .safetensors"},
        {"{\"weight_map\": {\"a\": \"..\\\\one.safetensors\"}}", "not the name of a .safetensors"},
        {"{\"weight_map\": {\"a\": \".safetensors\"}}", "not the name of a .safetensors file"},
        {"{\"weight_map\": {\"a\": \"config.json\"}}", "not the name of a .safetensors file"},
        {"{\"weight_map\": {\"a\": \"\"}}", "not the name of a .safetensors file"},
        {"{\"weight_map\": {\"b\": \"one.safetensors\", \"a\": \"three.safetensors\"}}",
         "shard three.safetensors, named by the index, is missing"},
        {"{\"weight_map\": {\"b\": \"one.safetensors\", \"e\": \"two.safetensors\"}}",
         "the index says that tensor e is in two.safetensors, which lacks it"},
        {"{\"weight_map\": {\"b\": \"two.safetensors\", \"d\": \"one.safetensors\"}}",
         "the index says that tensor b is in two.safetensors, which lacks it"},
        {"{\"weight_map\": {\"b\": \"one.safetensors\", \"c\": \"twice.safetensors\"}}",
         "tensor b is in both one.safetensors and twice.safetensors"},
        {"{\"weight_map\": {\"b\": \"one.safetensors\", \"c\": \"cut.safetensors\"}}",
         "cut.safetensors: truncated"},
        {"{\"weight_map\": {\"b\": \"folder.safetensors\"}}", "folder.safetensors: is a folder"},
    };
    test_bytes cut = {0};
    char path[400];
    write_two_shards(folder);
    write_shard(folder, "twice.safetensors", (const char *const[]){"c", "b", NULL});
    test_bytes_add_u64(&cut, 1000);
    assert_int_equal(test_bytes_write(&cut, folder->path, "cut.safetensors"), BT_OK);
    test_bytes_fini(&cut);
    (void)snprintf(path, sizeof path, "%s/folder.safetensors", folder->path);
    assert_int_equal(mkdir(path, 0700), 0);
    for (size_t i = 0; i < BT_ARRAY_COUNT(cases); i++) {
        write_index(folder, cases[i].index);
        check_refusal(folder, cases[i].sentence);
    }
    assert_int_equal(remove(path), 0);
}

static void there_is_a_limit_of_files(void **state) {
    const test_folder *folder = *state;
    test_bytes text = {0};
    bt_safetensors_set *set = NULL;
    bt_error error = {0};
    test_bytes_add_text(&text, "{\"weight_map\": {\"t\": \"0.safetensors\"");
    for (int i = 1; i <= BT_SAFETENSORS_FILES_MAX; i++)
        test_bytes_print(&text, ", \"t%d\": \"%d.safetensors\"", i, i);
    test_bytes_add_text(&text, "}}");
    assert_int_equal(test_bytes_write(&text, folder->path, "model.safetensors.index.json"), BT_OK);
    for (int i = 0; i <= BT_SAFETENSORS_FILES_MAX; i++) {
        char file[40];
        char name[20];
        (void)snprintf(file, sizeof file, "%d.safetensors", i);
        (void)snprintf(name, sizeof name, "t%d", i);
        write_shard(folder, file, (const char *const[]){i == 0 ? "t" : name, NULL});
    }
    assert_int_equal(bt_safetensors_set_open(folder->path, &set, &error), BT_ERR_CALLER_LIMIT);
    assert_non_null(strstr(error.text, "more than 1024 files"));
    test_bytes_fini(&text);
}

#ifdef BT_FAULT
static void failed_allocations_are_reported(void **state) {
    const test_folder *folder = *state;
    bt_status status = BT_ERR_WORKER_MEMORY;
    uint64_t nth = 0;
    write_two_shards(folder);
    write_index(folder, good_index);
    while (status != BT_OK) {
        bt_safetensors_set *set = NULL;
        bt_fault_set(BT_FAULT_ALLOC, ++nth);
        status = bt_safetensors_set_open(folder->path, &set, NULL);
        bt_fault_set(BT_FAULT_ALLOC, 0);
        assert_true(status == BT_OK || status == BT_ERR_WORKER_MEMORY);
        bt_safetensors_set_close(set);
    }
    assert_true(nth > 8);
}
#endif

#define CASE(function) cmocka_unit_test_setup_teardown(function, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        CASE(shards_are_one_table),
        CASE(a_single_file_goes_before_an_index),
        CASE(what_does_not_fit_together_is_refused),
        CASE(there_is_a_limit_of_files),
#ifdef BT_FAULT
        CASE(failed_allocations_are_reported),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
