/* Inside of the tokenizer: its tables, how the loaders fill them, and the stages of encoding. A
 * loader calls, in this order: tokenizer_create, put_piece for each entry of the BPE vocabulary,
 * seal_pieces, put_merge by rank, put_added, the plain fields, seal. After tokenizer_seal nothing
 * changes any more. */
#ifndef BT_ROUTER_TOKENIZER_INTERNAL_H
#define BT_ROUTER_TOKENIZER_INTERNAL_H

#include "router/chat_template.h"
#include "router/tokenizer.h"

enum {
    TOKENIZER_VOCAB_MAX = 1 << 22,
    TOKENIZER_TOKEN_BYTES_MAX = 4096,   /* of one token, as its file spells it */
    TOKENIZER_POST_MAX = 4,             /* special tokens the post-processor adds on one side */
    TOKENIZER_PIECE_BYTES_MAX = 1 << 26 /* one unsplittable piece of a text */
};

/* How text is cut before merging. Names are what the fingerprint and error sentences say. */
typedef enum split_rule {
    SPLIT_RULE_WHOLE,       /* not at all */
    SPLIT_RULE_GPT2,        /* contractions, words, digit runs, signs, spaces */
    SPLIT_RULE_DIGITS_GPT2, /* each digit alone first: SmolLM, StarCoder */
    SPLIT_RULE_LLAMA3,      /* digits by threes, line ends kept with signs */
    SPLIT_RULE_QWEN2,       /* as LLAMA3 with single digits */
    SPLIT_RULE_COUNT,
} split_rule;

typedef struct split_pattern split_pattern; /* compiled, shared by all threads */
typedef struct split_scratch split_scratch; /* of one thread */

const char *split_rule_name(split_rule rule);
/* The expression as Hugging Face files spell it; false when no rule has it. */
bool split_rule_of_regex(const char *regex, split_rule *rule_out);
BT_MUST_CHECK bt_status split_pattern_create(split_rule rule, split_pattern **out, bt_error *error);
void split_pattern_destroy(split_pattern *pattern);
BT_MUST_CHECK bt_status split_scratch_create(const split_pattern *pattern, split_scratch **out);
void split_scratch_destroy(split_scratch *scratch);
/* The end of the piece that starts at `start` (< bytes) of the text, which is valid UTF-8. */
BT_MUST_CHECK bt_status split_next(const split_pattern *pattern, split_scratch *scratch,
                                   const char *text, size_t bytes, size_t start, size_t *end_out);

enum {
    TOKEN_PRESENT = 1,
    TOKEN_PIECE = 2,    /* the merges can produce it */
    TOKEN_ADDED = 4,    /* matched in the text before anything else */
    TOKEN_SPECIAL = 8,  /* an added token that only trusted text may produce */
    TOKEN_WHOLE = 16,   /* merging its own bytes gives exactly it */
    TOKEN_LSTRIP = 32,  /* an added token that eats white space before it */
    TOKEN_RSTRIP = 64,  /* and after it */
    TOKEN_SINGLE = 128, /* only between characters that are not of a word */
};

typedef struct token_entry {
    uint32_t offset; /* into tokenizer.text */
    uint32_t bytes;
    uint32_t flags;
} token_entry;

typedef struct token_slot {
    uint32_t hash;
    int32_t id; /* -1 = empty */
} token_slot;

typedef struct merge_slot {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX = empty */
    uint32_t rank;
    int32_t id; /* of the two together */
} merge_slot;

/* Added tokens as a trie; children are sibling lists, the root has a table. */
typedef struct added_node {
    int32_t id; /* -1 = no token ends here */
    uint32_t child;
    uint32_t sibling;
    uint8_t byte;
} added_node;

typedef struct added_trie {
    added_node *nodes;
    uint32_t count; /* 0 = no tokens */
    uint32_t capacity;
    uint32_t roots[256]; /* 0 = none */
} added_trie;

struct tokenizer {
    token_entry *entries;
    uint32_t vocab_count;
    uint32_t entry_capacity;
    char *text;
    size_t text_bytes;
    size_t text_capacity;
    uint32_t token_bytes_max;

    token_slot *pieces; /* by bytes; a power of two of slots */
    size_t piece_mask;
    merge_slot *merges;
    size_t merge_mask;
    uint32_t merge_count;
    int32_t byte_ids[256]; /* -1 = the vocabulary lacks the byte */
    int32_t unknown_id;    /* of such a byte; -1 = it is dropped */
    bool fuses_unknown;
    bool ignores_merges; /* a whole piece in the vocabulary is taken as it is */
    bool normalizes;     /* NFC */
    bool drops_text;     /* some text gives no token: no bound on tokens from bytes */

    split_rule rule;
    split_pattern *split;
    added_trie added;            /* matched in the text as it came */
    added_trie added_normalized; /* matched after normalisation */

    int32_t prefix_ids[TOKENIZER_POST_MAX];
    int32_t suffix_ids[TOKENIZER_POST_MAX];
    uint32_t prefix_count;
    uint32_t suffix_count;
    int32_t eos_ids[TOKENIZER_EOS_MAX];
    uint32_t eos_count;
    chat_template chat;
    uint8_t fingerprint[TOKENIZER_FINGERPRINT_BYTES];
};

/* Text of a token as its file spells it; borrowed. */
typedef struct token_text {
    const char *text;
    size_t bytes;
} token_text;

/* Building (tokenizer_vocab.c). Errors name the token, not the path: the loaders add it. */
BT_MUST_CHECK bt_status tokenizer_create(tokenizer **out);
/* `text` is in the GPT-2 byte alphabet; text that is not becomes a token that no text produces. */
BT_MUST_CHECK bt_status tokenizer_put_piece(tokenizer *t, uint64_t id, token_text text,
                                            bt_error *error);
/* An id that exists only so that the next ones keep their number. */
BT_MUST_CHECK bt_status tokenizer_put_hole(tokenizer *t, uint64_t id, bt_error *error);
BT_MUST_CHECK bt_status tokenizer_seal_pieces(tokenizer *t, size_t merges_max, bt_error *error);
BT_MUST_CHECK bt_status tokenizer_put_merge(tokenizer *t, token_text left, token_text right,
                                            bt_error *error);
/* `flags` out of SPECIAL, LSTRIP, RSTRIP, SINGLE. */
BT_MUST_CHECK bt_status tokenizer_put_added(tokenizer *t, uint64_t id, token_text text,
                                            uint32_t flags, bool is_normalized, bt_error *error);
BT_MUST_CHECK bt_status tokenizer_put_eos(tokenizer *t, int64_t id, bt_error *error);
BT_MUST_CHECK bt_status tokenizer_seal(tokenizer *t, bt_error *error);
/* The piece with these bytes, or -1. */
int32_t tokenizer_find_piece(const tokenizer *t, const char *bytes, size_t count);
/* The merge of two neighbours, or NULL. */
const merge_slot *tokenizer_find_merge(const tokenizer *t, int32_t left, int32_t right);
BT_MUST_CHECK bt_status tokenizer_compute_fingerprint(tokenizer *t);

/* The GPT-2 byte alphabet (tokenizer_alphabet.c): raw bytes of `text`, at most text.bytes of them;
 * false when a character is outside of the alphabet. */
bool byte_alphabet_decode(token_text text, char *bytes_out, size_t *count_out);

/* Merging (tokenizer_bpe.c). */
typedef struct bpe_symbol {
    int32_t id; /* -1 = merged away */
    uint32_t previous;
    uint32_t next;
} bpe_symbol;

typedef struct bpe_scratch {
    bpe_symbol *symbols;
    uint64_t *heap; /* rank << 32 | index of the left symbol */
    size_t symbol_capacity;
    size_t heap_capacity;
    size_t heap_count;
} bpe_scratch;

void bpe_scratch_fini(bpe_scratch *scratch);
/* Appends the tokens of one piece. */
BT_MUST_CHECK bt_status bpe_encode(const tokenizer *t, bpe_scratch *scratch, const char *piece,
                                   size_t bytes, token_list *list);

/* Added tokens (tokenizer_added.c). */
typedef struct added_match {
    size_t start;
    size_t end;
    int32_t id; /* -1 = none up to the end of the text */
} added_match;

BT_MUST_CHECK bt_status added_trie_put(added_trie *trie, const char *text, size_t bytes,
                                       int32_t id);
void added_trie_fini(added_trie *trie);
/* The token with exactly this text, or -1. */
int32_t added_trie_find(const added_trie *trie, const char *text, size_t bytes);
/* A walk over one text; start with *cursor = 0 and *floor = 0. */
typedef struct added_cursor {
    size_t scan;  /* where matching goes on */
    size_t floor; /* the end of the last match, white space eaten included */
} added_cursor;
added_match added_next(const tokenizer *t, const added_trie *trie, const char *text, size_t bytes,
                       bool parses_special, added_cursor *cursor);

/* Normalisation (tokenizer_nfc.c). *text_out is `text` itself when nothing changes, else points
 * into the buffer. */
typedef struct nfc_buffer {
    char *text;
    size_t text_capacity;
    size_t text_bytes;
    int32_t *points;
    size_t point_capacity;
} nfc_buffer;

void nfc_buffer_fini(nfc_buffer *buffer);
BT_MUST_CHECK bt_status nfc_normalize(nfc_buffer *buffer, const char *text, size_t bytes,
                                      const char **text_out, size_t *bytes_out);

/* Loaders. */
BT_MUST_CHECK bt_status tokenizer_load_json(const char *path, tokenizer *t, bt_error *error);
/* EOS ids and chat template from the files beside tokenizer.json; missing ones are fine. */
BT_MUST_CHECK bt_status tokenizer_load_config(const char *folder, tokenizer *t, bt_error *error);
BT_MUST_CHECK bt_status tokenizer_load_gguf(const char *path, tokenizer *t, bt_error *error);

/* Encoding of several runs of text into one list (chat needs that). */
typedef struct encode_job {
    const tokenizer *t;
    token_list *list;
    uint32_t start_count; /* of the list when the job began */
    uint32_t tokens_max;  /* 0 = no limit */
    bool parses_special;
    split_scratch *split;
    bpe_scratch bpe;
    nfc_buffer nfc;
} encode_job;

BT_MUST_CHECK bt_status encode_job_init(encode_job *job, const tokenizer *t,
                                        tokenizer_encode_options options, token_list *list);
BT_MUST_CHECK bt_status encode_job_text(encode_job *job, const char *text, size_t bytes);
BT_MUST_CHECK bt_status encode_job_id(encode_job *job, int32_t id);
/* Ends the job; when `status` is an error the list gets its old count back. Returns `status`. */
bt_status encode_job_fini(encode_job *job, bt_status status);

#endif
