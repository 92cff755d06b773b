#!/usr/bin/env python3
"""Records what Hugging Face's implementation computes in float32 with bf16-rounded weights:

    tiny_FAMILY.logits   logits of tiny random Llama, Qwen2 and Qwen3 (tests/support/tiny_model.h)
    demo_greedy.txt      greedy tokens of the demo model, with the gap between the best two logits

Read by tests/kernels/test_model_oracle.c. Run by hand, in an environment of its own:

    python3 -m venv V && V/bin/pip install torch==2.5.1 transformers==4.53.3 gguf==0.17.1 numpy==1.26.4
    V/bin/python tests/vectors/make_model_fixtures.py [DEMO_MODEL.gguf]

A .logits file is little-endian: u32 tokens T, positions P, vocabulary V; i32 ids [T]; u32 positions [P];
f32 logits [P, V], of the model's answer after ids[0 .. position]."""
import json
import pathlib
import struct
import sys

import numpy as np
import torch
import transformers

import tiny_weights

HERE = pathlib.Path(__file__).resolve().parent
SEED = 20240607
TOKENS = 80
# Around the boundaries of pages of 16, 32 and 64 tokens, and of attention tiles.
POSITIONS = [0, 1, 2, 15, 16, 30, 31, 32, 33, 47, 48, 62, 63, 64, 65, 79]
GREEDY_TOKENS = 40
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def build(family, geometry, state, dtype=torch.float32):
    make_config, make_model = CLASSES[family]
    config = make_config(
        vocab_size=geometry["vocab"], hidden_size=geometry["hidden"],
        intermediate_size=geometry["inter"], num_hidden_layers=geometry["layers"],
        num_attention_heads=geometry["heads"], num_key_value_heads=geometry["kv_heads"],
        head_dim=geometry["head_dim"], rms_norm_eps=geometry["eps"], rope_theta=geometry["theta"],
        max_position_embeddings=2048, tie_word_embeddings=geometry["tied"],
        attn_implementation="eager", torch_dtype=dtype)
    model = make_model(config).to(dtype).eval()
    tensors = {name: torch.from_numpy(np.array(value)).to(dtype) for name, value in state.items()}
    if geometry["tied"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True)
    return model


def record_tiny(family):
    geometry = tiny_weights.GEOMETRIES[family]
    state = tiny_weights.state_dict(family, SEED)
    ids = np.array([tiny_weights.mix_int(SEED + i) % geometry["vocab"] for i in range(TOKENS)])
    logits = {}
    for dtype in (torch.float32, torch.float64):
        with torch.no_grad():
            out = build(family, geometry, state, dtype)(torch.from_numpy(ids)[None]).logits[0]
        logits[dtype] = out[POSITIONS].to(torch.float64).numpy()
    reference = logits[torch.float32]
    error = np.linalg.norm(reference - logits[torch.float64]) / np.linalg.norm(reference)
    with open(HERE / f"tiny_{family}.logits", "wb") as file:
        file.write(struct.pack("<3I", TOKENS, len(POSITIONS), geometry["vocab"]))
        file.write(ids.astype("<i4").tobytes())
        file.write(np.array(POSITIONS, dtype="<u4").tobytes())
        file.write(reference.astype("<f4").tobytes())
    print(f"tiny {family}: deviation of logits {reference.std():.3f}, "
          f"float32 against float64 {error:.1e}")


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
        value = torch.from_numpy(np.array(value, dtype=np.float32)).to(torch.bfloat16).float().numpy()
        if tensor.name == "token_embd.weight":
            state["model.embed_tokens.weight"] = value
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


PROMPTS = [
    "The capital of France is",
    "<|im_start|>user\nName the planets of the solar system in order.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
]


def record_demo(path):
    import gguf
    reader = gguf.GGUFReader(path)
    heads = field(reader, "llama.attention.head_count")
    kv_heads = field(reader, "llama.attention.head_count_kv")
    hidden = field(reader, "llama.embedding_length")
    tokenizer = demo_tokenizer(reader)
    geometry = dict(
        vocab=len(field(reader, "tokenizer.ggml.tokens")), hidden=hidden,
        inter=field(reader, "llama.feed_forward_length"), layers=field(reader, "llama.block_count"),
        heads=heads, kv_heads=kv_heads, head_dim=hidden // heads,
        eps=field(reader, "llama.attention.layer_norm_rms_epsilon"),
        theta=field(reader, "llama.rope.freq_base"), tied=True)
    model = build("llama", geometry, demo_state(reader, heads, kv_heads))
    lines = ["# Greedy tokens of the demo model: prompt ids, then id:gap of each token. The texts are for",
             "# reading only. Made by make_model_fixtures.py."]
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        found, gaps = [], []
        with torch.no_grad():
            for _ in range(GREEDY_TOKENS):
                logits = model(torch.tensor([ids + found])).logits[0, -1]
                best = torch.topk(logits, 2).values
                found.append(int(logits.argmax()))
                gaps.append(float(best[0] - best[1]))
        text = tokenizer.decode(found, skip_special_tokens=False)
        lines += ["# " + json.dumps(prompt), "# " + json.dumps(text), "prompt " + " ".join(map(str, ids)),
                  "greedy " + " ".join(f"{i}:{g:.4f}" for i, g in zip(found, gaps))]
        first = next((n for n, g in enumerate(gaps) if g < 0.05), len(gaps))
        print(f"{first} of {len(gaps)} tokens before a gap below 0.05: {text!r}")
    (HERE / "demo_greedy.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in CLASSES:
        record_tiny(name)
    if len(sys.argv) > 1:
        record_demo(sys.argv[1])
