"""Images from files: every format and mode on both paths, and damaged ones that end nothing."""

import io
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import qconv
from qconv import schemes
from qconv.cli import main
from qconv.data import ImageFolderDataModule
from qconv.data.image_folder import BrokenPictureError
from qconv.images import DecodingError, centre_crop, cover, decode, opened, read_picture, size_of
from qconv.models import small_cnn

NOISE = np.random.default_rng(0).integers(0, 256, (9, 14, 3), dtype=np.uint8)
FUZZ = """
import io, random, warnings, zlib
import numpy as np
from PIL import Image, ImageOps
from qconv.images import DecodingError, decode, read_picture

warnings.simplefilter("ignore")

def mutated(data, dice):
    data = bytearray(data)
    for _ in range(dice.choice([1, 2, 4, 8])):
        at, length = dice.randrange(8, len(data)), dice.randrange(1, 9)
        kind = dice.random()
        data[at : at + (1 if kind < 0.6 else length if kind < 0.8 else 0)] = dice.randbytes(1 if kind < 0.8 else length)
    return bytes(data)

def with_right_sums(data):  # so that the damage passes the checks of a PNG's chunks
    data, at = bytearray(data), 8
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        data[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(data)

dice = random.Random(0)
image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8))
for kind, count in (("PNG", 300), ("JPEG", 150), ("TIFF", 40), ("GIF", 40), ("WEBP", 40)):
    whole = io.BytesIO()
    image.save(whole, kind)
    read = 0
    for number in range(count):
        data = mutated(whole.getvalue(), dice)
        if kind == "PNG" and number % 2:
            data = with_right_sums(data)
        for reader in (decode, lambda data: read_picture(io.BytesIO(data), (8, 8), 3, True)):
            print(kind, number, flush=True)
            try:
                reader(data)
                read += 1
            except DecodingError as error:
                assert str(error), data
    print(kind, "read:", read)
"""


def test_damaged_pictures_are_refused_and_end_nothing() -> None:
    found = subprocess.run([sys.executable, "-c", FUZZ], capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, (found.stdout[-20:], found.stderr[-2000:])
    assert found.stdout.count("read:") == 5


def written(path: Path, mode: str, **options: Any) -> Path:
    """An image of this mode; `pixels` where it can't be made by PIL's conversion."""
    pixels = options.pop("pixels", None)
    picture = Image.fromarray(NOISE).convert(mode) if pixels is None else Image.fromarray(pixels)
    picture.save(path, **options)
    return path


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [
        ("grey.png", "L", {}),
        ("bits.png", "1", {}),
        ("colours.png", "RGB", {}),
        ("palette.png", "P", {}),
        ("holes.png", "P", {"transparency": bytes(range(256))}),
        ("alpha.png", "RGBA", {}),
        ("grey_alpha.png", "LA", {}),
        ("deep.png", "I", {"pixels": (NOISE[..., 0].astype(np.uint16) << 8) + 77}),
        ("turned.png", "RGB", {"exif": turned()}),
        ("colours.jpg", "RGB", {}),
        ("grey.jpg", "L", {}),
        ("ink.jpg", "CMYK", {}),
        ("turned.jpg", "RGB", {"exif": turned()}),
        ("turned_by_xmp.jpg", "RGB", {"xmp": XMP}),
        ("really_jpeg.png", "RGB", {"format": "JPEG"}),
        ("really_png.jpg", "RGB", {"format": "PNG"}),
        ("colours.bmp", "RGB", {}),
        ("colours.webp", "RGB", {}),
        ("palette.gif", "P", {}),
        ("ink.tif", "CMYK", {}),
    ],
)
def test_large_and_small_pictures_are_decoded_alike(name: str, mode: str, options: Any, tmp_path: Path) -> None:
    path = written(tmp_path / name, mode, **options)
    large = decode(path)
    size = (14, 9) if {"exif", "xmp"} & options.keys() else (9, 14)
    assert (large.dtype, large.shape) == (torch.uint8, (3, *size))
    assert torch.equal(large, decode(path.read_bytes()))
    assert torch.equal(large, read_picture(path, size, 3, resize=False))
    if path.suffix == ".png" and mode in ("RGB", "RGBA", "I") and not {"format", "exif"} & options.keys():
        expected = NOISE if mode != "I" else NOISE[..., :1].repeat(3, 2)
        assert torch.equal(large, torch.from_numpy(expected).permute(2, 0, 1))


def test_integers_of_32_bits_are_refused(tmp_path: Path) -> None:
    Image.fromarray(NOISE[..., 0].astype(np.int32)).save(tmp_path / "a.tif")  # 0 to 255, which 16 bits would make black
    with pytest.raises(DecodingError, match="its pixels are integers of 32 bits"):
        decode(tmp_path / "a.tif")


def test_signed_integers_of_16_bits(tmp_path: Path) -> None:
    pixels = NOISE[..., 0].astype(np.int16) << 7
    data = pixels.astype("<i2").tobytes()
    height, width = pixels.shape
    tags = {256: width, 257: height, 258: 16, 259: 1, 262: 1, 273: 8 + 2 + 12 * 9 + 4, 277: 1, 279: len(data), 339: 2}
    head = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    (tmp_path / "a.tif").write_bytes(head + entries + bytes(4) + data)
    assert decode(tmp_path / "a.tif").equal(torch.from_numpy(NOISE[..., 0] >> 1).expand(3, -1, -1))


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
@pytest.mark.parametrize("way", range(1, 9))
def test_pictures_are_turned_upright(way: int, suffix: str, tmp_path: Path) -> None:
    exif, path = Image.Exif(), tmp_path / f"p.{suffix}"
    exif[0x0112] = way
    Image.fromarray(NOISE).save(path, exif=exif)
    with Image.open(path) as whole:
        upright = np.array(ImageOps.exif_transpose(whole))
    expected = torch.from_numpy(upright).permute(2, 0, 1)
    assert decode(path).equal(expected)
    with opened(path) as found:
        assert size_of(found) == upright.shape[:2]
    assert read_picture(path, (upright.shape[0], upright.shape[1]), 3, resize=False).equal(expected)
    small = read_picture(path, (4, 6), 3, resize=True)
    assert suffix == "jpg" or small.equal(  # a JPEG is decoded at a smaller size
        torch.from_numpy(np.array(cover(Image.fromarray(upright), (4, 6)))).permute(2, 0, 1)
    )


def test_a_cover_that_rounding_would_put_outside() -> None:
    for height in range(20, 90):
        for width in range(30, 70, 7):
            assert cover(Image.new("L", (width, height)), (32, 32)).size == (32, 32)


@pytest.mark.parametrize("name", ["bomb.png", "bomb.jpg"])
def test_pictures_of_too_many_pixels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, label in (("train", "a"), ("train", "b"), ("test", "a")):
        (tmp_path / split / label).mkdir(parents=True)
        written(tmp_path / split / label / name, "RGB")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    path = tmp_path / "train" / "a" / name
    for read in (decode, lambda path: read_picture(path, (9, 14), 3, resize=True)):
        with pytest.raises(DecodingError, match=r"Image size \(126 pixels\) exceeds limit of 100 pixels"):
            read(path)
    with pytest.raises(BrokenPictureError, match="none of the files in train is an image"):
        ImageFolderDataModule(str(tmp_path), cache=str(tmp_path))
    data = ImageFolderDataModule(str(tmp_path), image_size=8, cache=str(tmp_path))
    with pytest.raises(BrokenPictureError, match=f"{name} .Image size .126 pixels. exceeds limit"):
        data.prepare_data()


def test_pictures_that_are_too_long_to_be_resized() -> None:
    with pytest.raises(DecodingError, match=r"1×50000 pixels are too long and narrow for a shorter side of 256"):
        centre_crop(torch.zeros(3, 1, 50_000, dtype=torch.uint8), 224, 256)
    assert centre_crop(torch.zeros(3, 1, 50, dtype=torch.uint8), 8, 10).shape == (3, 8, 8)


def test_bytes_of_no_picture_are_named_without_addresses() -> None:
    for data in (b"", b"no image", b"\xff\xd8\xff" + bytes(20)):
        with pytest.raises(DecodingError) as raised:
            decode(data)
        assert "0x" not in str(raised.value)


@pytest.mark.parametrize("resize", [None, 10])
def test_after_a_damaged_picture_the_others_are_named(
    resize: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = qconv.convert(small_cnn(3, 3, width=8), schemes.bnn()).eval()
    network = {"_target_": "qconv.models.small_cnn", "in_channels": 3, "num_classes": 3, "width": 8}
    pictures = {"size": [3, 8, 8], "resize": resize, "mean": [0.0] * 3, "std": [1.0] * 3}
    qconv.save_packed(model, tmp_path / "model", network=network, pictures=pictures)
    whole = io.BytesIO()
    Image.fromarray(NOISE).save(whole, "PNG")
    names = [tmp_path / name for name in ("size.png", "data.png", "bomb.png", "whole.png")]
    for path, at in zip(names, (19, 60, 16, 0), strict=True):
        damaged = bytearray(whole.getvalue())
        damaged[at] ^= 0 if path == names[-1] else 0x7F
        path.write_bytes(damaged)
    assert main(["predict", str(tmp_path / "model"), *map(str, names)]) == 1
    told = capsys.readouterr()
    *errors, count = told.err.splitlines()
    assert [line.split(" cannot be read: ")[0] for line in errors] == [
        f"qconv: error: image {path}" for path in names[:-1]
    ]
    assert count == "qconv: 3 of 4 images could not be read"
    assert [line.split()[0] for line in told.out.splitlines()] == [str(names[-1])]
