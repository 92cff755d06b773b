"""Model files for tests/bench/run, in a folder: the demo model and a model of Qwen3-0.6B's shape
with random weights, each as BF16 and as Q8_0 GGUF. What is there already is kept.

    make_models.py FOLDER DEMO_GGUF NAME...    NAME: smollm2-bf16, smollm2-q8_0, qwen3-bf16, qwen3-q8_0
"""

import os
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants

QWEN3 = {"layers": 28, "hidden": 1024, "ffn": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocab": 151936}
BLOCK_ROWS = 4096


def quantized(rows, kind):
    """Bytes [rows, bytes of a row] of a float32 matrix, in blocks of rows to bound the memory."""
    return np.concatenate([quants.quantize(rows[i : i + BLOCK_ROWS], kind) for i in range(0, len(rows), BLOCK_ROWS)])


def add_matrix(writer, name, rows, kind):
    writer.add_tensor(name, quantized(rows, kind).view(np.uint8), raw_dtype=kind)


def copy_fields(reader, writer):
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(
            field.name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None
        )


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_demo(path, demo, kind):
    reader = gguf.GGUFReader(demo)
    writer = gguf.GGUFWriter(path, reader.get_field("general.architecture").contents())
    copy_fields(reader, writer)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        # Both engines keep bf16 weights: the 8-bit file is made of the same ones.
        rounded = quants.dequantize(quantized(values, Type.BF16), Type.BF16).astype(np.float32)
        add_matrix(writer, tensor.name, rounded, kind)
    finish(writer)


def byte_characters():
    """The 256 characters that stand for bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(others))]


def add_tokenizer(writer, vocab):
    tokens = byte_characters()
    tokens += [f"<|{i}|>" for i in range(len(tokens), vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL if i < 256 else gguf.TokenType.CONTROL for i in range(vocab)])
    writer.add_token_merges([f"{tokens[64]} {tokens[65]}"])
    writer.add_eos_token_id(vocab - 1)
    writer.add_bos_token_id(vocab - 1)


def make_qwen3(path, kind):
    shape, random = QWEN3, np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name("Qwen3-0.6B shape, random weights")
    writer.add_block_count(shape["layers"])
    writer.add_context_length(40960)
    writer.add_embedding_length(shape["hidden"])
    writer.add_feed_forward_length(shape["ffn"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    add_tokenizer(writer, shape["vocab"])

    def matrix(name, rows, columns):
        values = random.standard_normal((rows, columns), dtype=np.float32) / np.sqrt(np.float32(columns))
        add_matrix(writer, name, values, kind)

    def norm(name, width):
        writer.add_tensor(name, 1 + random.standard_normal(width, dtype=np.float32) / 8)

    hidden, ffn, dim = shape["hidden"], shape["ffn"], shape["head_dim"]
    q_width, kv_width = shape["heads"] * dim, shape["kv_heads"] * dim
    matrix("token_embd.weight", shape["vocab"], hidden)
    norm("output_norm.weight", hidden)
    for layer in range(shape["layers"]):
        at = f"blk.{layer}."
        norm(at + "attn_norm.weight", hidden)
        norm(at + "ffn_norm.weight", hidden)
        norm(at + "attn_q_norm.weight", dim)
        norm(at + "attn_k_norm.weight", dim)
        matrix(at + "attn_q.weight", q_width, hidden)
        matrix(at + "attn_k.weight", kv_width, hidden)
        matrix(at + "attn_v.weight", kv_width, hidden)
        matrix(at + "attn_output.weight", hidden, q_width)
        matrix(at + "ffn_gate.weight", ffn, hidden)
        matrix(at + "ffn_up.weight", ffn, hidden)
        matrix(at + "ffn_down.weight", hidden, ffn)
    finish(writer)


def main():
    folder, demo, names = sys.argv[1], sys.argv[2], sys.argv[3:]
    os.makedirs(folder, exist_ok=True)
    for name in names:
        model, kind = name.split("-")
        path = os.path.join(folder, name + ".gguf")
        if os.path.exists(path):
            continue
        print(f"making {path}", file=sys.stderr)
        kind = {"bf16": Type.BF16, "q8_0": Type.Q8_0}[kind]
        if model == "smollm2":
            make_demo(path + ".part", demo, kind)
        else:
            make_qwen3(path + ".part", kind)
        os.replace(path + ".part", path)


main()
