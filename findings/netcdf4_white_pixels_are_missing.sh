#!/usr/bin/env bash
# netCDF4 1.7.5: the white pixels of an 8-bit or 16-bit picture, and weights of -127, are missing when it is read.
#
# Expected: numbers of a variable that has no `_FillValue` are read as they were written, 8 bits in any case.
# Happens: netCDF has a fill value for each type, for places never written, which for unsigned types is the largest
# number, and -127 for int8. The library masks it, so means and standard deviations leave it out. xarray keeps it.
# set_auto_mask(False) keeps it; fill_value=False, when the variable is made, does so for 8 bits only.
# Seen: the mean of a picture of 0 and 255 is 0, not 136; of int8 weights -127 and 127 it is 127, not 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python netCDF4==1.7.5.1.post1 xarray==2026.9.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import netCDF4
import numpy as np
import xarray

rng = np.random.default_rng(0)
for dtype, low, high in ((np.uint8, 0, 255), (np.uint16, 0, 65535), (np.int8, -127, 127)):
    missing = -127 if dtype == np.int8 else high
    picture = rng.choice(np.array([low, high], dtype), (32, 32))
    for options in ({}, {"fill_value": False}):
        with netCDF4.Dataset("file.nc", "w") as file:
            file.createDimension("y", 32)
            file.createDimension("x", 32)
            file.createVariable("picture", dtype, ("y", "x"), **options)[:] = picture
        with netCDF4.Dataset("file.nc") as file:
            assert file["picture"].ncattrs() == []
            found = file["picture"][:]
            file.set_auto_mask(False)
            assert (file["picture"][:] == picture).all()
        with xarray.open_dataset("file.nc") as file:
            assert (file["picture"].values == picture).all()
        print(f"{dtype.__name__} {options}: mean {picture.mean():.1f} became {found.mean():.1f}")
        if options and dtype != np.uint16:
            assert found.mean() == picture.mean()
        else:
            assert (np.ma.getmaskarray(found) == (picture == missing)).all()
            assert found.mean() == (high if dtype == np.int8 else 0)
END
