"""Ids of our tokenizer equal those of Hugging Face `tokenizers` on a generated corpus, for the demo
model's vocabulary (from its GGUF file), Qwen3's (from the shared test data) and small ones trained here;
and rendered conversations equal what Jinja makes of the models' own templates."""

import functools
import json
import os
import pathlib
import random
import subprocess
import tempfile
import unicodedata

import gguf
import jinja2.sandbox
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors, trainers

from harness import DEMO_MODEL, IS_FEW, ROOT, TEST_BIN, Skip, case, check, equal, run_cases

SEED = 20261129
SHARED = pathlib.Path(os.environ.get("BATON_SHARED_TESTDATA", ""))
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")


def baton(model, records, *flags):
    """One answer per record, from baton-tokenize."""
    done = subprocess.run([str(TEST_BIN / "baton-tokenize"), str(model), *flags],
                          input=b"".join(record.encode() + b"\0" for record in records),
                          stdout=subprocess.PIPE, check=True)
    return done.stdout


def baton_ids(model, texts, *flags):
    lines = baton(model, texts, *flags).decode().split("\n")[:-1]
    return [[int(n) for n in line.split()] if not line.startswith("error") else line for line in lines]


def same_ids(reference, model, texts, adds_special=False, ways=(True, False)):
    """Compares with special tokens recognised and not; with few, every third text, of every kind."""
    if IS_FEW:
        texts = texts[::3]
    for parses in ways:
        reference.encode_special_tokens = not parses
        wanted = [e.ids for e in reference.encode_batch(texts, add_special_tokens=adds_special)]
        flags = ["--parse"] * parses + ["--special"] * adds_special
        got = baton_ids(model, texts, *flags)
        equal(len(got), len(wanted), "answers")
        for text, w, g in zip(texts, wanted, got):
            if w != g:
                raise AssertionError(f"parse {parses}: {text[:300]!r}: expected {w[:60]}, got {g[:60]}")
        check(sum(map(len, wanted)) > len(texts), "hardly any tokens; the case shows nothing")


# The corpus.

def is_text(c):
    return c != 0 and not 0xD800 <= c <= 0xDFFF


def random_text(rnd, pool, longest):
    return "".join(rnd.choice(pool) for _ in range(rnd.randint(1, longest)))


def prose(rnd):
    words = ("the a I you don't we'll it's they've SHOULDN'T hello World naïve café Straße élan 你好 世界 東京 "
             "안녕 สวัสดี مرحبا שלום привет γειά नमस्ते 3.14 2026 1,000,000 x86_64 foo_bar camelCase HTTP/1.1 "
             "e.g. https://example.org/a?b=c&d=%20 user@host — … “quoted” (parens) [x] {y} #1 50% $9.99 "
             "'s 'S 'LL 'ſ O'Neil rock'n'roll ... !!! ?! -- __init__ ½ ² Ⅷ ٣ ৪").split()
    gaps = [" "] * 12 + ["  ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000", "   ", ""]
    return "".join(rnd.choice(words) + rnd.choice(gaps) for _ in range(rnd.randint(1, 200)))


@functools.cache
def corpus():
    rnd = random.Random(SEED)
    everything = [chr(c) for c in range(0x110000) if is_text(c)]
    marks = [c for c in everything if unicodedata.category(c) in ("Mn", "Mc", "Me")]
    pools = [everything,
             everything[:0x3000],
             [chr(c) for c in range(0x20, 0x7F)],
             [chr(c) for c in (*range(0x4E00, 0x9FFF), *range(0x3040, 0x3100), *range(0xAC00, 0xD7A4))],
             [chr(c) for c in (*range(0x1F300, 0x1FAFF), 0x200D, 0xFE0F, *range(0x1F1E6, 0x1F200), 0x20E3)],
             marks + [chr(c) for c in range(0x41, 0x180)],
             [chr(c) for c in (*range(0x1100, 0x1200), *range(0xAC00, 0xAC40))],
             list(" \t\n\r\x0b\x0c\x85\xa0\u180e\u2028\u3000a1.'")]
    texts = [random_text(rnd, pools[i % len(pools)], 120) for i in range(4000)]
    texts += [prose(rnd) for _ in range(300)]
    texts += [unit * n for unit in (" ", "\n", "a", "1", "ab", "'", "\t ", "💩", "é", "e\u0301", "漢", "!?", "\r\n")
              for n in (1, 2, 3, 5, 17, 64, 65, 300, 5000)]
    texts += [" " * rnd.randint(0, 40) + str(rnd.randint(0, 10 ** rnd.randint(1, 30))) for _ in range(300)]
    sources = sorted((ROOT / "router").glob("*.[ch]")) + sorted((ROOT / "tests").rglob("*.py"))
    for path in sources:
        code = path.read_text(encoding="utf-8")
        texts += [code[at:at + 3000] for at in range(0, len(code), 3000)]
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "<think>", "</think>", "<tool_call>",
                "<repo_name>", "|>", "<", "user\n", "hello", " ", "\n", "  ", "12", "é", "e\u0301", "<a>", "<aa>",
                "<strip>", "<word>", "word", "ÅB"]
    texts += ["".join(rnd.choice(specials) for _ in range(rnd.randint(1, 24))) for _ in range(800)]
    return texts


@functools.cache
def every_code_point():
    """Each one of the planes in use (and some of the others) between letters, after a space and beside
    a mark, 48 to a text."""
    points = [chr(c) for c in (*range(0x34000), *range(0x34000, 0x110000, 61)) if is_text(c)]
    return ["".join(f"a{c}b {c}\u0323\u0301 {c}1" for c in points[at:at + 48])
            for at in range(0, len(points), 48)]


# The vocabularies.

@functools.cache
def demo_fields():
    if not DEMO_MODEL:
        raise Skip("BATON_DEMO_MODEL is not set")
    fields = gguf.GGUFReader(DEMO_MODEL).fields
    return {key: fields[f"tokenizer.{key}"].contents() for key in
            ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")}


@functools.cache
def demo():
    fields = demo_fields()
    tokens = fields["ggml.tokens"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)},
                                     [tuple(merge.split(" ")) for merge in fields["ggml.merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, fields["ggml.token_type"]) if kind == 3])
    return tokenizer


QWEN3 = SHARED / "tokenizers" / "qwen3"


def case_of_qwen3(function):
    """A case with the real Qwen3 vocabulary, which is no part of this repository: where it is not (see
    BATON_SHARED_TESTDATA) there is no such case."""
    if (QWEN3 / "tokenizer.json").is_file():
        return case(function)
    print(f"# {function.__name__} is left out: there is no {QWEN3}")
    return function


@functools.cache
def qwen3():
    return Tokenizer.from_file(str(QWEN3 / "tokenizer.json"))


def train(pre_tokenizer, normalizer=None, alphabet=True):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, show_progress=False, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [])
    tokenizer.train_from_iterator(corpus()[4000:4300] + corpus()[-1200:], trainer)
    return tokenizer


def split(regex, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), behavior, invert),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def same_as_saved(tokenizer, adds_special=False, change=None):
    """Saves the tokenizer (after changing its JSON), and compares our reading of the file with theirs."""
    with tempfile.TemporaryDirectory(prefix="baton-test.") as folder:
        path = pathlib.Path(folder, "tokenizer.json")
        text = json.loads(tokenizer.to_str())
        if change is not None:
            change(text)
        path.write_text(json.dumps(text), encoding="utf-8")
        same_ids(Tokenizer.from_file(str(path)), path, corpus(), adds_special)


@case
def ids_of_the_demo_model():
    same_ids(demo(), DEMO_MODEL, corpus())


@case
def ids_of_every_code_point_with_the_demo_model():
    same_ids(demo(), DEMO_MODEL, every_code_point(), ways=(True,))


@case_of_qwen3
def ids_of_qwen3():
    same_ids(qwen3(), QWEN3, corpus())


@case_of_qwen3
def ids_of_every_code_point_with_qwen3():
    same_ids(qwen3(), QWEN3, every_code_point(), ways=(True,))


@case
def ids_of_a_trained_gpt2_that_lacks_bytes():
    same_as_saved(train(pre_tokenizers.ByteLevel(add_prefix_space=False), alphabet=False))


@case
def ids_of_a_trained_llama3_with_bos_and_whole_pieces():
    tokenizer = train(split(LLAMA3))
    bos = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)])])

    def change(text):
        text["model"]["ignore_merges"] = True
    same_as_saved(tokenizer, adds_special=True, change=change)


@case
def ids_with_the_matches_of_the_split_kept():
    same_as_saved(train(split(QWEN2, "removed", True), normalizers.NFC()))


@case
def ids_with_an_unknown_token():
    def change(fuses):
        def apply(text):
            text["model"]["unk_token"] = "<|endoftext|>"
            text["model"]["fuse_unk"] = fuses
        return apply
    tokenizer = train(pre_tokenizers.ByteLevel(add_prefix_space=False), alphabet=False)
    same_as_saved(tokenizer, change=change(False))
    same_as_saved(tokenizer, change=change(True))


@case
def ids_with_every_kind_of_added_token():
    tokenizer = train(split(QWEN2), normalizers.NFC())
    tokenizer.add_tokens([AddedToken("<a>", normalized=False), AddedToken("<aa>", normalized=False),
                          AddedToken("word", single_word=True, normalized=False),
                          AddedToken("A\u030aB", normalized=True), AddedToken("hello", normalized=True)])
    tokenizer.add_special_tokens([AddedToken("<strip>", lstrip=True, rstrip=True, normalized=False),
                                  AddedToken("<word>", single_word=True, rstrip=True, normalized=False)])
    same_as_saved(tokenizer)


@case
def the_gguf_file_and_its_tokenizer_json_are_one_tokenizer():
    with tempfile.TemporaryDirectory(prefix="baton-test.") as folder:
        path = pathlib.Path(folder, "tokenizer.json")
        demo().save(str(path))
        equal(baton(path, [], "--fingerprint"), baton(DEMO_MODEL, [], "--fingerprint"), "fingerprints")
        equal(baton_ids(path, corpus()[::7]), baton_ids(DEMO_MODEL, corpus()[::7]), "ids")


def same_text(reference, model, count):
    """Random ids, so that characters are broken everywhere."""
    rnd = random.Random(SEED)
    rows = [[rnd.randrange(count) for _ in range(rnd.randint(1, 30))] for _ in range(2000)]
    wanted = [reference.decode(row, skip_special_tokens=False) for row in rows]
    rest = baton(model, [" ".join(map(str, row)) for row in rows], "--decode")
    for row, text in zip(rows, wanted):
        count, rest = rest.split(b"\n", 1)
        equal(rest[:int(count)], text.encode(), f"text of {row}")
        rest = rest[int(count):]
    equal(rest, b"", "more answers than asked for")
    check(any("\ufffd" in text for text in wanted), "nothing was broken; the case shows nothing")


@case
def text_of_random_ids_with_the_demo_model():
    same_text(demo(), DEMO_MODEL, len(demo_fields()["ggml.tokens"]))


@case_of_qwen3
def text_of_random_ids_with_qwen3():
    same_text(qwen3(), QWEN3, 151669)


def conversations():
    rnd = random.Random(SEED)
    contents = ["hi", "", "\n", "  two\n\nlines ", "\n\nHello", "naïve 漢字 💩", "e\u0301", "{{ x }} it's",
                "<think>\nhm\n</think>\n\nSo.", "\n<think>\n\n</think>\nA", "</think> odd", "1234567"]
    for _ in range(300):
        roles = ["system"] * rnd.randint(0, 1)
        roles += [rnd.choice(["user", "assistant", "user", "tool"]) for _ in range(rnd.randint(0, 5))]
        roles += ["user"] if rnd.random() < 0.8 else ["assistant"]
        yield [{"role": role, "content": rnd.choice(contents)} for role in roles]


def same_chat(reference, model, template, thinking=(None,)):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(template)
    reference.encode_special_tokens = False
    records, wanted = [], []
    for messages in conversations():
        for switch in thinking:
            more = {} if switch is None else {"enable_thinking": switch}
            text = template.render(messages=messages, add_generation_prompt=True, **more)
            wanted.append(reference.encode(text, add_special_tokens=False).ids)
            records.append(json.dumps({"messages": messages,
                                       "thinking": {None: "default", True: "on", False: "off"}[switch]}))
    for record, w, g in zip(records, wanted, baton_ids(model, records, "--chat")):
        equal(g, w, record)


@case
def conversations_of_the_demo_model_equal_its_template():
    same_chat(demo(), DEMO_MODEL, demo_fields()["chat_template"])


@case_of_qwen3
def conversations_of_qwen3_equal_its_template():
    config = json.loads((QWEN3 / "tokenizer_config.json").read_text(encoding="utf-8"))
    same_chat(qwen3(), QWEN3, config["chat_template"], (None, True, False))


if __name__ == "__main__":
    run_cases()
