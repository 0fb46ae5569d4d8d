#!/usr/bin/env bash
# PaddlePaddle 3.3.1: arrays of uint16 become bfloat16 by their bits: 65535 is NaN, 100 is 9e-39.
#
# Expected: the numbers, in any type that holds them, as uint8, int16 and int32 keep them, or an error, as uint32 and
# uint64 raise it. 16-bit pictures are read as uint16 by NumPy, OpenCV and tifffile.
# Happens: to_tensor, DataLoader and Tensor give a tensor of bfloat16, the bits of which are the codes. Most pixels
# become numbers near zero, bright ones negative, the brightest NaN. Nothing is said. numpy() gives the codes back, so
# that a round trip looks right.
# Seen, for 0, 1, 100, 16256, 16384, 40000, 65535: 0, 9.2e-41, 9.2e-39, 1, 2, -6.4e-22, NaN, by to_tensor, Tensor and
# DataLoader; int32 and float32: the numbers. Mean of a ramp from 0 to 65535: NaN.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python paddlepaddle==3.3.1 numpy==2.4.6 setuptools==80.9.0
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import paddle

codes = np.array([0, 1, 100, 16256, 16384, 40000, 65535], np.uint16)
bits = (codes.astype(np.uint32) << 16).view(np.float32)


class Pictures(paddle.io.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, place):
        return codes


row = next(iter(paddle.io.DataLoader(Pictures(), batch_size=2)))[0]
ways = {"to_tensor": paddle.to_tensor(codes), "Tensor": paddle.Tensor(codes), "DataLoader": row}
for name, tensor in ways.items():
    found = tensor.astype("float32").numpy()
    print(f"found {name}:", tensor.dtype, *(f"{number:.1e}" for number in found))
    assert tensor.dtype == paddle.bfloat16 and np.array_equal(found, bits, equal_nan=True)
    assert np.array_equal(tensor.numpy(), codes)
for kind in (np.int32, np.float32):
    assert np.array_equal(paddle.to_tensor(codes.astype(kind)).astype("float32").numpy(), codes)
assert np.array_equal(paddle.to_tensor(codes[:3].astype(np.uint8)).astype("float32").numpy(), codes[:3])
ramp = paddle.to_tensor(np.arange(65536, dtype=np.uint16)).astype("float32").mean()
print("found mean of the ramp:", float(ramp))
assert np.isnan(float(ramp))
for kind in (np.uint32, np.uint64):
    try:
        paddle.to_tensor(codes.astype(kind))
    except ValueError:
        continue
    raise AssertionError(f"{kind} was accepted")
END
