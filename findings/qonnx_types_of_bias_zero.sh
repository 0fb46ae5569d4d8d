#!/usr/bin/env bash
# qonnx 1.0.0: the data type FLOAT<4,3,0> is FLOAT<4,3,7>, and FIXED<8,4> has 16 values, not 256.
#
# FLOAT<E,M,B> has E bits of exponent and M of mantissa, and B is subtracted from the exponent. FIXED<8,4> has 8 bits, 4
# of them before the point.
# Expected: with each lower bias the largest number doubles, so that of FLOAT<4,3,0> is 1.875 * 2^15 = 61440. FIXED<8,4>
# has the 2^8 values from -8 to 7.9375.
# Happens: a bias of 0 counts as none, and 7 takes its place, also in the name, which files keep. The count of values of
# a fixed-point type is the width of its range. Nothing is said.
# Seen, as name and largest number: FLOAT<4,3,1> 30720; FLOAT<4,3,0> FLOAT<4,3,7> 480; as values: INT8 256, FIXED<8,4>
# 16, FIXED<8,0> 1.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python qonnx==1.0.0 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - <<'END'
import numpy as np
from qonnx.core.datatype import DataType

for name, wanted in (("FLOAT<4,3,2>", 15360), ("FLOAT<4,3,1>", 30720), ("FLOAT<4,3,0>", 480)):
    dtype = DataType[name]
    print(name, "is", dtype.name, "largest", dtype.max())
    assert dtype.max() == wanted
assert dtype.name == "FLOAT<4,3,7>"
assert not dtype.allowed(np.float32(512))

for name, wanted in (("INT8", 256), ("FIXED<8,4>", 16), ("FIXED<8,0>", 1)):
    dtype = DataType[name]
    print(name, "from", dtype.min(), "to", dtype.max(), "values", dtype.get_num_possible_values())
    assert dtype.get_num_possible_values() == wanted
steps = np.arange(-128, 128) / 16
assert len(steps) == 256 and DataType["FIXED<8,4>"].allowed(steps).all()
END
