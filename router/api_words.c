/* The lists behind a prompt and the salt of the prefix cache. The ids of a bias list are unique and
 * sorted here, because the sampler wants them unique and the order says nothing; of the ids that
 * log-probabilities were asked for each travels once, and the reply has them as they were listed. A
 * salt is the first half of the SHA-256 of both strings, each with its length before it, so that no
 * two pairs of strings give the same text. */
#include "router/api_words.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/evp.h>

#include "base/little_endian.h"
#include "base/mem.h"

enum { OPENAI_BIAS_MAX = 100, ID_DIGITS_MAX = 10 };

typedef struct bias {
    int32_t id;
    uint32_t order; /* as the client gave them */
    float value;
} bias;

/* ---- logit_bias ------------------------------------------------------------------------------ */

/* "42" -> 42; -1 for what is no token id. */
static int64_t read_key(const bt_json *key) {
    const char *text = key->text + 1;
    size_t digits = key->bytes - 2;
    int64_t id = 0;
    if (digits == 0 || digits > ID_DIGITS_MAX) return -1;
    for (size_t i = 0; i < digits; i++) {
        if (text[i] < '0' || text[i] > '9') return -1;
        id = id * 10 + (text[i] - '0');
    }
    return id;
}

static bool read_bias(api_fields *fields, const char *name, const api_model *model,
                      const api_request *request, const bt_json *key, const bt_json *value,
                      bias *out) {
    int key_bytes = key->bytes < 42 ? (int)key->bytes - 2 : 40;
    int64_t id = read_key(key);
    double number;
    if (id < 0 || id >= (int64_t)model->vocab_size)
        return api_fail(fields->failure, 400, API_ERROR_GENERATE,
                        "%s must has keys in [0, %lld], got %.*s.", name,
                        (long long)model->vocab_size - 1, key_bytes, key->text + 1);
    if (!bt_json_get_double(value, &number))
        return api_fail(fields->failure, 400, API_ERROR_SCHEMA,
                        "%s of token %lld must be a number, got %s.", name, (long long)id,
                        bt_json_kind_name(value->kind));
    bool is_openai = request->kind != API_GENERATE;
    bool is_good = is_openai ? fabs(number) <= OPENAI_BIAS_MAX : isfinite((float)number);
    if (!is_good)
        return api_fail(fields->failure, 400, API_ERROR_GENERATE,
                        "%s of token %lld must be %s, got %.*s.", name, (long long)id,
                        is_openai ? "in [-100, 100]" : "a finite 32-bit number",
                        (int)(value->bytes < 40 ? value->bytes : 40), value->text);
    out->id = (int32_t)id;
    out->value = (float)number;
    return true;
}

static int compare_biases(const void *left, const void *right) {
    const bias *a = left, *b = right;
    if (a->id != b->id) return a->id < b->id ? -1 : 1;
    return a->order < b->order ? -1 : 1;
}

/* The last of each id stays. */
static uint32_t sort_biases(bias *biases, uint32_t count) {
    uint32_t kept = 0;
    if (count > 0) qsort(biases, count, sizeof(*biases), compare_biases);
    for (uint32_t i = 0; i < count; i++) {
        if (i + 1 == count || biases[i + 1].id != biases[i].id) biases[kept++] = biases[i];
    }
    return kept;
}

/* Ids, then the bits of the values. */
static bt_status store_biases(api_request *request, const bias *biases, uint32_t count) {
    bt_status status = BT_OK;
    for (uint32_t i = 0; i < count && status == BT_OK; i++) {
        status = token_list_append(&request->biases, biases[i].id);
    }
    for (uint32_t i = 0; i < count && status == BT_OK; i++) {
        int32_t bits;
        memcpy(&bits, &biases[i].value, sizeof(bits));
        status = token_list_append(&request->biases, bits);
    }
    request->generation.bias_count = count;
    return status;
}

/* Under construction, in the order in which they came. */
typedef struct bias_list {
    bias *biases; /* [PROTO_BIASES_MAX] */
    uint32_t count;
} bias_list;

static bool add_bias(api_fields *fields, const char *name, bias_list *list, bias one) {
    if (list->count == PROTO_BIASES_MAX)
        return api_fail(fields->failure, 400, API_ERROR_GENERATE, "%s has more than %d entries.",
                        name, PROTO_BIASES_MAX);
    one.order = list->count;
    list->biases[list->count++] = one;
    return true;
}

static bool read_biases(api_fields *fields, size_t field, const api_model *model,
                        const api_request *request, bias_list *list) {
    const bt_json *object = &fields->values[field];
    const char *name = fields->names[field];
    bt_json_iter iter;
    bt_json key, value;
    if (!fields->is_given[field]) return true;
    if (object->kind != BT_JSON_OBJECT)
        return api_fail(fields->failure, 400, API_ERROR_SCHEMA, "%s must be an object, got %s.",
                        name, bt_json_kind_name(object->kind));
    bt_json_iter_init(&iter, object);
    while (bt_json_next_field(&iter, &key, &value)) {
        bias one = {0};
        if (!read_bias(fields, name, model, request, &key, &value, &one) ||
            !add_bias(fields, name, list, one))
            return false;
    }
    return true;
}

/* Behind the others, so that they count. */
static bool read_disallowed(api_fields *fields, const bt_json *ids, const api_model *model,
                            bias_list *list) {
    static const char NAME[] = "custom_params.token_ids";
    bt_json_iter iter;
    bt_json item;
    bt_json_iter_init(&iter, ids);
    while (bt_json_next_item(&iter, &item)) {
        int64_t id;
        if (!bt_json_get_int64(&item, false, &id) || id < 0 || id >= (int64_t)model->vocab_size)
            return api_fail(fields->failure, 400, API_ERROR_GENERATE,
                            "%s must be a list of token ids in [0, %lld], got %.*s.", NAME,
                            (long long)model->vocab_size - 1,
                            (int)(item.bytes < 40 ? item.bytes : 40), item.text);
        const bias one = {.id = (int32_t)id, .value = -INFINITY};
        if (!add_bias(fields, NAME, list, one)) return false;
    }
    return true;
}

void api_bias_read(api_fields *fields, size_t field, const bt_json *disallowed,
                   const api_model *model, api_request *request) {
    if (fields->failure->http_status != 0) return;
    if (!fields->is_given[field] && disallowed == NULL) return;
    bias_list list = {.biases = bt_calloc(PROTO_BIASES_MAX, sizeof(bias))};
    bool is_good = list.biases != NULL && read_biases(fields, field, model, request, &list);
    if (is_good && disallowed != NULL) is_good = read_disallowed(fields, disallowed, model, &list);
    if (is_good)
        is_good = store_biases(request, list.biases, sort_biases(list.biases, list.count)) == BT_OK;
    bt_free(list.biases);
    if (!is_good)
        (void)api_fail(fields->failure, 503, API_ERROR_GENERATE, "the router is out of memory");
}

/* ---- token_ids_logprob ----------------------------------------------------------------------- */

static bt_status add_logprob_id(api_request *request, int32_t id) {
    token_list *ids = &request->logprob_ids;
    uint32_t place = 0;
    bt_status status = BT_OK;
    while (place < ids->count && ids->ids[place] != id) {
        place++;
    }
    if (place == ids->count) status = token_list_append(ids, id);
    if (status == BT_OK) status = token_list_append(&request->logprob_order, (int32_t)place);
    return status;
}

void api_logprob_ids_read(api_fields *fields, size_t field, const api_model *model,
                          api_request *request) {
    const bt_json *list = &fields->values[field];
    const char *name = fields->names[field];
    bt_json_iter iter;
    bt_json item;
    if (fields->failure->http_status != 0 || !fields->is_given[field]) return;
    if (list->kind != BT_JSON_ARRAY) {
        (void)api_fail(fields->failure, 400, API_ERROR_SCHEMA,
                       "%s must be a list of token ids, got %s.", name,
                       bt_json_kind_name(list->kind));
        return;
    }
    bt_json_iter_init(&iter, list);
    while (bt_json_next_item(&iter, &item)) {
        int64_t id;
        bool is_id =
            bt_json_get_int64(&item, false, &id) && id >= 0 && id < (int64_t)model->vocab_size;
        if (!is_id) {
            (void)api_fail(fields->failure, 400, API_ERROR_SCHEMA,
                           "%s must be a list of token ids in [0, %lld], got %.*s.", name,
                           (long long)model->vocab_size - 1,
                           (int)(item.bytes < 40 ? item.bytes : 40), item.text);
        } else if (request->logprob_order.count == PROTO_LOGPROB_IDS_MAX) {
            (void)api_fail(fields->failure, 400, API_ERROR_GENERATE, "%s has more than %d ids.",
                           name, PROTO_LOGPROB_IDS_MAX);
        } else if (add_logprob_id(request, (int32_t)id) != BT_OK) {
            (void)api_fail(fields->failure, 503, API_ERROR_GENERATE, "the router is out of memory");
        }
        if (fields->failure->http_status != 0) return;
    }
    request->generation.logprob_id_count = request->logprob_ids.count;
}

/* ---- cache_salt, extra_key ------------------------------------------------------------------- */

static bool add_string(EVP_MD_CTX *hash, const char *text) {
    uint8_t length[8];
    size_t bytes = strlen(text);
    bt_store_le64(length, bytes);
    return EVP_DigestUpdate(hash, length, sizeof(length)) == 1 &&
           EVP_DigestUpdate(hash, text, bytes) == 1;
}

static bool hash_salt(const char *salt, const char *extra_key, uint64_t out[2]) {
    uint8_t digest[EVP_MAX_MD_SIZE];
    EVP_MD_CTX *hash = EVP_MD_CTX_new();
    bool is_good = hash != NULL && EVP_DigestInit_ex(hash, EVP_sha256(), NULL) == 1 &&
                   add_string(hash, salt) && add_string(hash, extra_key) &&
                   EVP_DigestFinal_ex(hash, digest, NULL) == 1;
    EVP_MD_CTX_free(hash);
    if (!is_good) return false;
    out[0] = bt_load_le64(digest);
    out[1] = bt_load_le64(digest + 8);
    /* Zeros mean that there is no salt. */
    if (out[0] == 0 && out[1] == 0) out[0] = 1;
    return true;
}

void api_salt_read(api_fields *fields, size_t salt, size_t extra_key, api_request *request) {
    char texts[2][API_SALT_MAX + 1] = {"", ""};
    api_get_string(fields, salt, texts[0], sizeof(texts[0]));
    api_get_string(fields, extra_key, texts[1], sizeof(texts[1]));
    if (fields->failure->http_status != 0 || (texts[0][0] == 0 && texts[1][0] == 0)) return;
    if (!hash_salt(texts[0], texts[1], request->generation.cache_salt))
        (void)api_fail(fields->failure, 503, API_ERROR_GENERATE, "the router is out of memory");
}

/* ---- words ----------------------------------------------------------------------------------- */

static bt_status append_all(token_list *to, const token_list *from) {
    bt_status status = BT_OK;
    for (uint32_t i = 0; i < from->count && status == BT_OK; i++) {
        status = token_list_append(to, from->ids[i]);
    }
    return status;
}

bt_status api_words_join(api_request *request) {
    const uint32_t prompt_tokens = request->prompt.count;
    bt_status status = append_all(&request->prompt, &request->biases);
    if (status == BT_OK) status = append_all(&request->prompt, &request->logprob_ids);
    request->prompt.count = prompt_tokens;
    return status;
}
