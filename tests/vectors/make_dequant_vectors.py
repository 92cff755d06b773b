#!/usr/bin/env python3
"""Records what the `gguf` package makes of random quantised blocks, in tests/vectors/dequant.blocks,
for tests/unit/kernels/test_dequant.c. Run by hand, in the environment of make_model_fixtures.py.

The file is little-endian, per type: u32 GGUF tensor type, u32 bytes, u32 weights; the bytes, as in a
GGUF file; f32 [weights]."""
import pathlib
import struct

import gguf
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
SEED = 20261129
WEIGHTS = 512
# Where each block has its halves (scale d, minimum m), which must be finite numbers.
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2],
          "Q5_K": [0, 2], "Q6_K": [208]}


def main():
    random = np.random.default_rng(SEED)
    with open(HERE / "dequant.blocks", "wb") as file:
        for name, halves in HALVES.items():
            kind = gguf.GGMLQuantizationType[name]
            block_weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            blocks = random.integers(0, 256, (WEIGHTS // block_weights, block_bytes), dtype=np.uint8)
            for at in halves:
                values = random.uniform(-2, 2, len(blocks)).astype(np.float16)
                values[0] = np.float16(-3e-6)  # below the normal halves
                blocks[:, at:at + 2] = values[:, None].view(np.uint8)
            weights = gguf.quants.dequantize(blocks, kind).astype("<f4").reshape(-1)
            assert len(weights) == WEIGHTS and np.isfinite(weights).all()
            file.write(struct.pack("<3I", kind.value, blocks.nbytes, WEIGHTS))
            file.write(blocks.tobytes())
            file.write(weights.tobytes())


if __name__ == "__main__":
    main()
