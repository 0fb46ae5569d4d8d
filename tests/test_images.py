"""Images from files: every format and mode on both paths, and damaged ones that end nothing."""

import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import draw_tree
from PIL import Image, ImageOps

import qconv
from qconv import schemes
from qconv.cli import main
from qconv.data import ImageFolderDataModule
from qconv.data.image_folder import BrokenPictureError
from qconv.images import DecodingError, centre_crop, decode, opened, read_picture, size_of
from qconv.models import small_cnn

NOISE = np.random.default_rng(0).integers(0, 256, (9, 14, 3), dtype=np.uint8)
FUZZ = """
import io, random, warnings, zlib
import numpy as np
from PIL import Image
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
        for reader in (decode, lambda data: read_picture(io.BytesIO(data), (8, 8), 3)):
            print(kind, number, flush=True)
            try:
                reader(data)
                read += 1
            except DecodingError as error:
                assert str(error), data
    print(kind, "read:", read)
"""


@pytest.mark.nightly
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
    assert torch.equal(large, read_picture(path, size, 3))
    if path.suffix == ".png" and mode in ("RGB", "RGBA", "I") and not {"format", "exif"} & options.keys():
        expected = NOISE if mode != "I" else NOISE[..., :1].repeat(3, 2)
        assert torch.equal(large, torch.from_numpy(expected).permute(2, 0, 1))


def tiff(pixels: np.ndarray, bits: int = 0, photometric: int = 1) -> bytes:
    """A TIFF file of these pixels in their byte order, or of `bits` each; PIL writes few of its kinds."""
    height, width = pixels.shape[:2]
    count = pixels.shape[2] if pixels.ndim == 3 else 1
    data = np.packbits(unpacked(pixels, bits), 1).tobytes() if bits else pixels.tobytes()
    order = ">" if pixels.dtype.byteorder == ">" else "<"
    sign = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    tags = {256: width, 257: height, 258: bits or 8 * pixels.itemsize, 259: 1}
    tags |= {262: 2 if count == 3 else photometric, 273: 8 + 2 + 12 * 9 + 4, 277: count, 279: len(data), 339: sign}
    head = struct.pack(f"{order}2sHIH", b"MM" if order == ">" else b"II", 42, 8, len(tags))
    return head + b"".join(struct.pack(f"{order}HHII", tag, 4, 1, tags[tag]) for tag in tags) + bytes(4) + data


def unpacked(pixels: np.ndarray, bits: int) -> np.ndarray:
    """The upper `bits` of numbers of 16 bits, one after another in each row."""
    places = np.arange(15, 15 - bits, -1)
    return (pixels[..., None] >> places & 1).reshape(len(pixels), -1).astype(np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of 16 bits; of colours PIL writes none."""
    height, width = pixels.shape[:2]
    kind = 0 if pixels.ndim == 2 else {2: 4, 3: 2, 4: 6}[pixels.shape[2]]
    rows = b"".join(bytes(1) + row.tobytes() for row in pixels.astype(">u2"))
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)), (b"IDAT", zlib.compress(rows)))
    whole = b"\x89PNG\r\n\x1a\n"
    for name, data in (*chunks, (b"IEND", b"")):
        whole += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return whole


def pgm(pixels: np.ndarray, white: int, kind: str = "P5") -> bytes:
    numbers = " ".join(map(str, pixels.flatten())).encode() if kind == "P2" else pixels.astype(">u2").tobytes()
    return f"{kind} {pixels.shape[1]} {pixels.shape[0]} {white}\n".encode() + numbers


RAMP = np.linspace(0, 65535, 8 * 16).astype(np.uint16).reshape(8, 16)
RAINBOW = np.stack([RAMP, RAMP[::-1], RAMP.T.reshape(8, 16), RAMP], -1)
KEPT: dict[str, bytes] = {
    "PNG": png(RAMP),
    "PNG with alpha": png(np.stack([RAMP, RAMP[::-1]], -1)),
    "TIFF": tiff(RAMP),
    "TIFF, most significant byte first": tiff(RAMP.astype(">u2")),
    "TIFF of 12 bits": tiff(RAMP, 12),
    "TIFF, 0 is white": tiff(65535 - RAMP, photometric=0),
    "PGM": pgm(RAMP, 65535),
    "PGM of 12 bits": pgm(RAMP >> 4, 4095),
    "PGM of 12 bits, as text": pgm(RAMP >> 4, 4095, "P2"),
}
REMEDY = r"data.pixel_range=\[LOW,HIGH\] \(of qconv data prepare, --pixel-range LOW HIGH\)"
NO_RANGE = ", and their values of black and white are not known: in training, set " + REMEDY
LOST = r"16 of 128 grey levels would be left, of values up to 4,095: in training, set black and white by " + REMEDY
DARK = r"its colours have 16 bits, the upper 4 bits are 0, and PIL reads only the upper 8: store it with 8 bits"
UNKNOWN = "it is a damaged TIFF image, or has pixels of a kind that PIL does not read: store it as grey of 8 or 16 bits"
REFUSED: dict[str, tuple[bytes, str]] = {
    "12 bits in a PNG file of 16": (png(RAMP >> 4), LOST),
    "12 bits in a TIFF file of 16": (tiff(RAMP >> 4), LOST),
    "12 bits in a PGM file of 16": (pgm(RAMP >> 4, 65535), LOST),
    "12 bits of which few are used": (png((RAMP >> 4) // 102 * 102), "16 of 41 grey levels"),
    "12 bits and a bright pixel": (png(np.where(RAMP == 65535, RAMP, RAMP >> 4)), "17 of 128 grey levels"),
    "colours of 12 bits in a PNG file of 16": (png(RAINBOW[..., :3] >> 4), DARK),
    "colours of 12 bits with alpha": (png(np.concatenate([RAINBOW[..., :3] >> 4, RAINBOW[..., 3:]], -1)), DARK),
    "colours of 12 bits in a TIFF file of 16": (tiff(RAINBOW[..., :3] >> 4), DARK),
    "signed, 16 bits": (tiff(RAMP.astype(np.int16)), "its pixels are integers with a sign" + NO_RANGE),
    "signed, 8 bits": (tiff((RAMP >> 8).astype(np.int8)), "its pixels are integers with a sign" + NO_RANGE),
    "32 bits": (tiff(RAMP.astype(np.uint32)), "its pixels are integers of 32 bits" + NO_RANGE),
    "signed, 32 bits": (tiff(RAMP.astype(np.int32)), "its pixels are integers of 32 bits" + NO_RANGE),
    "floating point": (tiff(RAMP.astype(np.float32)), "its pixels are floating-point numbers" + NO_RANGE),
    "PFM": (b"Pf\n16 8\n-1.0\n" + RAMP.astype("<f4").tobytes(), "its pixels are floating-point numbers" + NO_RANGE),
    "TIFF of 10 bits": (tiff(RAMP, 10), UNKNOWN),
    "TIFF of 14 bits": (tiff(RAMP, 14), UNKNOWN),
    "TIFF of 64 bits": (tiff(RAMP.astype(np.float64)), UNKNOWN),
}


@pytest.mark.parametrize("kind", KEPT)
def test_grey_levels_of_more_than_8_bits_are_kept(kind: str) -> None:
    assert decode(KEPT[kind]).equal(torch.from_numpy((RAMP >> 8).astype(np.uint8)).expand(3, -1, -1))


@pytest.mark.parametrize("kind", REFUSED)
def test_grey_levels_that_would_be_lost_are_refused(kind: str, tmp_path: Path) -> None:
    data, message = REFUSED[kind]
    (tmp_path / "a.tif").write_bytes(data)
    for read in (decode, lambda path: decode(path.read_bytes()), lambda path: read_picture(path, (8, 16), 1)):
        with pytest.raises(DecodingError, match=message):
            read(tmp_path / "a.tif")


@pytest.mark.parametrize("count", [3, 4])
def test_colours_of_16_bits(count: int) -> None:
    expected = torch.from_numpy((RAINBOW[..., :3] >> 8).astype(np.uint8)).permute(2, 0, 1)
    for pixel_range in (None, (0, 65535)):
        assert decode(png(RAINBOW[..., :count]), pixel_range=pixel_range).equal(expected)
    assert decode(tiff(RAINBOW[..., :3])).equal(expected)
    assert decode(png(RAINBOW[..., :count] >> 4), pixel_range=(0, 65535)).equal(expected >> 4)
    with pytest.raises(DecodingError, match=r"PIL reads the upper 8, and data.pixel_range \(=\[0, 4095\]\) is only"):
        decode(png(RAINBOW[..., :count]), pixel_range=(0, 4095))


def test_a_range_of_values_is_that_of_all_pictures() -> None:
    """Whatever the file, equal values become equal pixels, and those outside black or white."""
    low, high = 1000, 1255
    values = (RAMP >> 5).astype(np.int64)  # 0 to 2,047
    expected = torch.from_numpy((values - low).clip(0, 255).astype(np.uint8)).expand(1, -1, -1)
    whole = {str(dtype): tiff(values.astype(dtype)) for dtype in ("u2", ">u2", "i2", "u4", ">i4", "f4")}
    whole |= {"PNG": png(values), "PGM": pgm(values, 4095), "PGM as text": pgm(values, 2047, "P2")}
    for kind, data in whole.items():
        found = decode(data, 1, (low, high + 1 / 256)).int()
        assert found.sub(expected.int()).abs().max() <= 1, kind
        assert found.equal(decode(png(values), 1, (low, high + 1 / 256)).int()), kind
    signed = tiff((values - 1100).astype(np.int16))
    assert decode(signed, 1, (low - 1100, high - 1100)).equal(decode(png(values), 1, (low, high)))
    small = tiff((values // 8 - 128).astype(np.int8))
    assert decode(small, 1, (-128, 127)).equal(torch.from_numpy((values // 8).astype(np.uint8)).expand(1, -1, -1))
    large = values.astype(np.uint32) + 2**31
    assert decode(tiff(large), 1, (2**31, 2**31 + 2047)).equal(decode(png(values), 1, (0, 2047)))
    white = tiff(values.astype(np.uint16), photometric=0)
    assert decode(white, 1, (0, 2047)).equal(255 - decode(png(values), 1, (0, 2047)))
    assert decode(KEPT["PNG"], 1, (0, 65535)).equal(decode(KEPT["PNG"], 1))
    assert decode(png(RAMP >> 12), 1, (0, 65535)).eq(0).all()
    assert decode(tiff(NOISE), pixel_range=(0, 4095)).equal(torch.from_numpy(NOISE).permute(2, 0, 1))
    with pytest.raises(DecodingError, match=r"some of its pixels are NaN"):
        decode(tiff(np.full((2, 2), np.nan, np.float32)), pixel_range=(0, 1))


def test_few_levels_of_few_are_read() -> None:
    """Black images and masks have lost nothing."""
    for values in (0 * RAMP, np.where(RAMP > 9, 65535, 0), RAMP & 0xF000):
        assert decode(png(values)).equal(torch.from_numpy((values >> 8).astype(np.uint8)).expand(3, -1, -1))


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
    assert read_picture(path, (upright.shape[0], upright.shape[1]), 3).equal(expected)
    small = read_picture(path, (4, 6), 3)
    covered = np.array(ImageOps.fit(Image.fromarray(upright), (6, 4), Image.Resampling.BILINEAR))
    assert suffix == "jpg" or small.equal(torch.from_numpy(covered).permute(2, 0, 1))  # it is decoded at a smaller size


@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_pictures_of_too_many_pixels(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_tree(tmp_path, {"train": 1, "test": 1}, lambda *_: Image.fromarray(NOISE), suffix=kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    path = tmp_path / f"train/cat/0.{kind}"
    for read in (decode, lambda path: read_picture(path, (9, 14), 3)):
        with pytest.raises(DecodingError, match=r"Image size \(126 pixels\) exceeds limit of 100 pixels"):
            read(path)
    with pytest.raises(BrokenPictureError, match="none of the files in train is an image"):
        ImageFolderDataModule(str(tmp_path), cache=str(tmp_path))
    data = ImageFolderDataModule(str(tmp_path), image_size=8, cache=str(tmp_path))
    with pytest.raises(BrokenPictureError, match=f"0.{kind} .Image size .126 pixels. exceeds limit"):
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
    expected = [f"qconv: error: image {path}" for path in names[:-1]]
    assert [line.split(" cannot be read: ")[0] for line in errors] == expected
    assert count == "qconv: 3 of 4 images could not be read"
    assert [line.split()[0] for line in told.out.splitlines()] == [str(names[-1])]
