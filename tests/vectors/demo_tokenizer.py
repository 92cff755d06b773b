"""Makes tests/vectors/demo_tokenizer.json: texts and the ids that Hugging Face `tokenizers` gives for
them with the demo model's vocabulary, so that a C test can compare without Python.

    BATON_DEMO_MODEL=... tests/support/python tests/vectors/demo_tokenizer.py
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "integration"))

from test_tokenizer_corpus import corpus, demo  # noqa: E402

TEXTS = [
    "", " ", "Hello, world!", "What is the capital of France?",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return x ** 2  # square\n\n\n", "1234567 + 89 = 3.14e-10", "naïve café Straße",
    "你好,世界。東京タワー", "안녕하세요 세계", "שלום עולם مرحبا", "e\u0301 \u00e9 A\u030a", "👩‍👩‍👧 🇩🇪 👍🏽",
    "\t\t\r\n  \u00a0\u3000\u180e x", "don't WE'LL i'Ve 'ſ", "a" * 100, " " * 100 + "x", "1" * 40,
    "\u0001\u007f\u0080", "\U0010ffff\ufffd\ue000",
]

if __name__ == "__main__":
    texts = TEXTS + [text for text in corpus()[::97] if len(text) <= 60][:40]
    cases = []
    for text in texts:
        for parses in (True, False):
            demo().encode_special_tokens = not parses
            cases.append({"text": text, "parses_special": parses,
                          "ids": demo().encode(text, add_special_tokens=False).ids})
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases
                       if c["parses_special"] or "<|" in c["text"])
    (HERE / "demo_tokenizer.json").write_text('{"cases":[\n' + lines + "\n]}\n", encoding="ascii")
