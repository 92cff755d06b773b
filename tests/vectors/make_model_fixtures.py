#!/usr/bin/env python3
"""Records what Hugging Face's implementation computes in float32 with bf16-rounded weights:

    tiny_NAME.logits   logits of a tiny random model of each kind (NAMES; tests/support/tiny_model.h)
    tiny_greedy.txt    greedy tokens of each after some prompts, with the gap between the best two logits
    demo_greedy.txt    the same of the demo model

Read by tests/kernels/test_model_oracle.c. The tiny models are the folders that the tiny-model program
writes, read by the library itself. Run by hand, in an environment of its own:

    python3 -m venv V && V/bin/pip install torch==2.5.1 transformers==4.57.1 gguf==0.17.1 numpy==1.26.4
    V/bin/python tests/vectors/make_model_fixtures.py [--demo DEMO_MODEL.gguf]

With --live, which the test model_live does, nothing is recorded: models of another seed are made, and
the test is run against them.

A .logits file is little-endian: u32 tokens T, positions P, vocabulary V; i32 ids [T]; u32 positions [P];
f32 logits [P, V], of the model's answer after ids[0 .. position]; f32 [P, V], the same where attention
sees K and V rounded to bf16."""
import argparse
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SEED = 20240607
NAMES = ["llama", "smollm2", "mistral", "qwen2", "qwen3", "llama-bias", "llama-linear", "llama-llama3",
         "llama-yarn", "qwen2-yarn", "qwen3-yarn", "mistral-yarn"]
TOKENS = 250
# Around the boundaries of pages, of attention tiles and of the window, and far beyond the context
# that the scaled ones are scaled from (64).
POSITIONS = [0, 1, 15, 16, 23, 24, 31, 32, 63, 64, 65, 127, 128, 191, 192, 249]
GREEDY_TOKENS = 64
PROMPT_LENGTHS = [1, 2, 3, 5, 8, 12, 16, 17, 23, 25, 31, 32, 33, 48, 64, 65, 90, 120, 150, 190]


def mix(x):
    """splitmix64's finalizer."""
    mask = (1 << 64) - 1
    x &= mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def load(folder, dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager").eval()


def draft(model, sequences, tokens):
    """Greedy tokens as the library generates them: padded on the left, with its cache."""
    width = max(map(len, sequences))
    ids = torch.tensor([[0] * (width - len(s)) + s for s in sequences])
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens,
                         eos_token_id=None, pad_token_id=0)
    return out[:, width:].tolist()


def verify(model, prompt, found):
    """Follows a draft with one pass over all of it, without cache or padding, and mends it where the
    pass says otherwise: what is returned is what every step alone would choose."""
    while True:
        with torch.no_grad():
            answer = model(torch.tensor([prompt + found[:-1]]), use_cache=False).logits[0]
        best = torch.topk(answer[len(prompt) - 1:], 2)
        chosen = best.indices[:, 0].tolist()
        wrong = next((i for i in range(GREEDY_TOKENS) if chosen[i] != found[i]), None)
        if wrong is None:
            return found, (best.values[:, 0] - best.values[:, 1]).tolist()
        found = found[:wrong] + [chosen[wrong]]
        if len(found) < GREEDY_TOKENS:
            found += draft(model, [prompt + found], GREEDY_TOKENS - len(found))[0]


def greedy(model, prompts):
    """(tokens, gaps between the best two logits) of each prompt."""
    drafts = draft(model, prompts, GREEDY_TOKENS)
    return [verify(model, prompt, found) for prompt, found in zip(prompts, drafts)]


def case_lines(prompt, found, gaps):
    return ["prompt " + " ".join(map(str, prompt)),
            "greedy " + " ".join(f"{i}:{g:.3g}" for i, g in zip(found, gaps))]


def with_rounded_kv(model, run):
    """What run() gives while the model's attention rounds K and V to bf16, as pages of bf16 do."""
    module = sys.modules[type(model).__module__]
    attention = module.eager_attention_forward
    module.eager_attention_forward = lambda layer, q, k, v, *rest, **named: attention(
        layer, q, k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype), *rest, **named)
    try:
        return run()
    finally:
        module.eager_attention_forward = attention


def record_logits(name, folder, seed, out):
    models = {dtype: load(folder, dtype) for dtype in (torch.float32, torch.float64)}
    vocab = models[torch.float32].config.vocab_size
    ids = np.array([mix(seed + i) % vocab for i in range(TOKENS)])

    def answer(model):
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)[None], use_cache=False).logits[0]
        return logits[POSITIONS].to(torch.float64).numpy()

    reference = answer(models[torch.float32])
    rounded = with_rounded_kv(models[torch.float32], lambda: answer(models[torch.float32]))
    norm = np.linalg.norm(reference)
    error = np.linalg.norm(reference - answer(models[torch.float64])) / norm
    with open(out / f"tiny_{name}.logits", "wb") as file:
        file.write(struct.pack("<3I", TOKENS, len(POSITIONS), vocab))
        file.write(ids.astype("<i4").tobytes())
        file.write(np.array(POSITIONS, dtype="<u4").tobytes())
        file.write(reference.astype("<f4").tobytes())
        file.write(rounded.astype("<f4").tobytes())
    print(f"tiny {name}: deviation of logits {reference.std():.3f}, "
          f"float32 against float64 {error:.1e}, KV in bf16 "
          f"{np.linalg.norm(reference - rounded) / norm:.1e}", flush=True)
    return models[torch.float32], vocab


def record_tiny(program, seed, out):
    lines = [f"# Greedy tokens of tiny models of seed {seed}: prompt ids, then id:gap of each token. Made by",
             "# make_model_fixtures.py.", f"seed {seed}"]
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([program, name, folder, "--seed", str(seed)], check=True,
                           stdout=subprocess.DEVNULL)
            model, vocab = record_logits(name, folder, seed, out)
        lines.append(f"model {name}")
        prompts = [[mix(mix(seed + 1000 * (n + 1)) + i) % vocab for i in range(length)]
                   for n, length in enumerate(PROMPT_LENGTHS)]
        answers = greedy(model, prompts)
        for prompt, (found, gaps) in zip(prompts, answers):
            lines += case_lines(prompt, found, gaps)
        print(f"    smallest gap {min(min(gaps) for _, gaps in answers):.2g}", flush=True)
    (out / "tiny_greedy.txt").write_text("\n".join(lines) + "\n")


def field(reader, key):
    return reader.fields[key].contents()


def demo_state(reader, heads, kv_heads):
    """The GGUF's tensors as Hugging Face's, dequantised and rounded to bf16."""
    import gguf
    names = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    state = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        value = value.reshape([int(d) for d in reversed(tensor.shape)])
        value = torch.from_numpy(np.array(value, dtype=np.float32)).to(torch.bfloat16).float()
        if tensor.name == "token_embd.weight":
            state["model.embed_tokens.weight"] = state["lm_head.weight"] = value
            continue
        if tensor.name == "output_norm.weight":
            state["model.norm.weight"] = value
            continue
        _, layer, role, _ = tensor.name.split(".")
        if role in ("attn_q", "attn_k"):  # undo the converter's interleaving of the rope halves
            count = heads if role == "attn_q" else kv_heads
            value = value.reshape(count, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        state[f"model.layers.{layer}.{names[role]}.weight"] = value
    return state


def demo_model(reader):
    heads = field(reader, "llama.attention.head_count")
    kv_heads = field(reader, "llama.attention.head_count_kv")
    config = transformers.LlamaConfig(
        vocab_size=len(field(reader, "tokenizer.ggml.tokens")),
        hidden_size=field(reader, "llama.embedding_length"),
        intermediate_size=field(reader, "llama.feed_forward_length"),
        num_hidden_layers=field(reader, "llama.block_count"), num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_theta=field(reader, "llama.rope.freq_base"), max_position_embeddings=2048,
        tie_word_embeddings=True, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(demo_state(reader, heads, kv_heads), strict=True)
    return model


def demo_tokenizer(reader):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    tokens = field(reader, "tokenizer.ggml.tokens")
    types = field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False)
                                  for t, kind in zip(tokens, types) if kind == 3])
    return tokenizer


def chat(text, system="You are a helpful AI assistant named SmolLM, trained by Hugging Face"):
    first = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{first}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = [
    "The capital of France is",
    chat("Name the planets of the solar system in order.", None),
    chat("What is 12 + 30?"),
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    chat("Write a haiku about rain.", None),
    "Water boils at",
    "import numpy as np\n\ndef softmax(x):\n",
    chat("Explain why the sky is blue to a child."),
    chat("List three uses of a paper clip."),
    "Q: Who wrote Hamlet?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    chat("Translate 'good morning' into French, German and Spanish."),
    "The three laws of motion, which Isaac Newton published in 1687, are",
    "SELECT name, COUNT(*) FROM orders",
    chat("Give me a short recipe for pancakes."),
    "In 1969, the first human being to walk on the Moon",
    chat("Is seven a prime number? Answer yes or no, then say why.", None),
    "# Shopping list\n\n- apples\n-",
]


def record_demo(path, out):
    import gguf
    reader = gguf.GGUFReader(path)
    tokenizer = demo_tokenizer(reader)
    model = demo_model(reader)
    lines = ["# Greedy tokens of the demo model: prompt ids, then id:gap of each token. The texts are for",
             "# reading only. Made by make_model_fixtures.py."]
    ids = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    for prompt, prompt_ids, (found, gaps) in zip(PROMPTS, ids, greedy(model, ids)):
        text = tokenizer.decode(found, skip_special_tokens=False)
        lines += ["# " + json.dumps(prompt), "# " + json.dumps(text)] + case_lines(prompt_ids, found, gaps)
        print(f"smallest gap {min(gaps):.2g}: {text!r}", flush=True)
    (out / "demo_greedy.txt").write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny-model", default=ROOT / "build/tests/tiny-model")
    parser.add_argument("--demo", help="record the demo model, this GGUF file, and no tiny ones")
    parser.add_argument("--live", metavar="TEST", help="run this program on models of another seed")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    if options.demo:
        record_demo(options.demo, HERE)
        return 0
    if not options.live:
        record_tiny(options.tiny_model, options.seed, HERE)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(f"seed {options.seed}")
        record_tiny(options.tiny_model, options.seed, pathlib.Path(folder))
        return subprocess.run([options.live], check=False, cwd=ROOT,
                              env={**os.environ, "BATON_MODEL_VECTORS": folder}).returncode


if __name__ == "__main__":
    sys.exit(main())
