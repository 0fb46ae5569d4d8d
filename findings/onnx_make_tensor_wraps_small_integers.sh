#!/usr/bin/env bash
# onnx 1.23.2: helper.make_tensor wraps numbers that do not fit int4, uint4, int2 and uint2, where int8 is an error.
#
# Expected: an error for 8 as INT4, as for 128 as INT8, or at least the largest code.
# Happens: 8 becomes -8, and 16 as UINT4 becomes 0. So a weight of the largest magnitude changes its sign, if the codes
# end at +8 because they were made with a symmetric step, or are those of unsigned bits. Floats are cut off towards 0,
# without a rounding: 2.9 is 2. In the 4-bit float 100 becomes the largest number, 6. Nothing is said, and the checker
# accepts the tensor.
# Seen: INT4 8 -9 2.9: -8 7 2; UINT4 16 -1: 0 15; INT2 2 -3: -2 1; UINT2 4: 0; FLOAT4E2M1 100: 6; INT8 128: an
# OverflowError.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 ml-dtypes==0.6.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import onnx
from onnx import TensorProto, helper, numpy_helper

WANTED = {
    "INT4": {8: -8, -9: 7, 7: 7, 2.9: 2},
    "UINT4": {16: 0, -1: 15, 15: 15},
    "INT2": {2: -2, -3: 1, 1: 1},
    "UINT2": {4: 0, 3: 3},
    "FLOAT4E2M1": {100: 6},
    "INT8": {127: 127, 128: None},
    "UINT8": {255: 255, 256: None},
}
for name, numbers in WANTED.items():
    found = {}
    for number in numbers:
        try:
            tensor = helper.make_tensor("codes", getattr(TensorProto, name), [1], [number])
        except OverflowError:
            found[number] = None
            continue
        onnx.checker.check_tensor(tensor)
        found[number] = float(numpy_helper.to_array(tensor)[0])
    print(name, *(f"{number}: {'an error' if code is None else code}" for number, code in found.items()), sep="  ")
    assert found == numbers
END
