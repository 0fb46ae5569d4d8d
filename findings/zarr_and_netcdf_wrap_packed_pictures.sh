#!/usr/bin/env bash
# numcodecs 0.16.6, netCDF4 1.7.5, xarray 2026.9.0: floats packed to 8 bits with a scale wrap around beyond the range.
#
# Expected: with a scale of 0.01, uint8 holds 0 to 2.55, and 2.6 becomes 2.55, as a quantizer makes it, or is an error.
# Happens: FixedScaleOffset (a filter of Zarr), scale_factor of netCDF4, and xarray's encoding divide, round, and cast
# to the type, which keeps the low 8 bits: a highlight is black. Nothing is said by numcodecs and xarray. numcodecs'
# Quantize computes in the type of its numbers: with 2 decimals, a float16 from 512 on is infinite.
# Seen: 2.6 becomes 0.04 in all three, and 1.3 of int8 becomes -1.26; 600 of float16 becomes inf.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python numcodecs==0.16.6 netCDF4==1.7.5.1.post1 xarray==2026.9.0 \
    numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import netCDF4
import numcodecs
import numpy as np
import xarray


def of_numcodecs(numbers, dtype):
    codec = numcodecs.FixedScaleOffset(0, 100, "f4", dtype)
    return codec.decode(codec.encode(numbers))


def of_netcdf4(numbers, dtype):
    with netCDF4.Dataset("file.nc", "w") as file:
        file.createDimension("x", len(numbers))
        variable = file.createVariable("numbers", dtype, ("x",), fill_value=False)
        variable.scale_factor = 0.01
        variable[:] = numbers
    with netCDF4.Dataset("file.nc") as file:
        return np.asarray(file["numbers"][:])


def of_xarray(numbers, dtype):
    data = xarray.Dataset({"numbers": ("x", numbers)})
    data.to_netcdf("file.nc", encoding={"numbers": {"dtype": dtype, "scale_factor": 0.01}})
    with xarray.open_dataset("file.nc") as file:
        return file["numbers"].values


for store in (of_numcodecs, of_netcdf4, of_xarray):
    bright, signed = store(np.float32([0, 1, 2.54, 2.6]), "u1"), store(np.float32([0, -1, 1.2, 1.3]), "i1")
    print(f"{store.__name__}: 2.54 and 2.6 became", *bright[2:].round(4), "and 1.2 and 1.3", *signed[2:].round(4))
    assert np.allclose(bright, [0, 1, 2.54, 0.04], atol=1e-4)
    assert np.allclose(signed, [0, -1, 1.2, -1.26], atol=1e-4)

codec = numcodecs.Quantize(2, "f2")
found = codec.decode(codec.encode(np.float16([0.11, 500, 600])))
print("numcodecs.Quantize: 0.11, 500 and 600 became", *found)
assert abs(found[0] - 0.11) < 0.005 and found[1] == 500 and np.isposinf(found[2])
END
