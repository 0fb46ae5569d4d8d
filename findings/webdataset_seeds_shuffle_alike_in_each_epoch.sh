#!/usr/bin/env bash
# webdataset 1.0.2: with a seed, or with detshuffle and workers, all epochs have one order; resampled=True has no seed.
#
# Expected: a seed makes runs repeatable, and epochs of a run differ, as with PyTorch's DataLoader and its generator.
# Happens: with `seed`, each epoch's shuffle starts anew from it, and `shuffle(size, seed=...)` is the same in all
# workers and epochs: samples of a shard always come with the same neighbours. detshuffle counts epochs, but in the
# worker, and DataLoader starts new workers for each epoch, unless they persist: all epochs are the first one.
# With resampled=True, `seed` changes nothing: shards are drawn from the time and the process. Nothing is said.
# Seen, number of different orders in 4 epochs of 40 samples, without workers, with 2, with 2 that persist: no seed 4,
# 4, 4; seed 1, 1, 1; detshuffle 4, 1, 3. Resampled, first epochs of 4 data sets with one seed: 4 different ones.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python webdataset==1.0.2 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import webdataset

for shard in range(8):
    with webdataset.TarWriter(f"shard-{shard}.tar") as writer:
        for i in range(5):
            writer.write({"__key__": f"{shard}-{i}", "cls": shard * 5 + i})
SHARDS = "shard-{0..7}.tar"


def loader(workers, persist, in_shards, **options):
    data = webdataset.WebDataset(SHARDS, shardshuffle=8, **options)
    data = (data.shuffle(20, **in_shards) if in_shards is not None else data).decode().to_tuple("cls")
    return webdataset.WebLoader(data, batch_size=None, num_workers=workers, persistent_workers=persist)


def epoch(batches):
    return tuple(label for (label,) in batches)


for name, in_shards, options, wanted in (
    ("no seed", {}, {}, [4, 4, 4]),
    ("seed", {"seed": 1}, {"seed": 1}, [1, 1, 1]),
    ("detshuffle", None, {"detshuffle": True, "seed": 1}, [4, 1, 3]),
):
    orders = []
    for workers, persist in ((0, False), (2, False), (2, True)):
        batches = loader(workers, persist, in_shards, **options)
        epochs = [epoch(batches) for _ in range(4)]
        assert all(sorted(order) == list(range(40)) for order in epochs)
        orders.append(len(set(epochs)))
    print(f"{name}: different orders of 4 epochs", *orders)
    assert orders == wanted
drawn = []
for _ in range(4):
    data = webdataset.WebDataset(SHARDS, resampled=True, shardshuffle=8, seed=1).decode().to_tuple("cls").with_epoch(40)
    drawn.append(epoch(data))
print("resampled with one seed: different first epochs", len(set(drawn)), "of 4")
assert len(set(drawn)) == 4
END
