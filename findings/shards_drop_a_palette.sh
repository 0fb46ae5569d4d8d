#!/usr/bin/env bash
# litdata 0.2.76, mosaicml-streaming 0.13.0: pictures with a palette lose it in a shard, and become black.
#
# Expected: a Pillow picture that is written to a shard as it is, not as JPEG, comes back equal; a palette belongs to
# GIF and to many PNG files.
# Happens: litdata's serializer for Pillow pictures, and streaming's encoding "pil", keep mode, size and codes. Without
# its palette, a picture of mode P is black in all its pixels once it is converted to RGB. Nothing is said. Streaming's
# "png" keeps palettes, and pictures of other modes are right in all of these.
# Seen: red, green, blue and white become black.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
for shards in litdata==0.2.76 mosaicml-streaming==0.13.0; do
    uv venv --quiet --clear environment
    uv pip install --quiet --python environment/bin/python "$shards" torch==2.15.0 torchvision==0.29.2 pillow==13.0.0
    environment/bin/python -W ignore - "${shards%==*}" 2>errors <<'END' || { cat errors; exit 1; }
import sys

import numpy as np
from PIL import Image

COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], np.uint8)


def write(pictures, encoding):
    """The pictures as a data set of the library gives them back."""
    if encoding == "litdata":
        import litdata
        from litdata.streaming.cache import Cache

        folder = "litdata"
        cache = Cache(input_dir=folder, chunk_size=100)
        for index, picture in enumerate(pictures):
            cache[index] = {"picture": picture}
        cache.done()
        cache.merge()
        return [sample["picture"] for sample in litdata.StreamingDataset(folder)]
    from streaming import MDSWriter, StreamingDataset

    with MDSWriter(out=encoding, columns={"picture": encoding}) as writer:
        for picture in pictures:
            writer.write({"picture": picture})
    return [sample["picture"] for sample in StreamingDataset(local=encoding, batch_size=1)]


def main():
    coloured = Image.fromarray(COLOURS[None].repeat(4, 0))
    palette = Image.fromarray(np.arange(4, dtype=np.uint8)[None].repeat(4, 0), "P")
    palette.putpalette(COLOURS.tobytes())
    assert (np.array(palette.convert("RGB")) == np.array(coloured)).all()
    pictures = [palette, coloured, coloured.convert("L"), coloured.convert("RGBA"), coloured.convert("1")]
    for encoding in ("litdata",) if sys.argv[1] == "litdata" else ("pil", "png"):
        found = write(pictures, encoding)
        for picture, other in zip(pictures, found, strict=True):
            assert picture.mode == other.mode and (np.array(picture) == np.array(other)).all()
            assert picture.mode == "P" or (np.array(picture.convert("RGB")) == np.array(other.convert("RGB"))).all()
        row = np.array(found[0].convert("RGB"))[0]
        print(f"{sys.argv[1]}, {encoding}: red, green, blue and white become", *map(tuple, row.tolist()))
        assert (row == (COLOURS if encoding == "png" else 0)).all()


if __name__ == "__main__":
    main()
END
done
