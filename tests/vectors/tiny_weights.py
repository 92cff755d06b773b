"""The tiny models of tests/support/tiny_model.h, written again in numpy: same geometry, same weights."""
import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
# In the order of model_tensor (kernels/model/model_file.h).
ROLES = ["embed_tokens", "lm_head", "norm", "input_layernorm", "q_proj", "k_proj", "v_proj", "o_proj",
         "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "post_attention_layernorm", "gate_proj",
         "up_proj", "down_proj"]

GEOMETRIES = {
    "llama": dict(vocab=320, hidden=64, inter=160, layers=2, heads=4, kv_heads=2, head_dim=16,
                  eps=1e-5, theta=1e4, tied=False),
    "qwen2": dict(vocab=320, hidden=64, inter=96, layers=3, heads=4, kv_heads=1, head_dim=16,
                  eps=1e-6, theta=1e6, tied=True),
    "qwen3": dict(vocab=336, hidden=64, inter=128, layers=2, heads=4, kv_heads=2, head_dim=32,
                  eps=1e-6, theta=1e6, tied=False),
}


def mix_int(x):
    x &= MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def mix_array(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def round_bf16(x):
    """float32 to the float32 of its bf16, ties to even; finite values only."""
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def weight(seed, role, layer, shape):
    stream = mix_int(seed + GOLDEN * (ROLES.index(role) + 32 * layer + 1))
    elements = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        hashes = mix_array(np.uint64(stream) + np.uint64(GOLDEN) * elements)
    u = ((hashes >> np.uint64(40)).astype(np.int64) - (1 << 23)).astype(np.float32) / np.float32(1 << 23)
    if role.endswith("_bias"):
        value = u * np.float32(0.5)
    elif len(shape) == 1:
        value = np.float32(1) + u * np.float32(0.25)
    else:
        gain = 3.0 if role in ("q_proj", "k_proj") else 1.5
        value = u * np.float32(gain / np.sqrt(np.float64(shape[1])))
    return round_bf16(value).reshape(shape)


def state_dict(family, seed):
    """Tensors under Hugging Face's names."""
    g = GEOMETRIES[family]
    hidden, q, kv = g["hidden"], g["heads"] * g["head_dim"], g["kv_heads"] * g["head_dim"]
    out = {"model.embed_tokens.weight": weight(seed, "embed_tokens", 0, (g["vocab"], hidden)),
           "model.norm.weight": weight(seed, "norm", 0, (hidden,))}
    if not g["tied"]:
        out["lm_head.weight"] = weight(seed, "lm_head", 0, (g["vocab"], hidden))
    matrices = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    for layer in range(g["layers"]):
        p = f"model.layers.{layer}."
        for role in ("input_layernorm", "post_attention_layernorm"):
            out[p + role + ".weight"] = weight(seed, role, layer, (hidden,))
        for role, shape in matrices.items():
            out[p + f"self_attn.{role}.weight"] = weight(seed, role, layer, shape)
        if family == "qwen2":
            for letter, rows in (("q", q), ("k", kv), ("v", kv)):
                out[p + f"self_attn.{letter}_proj.bias"] = weight(seed, letter + "_bias", layer, (rows,))
        if family == "qwen3":
            for letter in "qk":
                out[p + f"self_attn.{letter}_norm.weight"] = weight(seed, letter + "_norm", layer,
                                                                    (g["head_dim"],))
        for role, shape in (("gate_proj", (g["inter"], hidden)), ("up_proj", (g["inter"], hidden)),
                            ("down_proj", (hidden, g["inter"]))):
            out[p + f"mlp.{role}.weight"] = weight(seed, role, layer, shape)
    return out
