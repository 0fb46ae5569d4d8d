#!/usr/bin/env bash
# scikit-learn 1.9.1: KMeans puts centers far outside of data with few distinct numbers, and coremltools uses it.
#
# Expected: with more clusters than distinct numbers, each number gets its own center, as with 16 clusters here. KMeans
# warns that it found fewer distinct clusters than asked for, possibly because of duplicate points, and that is all.
# Happens: where clusters stay empty, it moves points to them, and some centers then lie outside of all points. More
# attempts (n_init=10) do not help. coremltools 9.0 (palettize_weights, mode "kmeans") fills its tables so: a filter of
# 4-bit or ternary weights, stored with 6 or 8 bits for each filter, gets other weights. mode="unique" is right.
# Seen, 64 filters of 32 x 3 x 3 weights from -1 to 1, as largest error (and filters that are wrong), with 4, 6 and 8
# bits: of 16 levels 0 (0), 10.5 (43), 10.0 (55); of ternary weights 0 (0), 10.8 (3), 37.7 (26). KMeans itself with 256
# clusters, for the 288 weights of the first ternary filter: a center at 32.2, and a sum of squares of 214,997, not 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python coremltools==9.0 scikit-learn==1.9.1 numpy==2.4.6
OMP_NUM_THREADS=1 environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import coremltools
import numpy as np
from coremltools.converters.mil import Builder
from coremltools.optimize import coreml
from sklearn.cluster import KMeans


def palettized(weight, mode, bits):
    """The weight that coremltools stores, with a table for each filter."""

    @Builder.program(input_specs=[Builder.TensorSpec((1, 32, 8, 8))], opset_version=coremltools.target.iOS18)
    def program(x):
        return Builder.conv(x=x, weight=weight)

    model = coremltools.convert(
        program,
        minimum_deployment_target=coremltools.target.iOS18,
        compute_precision=coremltools.precision.FLOAT32,
        skip_model_load=True,
    )
    groups = {"granularity": "per_grouped_channel", "group_size": 1, "channel_axis": 0}
    rule = coreml.OpPalettizerConfig(mode=mode, nbits=bits, **groups)
    stored = coreml.palettize_weights(model, coreml.OptimizationConfig(rule))
    operations = coreml.decompress_weights(stored)._mil_program.functions["main"].operations
    return next(operation for operation in operations if operation.op_type == "conv").weight.val


random = np.random.default_rng(0)
normal = random.normal(size=(64, 32, 3, 3))
networks = {
    "16 levels": (np.clip(np.rint(normal * 3.2), -8, 7) / 8).astype(np.float32),
    "ternary": np.rint(random.uniform(-1, 1, normal.shape)).astype(np.float32),
}
for name, weight in networks.items():
    for mode, bits in (("kmeans", 4), ("kmeans", 6), ("kmeans", 8), ("unique", None)):
        errors = abs(palettized(weight, mode, bits) - weight).max((1, 2, 3))
        wrong = (errors > 1e-5).sum()
        print(f"{name}, {mode} {bits}: largest error {errors.max():.1f}, {wrong} of 64 filters are wrong")
        assert (wrong > 0) == (bits in (6, 8))
        assert bits != 8 or (wrong > 20 and errors.max() > 8)
points = networks["ternary"][0].reshape(-1, 1)
for clusters, attempts in ((16, 1), (256, 1), (256, 10)):
    means = KMeans(clusters, n_init=attempts, random_state=0).fit(points)
    last = means.cluster_centers_.max()
    print(f"{clusters} clusters, n_init={attempts}: sum of squares {means.inertia_:.0f}, largest center {last:.1f}")
    assert (means.inertia_ > 1000 and last > 10) == (clusters == 256)
    assert (means.inertia_ < 1e-6 and last < 1.001) == (clusters == 16)
END
