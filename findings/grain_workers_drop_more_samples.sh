#!/usr/bin/env bash
# grain 0.2.18: DataLoader drops a rest of samples for each worker, up to all of them.
#
# Expected: drop_remainder=True drops what does not fill the last batch, fewer samples than a batch has, and the number
# of workers changes nothing but speed, as with PyTorch's DataLoader.
# Happens: each worker makes batches of its own samples, each n-th, and drops its own rest. Nothing is said. Without
# drop_remainder, each worker has a short batch. Samples of a batch are others with each number of workers.
# Seen, for 1000 samples in batches of 300: 900 without workers, and 600 with 2; with 4 workers there is no batch at
# all. With drop_remainder=False all come, in 4 batches without workers, and in 4 of 250 with 4.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python grain==0.2.18 numpy==2.4.6
cat >script.py <<'END'
import grain

TOTAL, BATCH = 1000, 300


def sizes(worker_count, drop_remainder):
    """How many samples each batch has."""
    loader = grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, TOTAL, 1),
        sampler=grain.samplers.IndexSampler(TOTAL, grain.sharding.NoSharding(), shuffle=False, num_epochs=1, seed=0),
        operations=[grain.transforms.Batch(BATCH, drop_remainder=drop_remainder)],
        worker_count=worker_count,
    )
    return [len(batch) for batch in loader]


def main():
    for workers in (0, 2, 4):
        for drop_remainder in (False, True):
            found = sizes(workers, drop_remainder)
            print(f"{workers} workers, drop_remainder={drop_remainder}: batches of {found}, {sum(found)} samples")
            if drop_remainder:
                assert sum(found) == {0: 900, 2: 600, 4: 0}[workers]
            else:
                assert sum(found) == TOTAL


if __name__ == "__main__":
    main()
END
environment/bin/python -W ignore script.py 2>errors || { cat errors; exit 1; }
