"""Files of programs in C: faults are found when one is opened, and every way to run one gives the same bits."""

import multiprocessing
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_files import BITS, F32, U8, File, opened, outputs_of, sound, try_damaged
from torch import Tensor

from qconv.kernels.native import instruction_sets, kernels, number_of

pytestmark = pytest.mark.skipif(kernels() is None, reason="needs the C kernels")
STEM, BINARY, CODED, DEPTHWISE, MAXIMUM, MEAN, AVERAGE = range(1, 8)  # places of ops in a sound file
SIZE = 9, 7

Damage = Callable[[File], object]


def changed(op: int, **fields: float) -> Damage:
    return lambda file: file.ops[op].update(fields)


def value(number: int, *record: int) -> Damage:
    return lambda file: file.values.__setitem__(number, [*record, 0])


def head(**fields: int) -> Damage:
    return lambda file: file.head.update(fields)


def table(content: bytes) -> Damage:
    return lambda file: file.ops[CODED].update(table0=file.put(content))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "magic": (head(magic=1), "not the file of a program"),
    "version": (head(version=2), r"version \(=2\) must be 1"),
    "values": (head(values=-1), r"values \(=-1\) must be in 1 to"),
    "ops": (head(ops=1 << 30), r"ops \(=1073741824\) must be in 1 to"),
    "blob": (head(blob_bytes=5), "the file has .* bytes, and should have"),
    "outputs": (head(outputs=3), r"outputs \(=3\), but there are 2"),
    "another size": (head(height=40, width=40), "the program is for images of 40 x 40"),
    "guard": (head(guard=2), r"guard \(=2\)"),
    "type": (value(0, 3, 3, 0), r"the type of a value \(=3\)"),
    "no channels": (value(0, F32, 0, 0), r"the channels of a value \(=0\)"),
    "fill": (value(3, U8, 20, 256), r"fill \(=256\) must be in 0 to 255"),
    "filled floats": (value(1, F32, 20, 1), r"fill \(=1\) must be in 0 to 0"),
    "unwritten": (lambda file: file.value(F32, 3), "value 11 is never written"),
    "kind": (changed(STEM, kind=14), r"op 1: kind \(=14\)"),
    "second input": (changed(STEM, kind=0), "op 1: the first ops, and no others, must be the inputs"),
    "in": (changed(STEM, input=11), r"op 1: in \(=11\) must be in 0 to 10"),
    "not yet written": (changed(STEM, input=4), r"op 1: in \(=4\) is read before it is written"),
    "type of in": (changed(BINARY, input=1), r"op 2: in \(=1\) is of type 0, not 2"),
    "written twice": (changed(DEPTHWISE, out_f32=1), r"op 4: out_f32 \(=1\) is written twice"),
    "type of out": (changed(STEM, out_f32=2), r"op 1: out_f32 \(=2\) is of type 2 with 20 channels"),
    "channels of out": (
        changed(DEPTHWISE, out_f32=8),
        r"out_f32 \(=8\) is of type 0 with 20 channels, not",
    ),
    "no output": (changed(MEAN, out_f32=-1), "op 6: it has no output"),
    "groups": (changed(BINARY, groups=3), r"op 2: groups \(=3\) must divide 20 and 20 channels"),
    "no groups": (changed(BINARY, groups=0), r"groups \(=0\)"),
    "stride": (changed(STEM, sh=0), r"a number of the window \(=0\)"),
    "padding": (changed(STEM, left=-1), r"padding \(=-1\)"),
    "too small": (
        changed(STEM, kh=14),
        "a window of 14 taps, 1 apart, does not fit into a height of 9 with",
    ),
    "far apart": (
        changed(STEM, dw=5),
        "a window of 3 taps, 5 apart, does not fit into a width of 7 with",
    ),
    "empty window": (changed(MAXIMUM, top=9), "op 5: a window lies outside of the image"),
    "ceil": (changed(STEM, ceil=1), r"ceil \(=1\) must be in 0 to 0"),
    "large": (
        changed(DEPTHWISE, **dict.fromkeys(("top", "left", "bottom", "right"), 1 << 12)),
        "takes more than 1 GB",
    ),
    "bits of a weight": (changed(STEM, weight_bits=9), r"weight_bits \(=9\) does not fit"),
    "levels of a weight": (changed(STEM, weight_bits=8), r"weight, \d+ bytes at \d+, must lie"),
    "weight": (changed(STEM, weight=1 << 40), r"op 1: weight, 860 bytes at 1099511627776, must lie in"),
    "odd place": (changed(STEM, weight=4), "must lie in .* at a multiple of 64"),
    "no bias": (changed(STEM, bias=-1), "scale and bias must both be there, or none"),
    "no edges": (changed(STEM, edges=-1), "edges, 80 bytes at -1"),
    "prelu": (changed(STEM, rprelu=1 << 20), "rprelu, 240 bytes"),
    "padding of bits": (changed(BINARY, pad_value=2), r"pad_value \(=2\) must be in -1 to 1"),
    "zero": (changed(CODED, zero=7), r"zero \(=7\) must be what value 3 is filled with \(=8\)"),
    "sums": (lambda file: long_filter(file), "sums of channel 0 may not fit into 32 bits"),
    "residual": (changed(BINARY, residual=2), r"residual \(=2\) is of type 2, not 0"),
    "small residual": (changed(BINARY, res_stride=2), "a residual of 9 x 7 has no pixel for each of 9 x 7 at stride 2"),
    "clamp": (changed(BINARY, clamp_low=2), "the clamp's low must be at most its high"),
    "NaN in the clamp": (changed(BINARY, clamp_low=torch.nan), "the clamp's low"),
    "codes": (changed(STEM, codes=3), r"codes \(=3\)"),
    "form": (changed(STEM, form0=3), r"form \(=3\)"),
    "number": (changed(STEM, number0=torch.inf), "a number of codes must be finite and not 0"),
    "high": (changed(STEM, high0=-9), r"high \(=-9\)"),
    "highest code": (changed(STEM, zero0=250), r"the highest code \(=257\) must be in 0 to 255"),
    "lowest code": (changed(STEM, zero0=7), r"the lowest code \(=-1\)"),
    "table": (changed(CODED, table0=-1), "table, 4 bytes at -1"),
    "edges of a table": (table(b"\0\1\0\0"), r"edges of a table \(=256\)"),
    "short table": (table(b"\xff\0\0\0"), "table, 1280 bytes"),
    "falling edges": (table(struct.pack("<i2f3B", 2, 0, -1, 1, 2, 3)), "edge 1 of a table must not be below"),
    "code of a table": (changed(CODED, high0=199), r"op 3: a code of a table \(=200\) must be in 0 to 199"),
    "NaN edge": (table(struct.pack("<if2B", 1, torch.nan, 1, 2)), "edge 0 of a table"),
    "channels of a pool": (changed(MEAN, cout=32), r"op 6: cout \(=32\) must be that of its input \(=33\)"),
    "curve": (changed(STEM, curve=5), r"curve \(=5\) must be in 0 to 4"),
    "channel": (changed(MEAN, kind=8, weight=0), r"op 6: a channel of the input \(=-?\d+\) must be in 0 to 32"),
    "block": (changed(MEAN, kind=10, sh=2, sw=2), r"op 6: cout \(=\d+\) must be the input's \(=\d+\) by the pixels"),
    "stride of pixels": (changed(MEAN, kind=12, sw=2, weight=0), r"op 6: stride \(=2\) must be in 1 to 1"),
    "mode": (changed(MEAN, kind=13, ceil=4, weight=0), r"op 6: mode \(=4\) must be in 0 to 3"),
    "mean": (changed(MEAN, ceil=2), r"op 6: ceil \(=2\) must be in 0 to 1"),
    "reflected": (changed(MEAN, kind=13, ceil=1, left=99, weight=0), r"op 6: padding \(=99\) must be in 0 to \d+"),
    "padding number": (changed(MEAN, kind=13, weight=8), "op 6: weight, 4 bytes at 8, must lie in the"),
    "times": (changed(MEAN, kind=9, sh=0), r"op 6: times \(=0\) must be in 1 to"),
    "bits of an input": (changed(0, out_bits=2), "op 0: an input has out_f32 alone"),
    "type of an output": (changed(AVERAGE + 1, input=BITS), r"op 8: in \(=2\) is of type 2, not 0"),
}


def long_filter(file: File) -> None:
    """A depthwise filter of 300 x 300 weights of -128."""
    weight = file.put(b"\x80" * 33 * 90_000)
    sides = dict.fromkeys(("top", "left", "bottom", "right"), 200)
    file.ops[DEPTHWISE].update(kh=300, kw=300, weight=weight, zero=0, **sides)
    file.values[6][2] = 0


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused(name: str) -> None:
    damage, message = DAMAGES[name]
    file = sound()
    damage(file)
    with pytest.raises(ValueError, match=message):
        opened(file.content(), SIZE, 0)


def test_a_short_file_is_refused() -> None:
    content = sound().content()
    for length in (0, 47, 48, 300, len(content) - 1):
        with pytest.raises(ValueError, match=r"is too short|and should have"):
            opened(content[:length], SIZE, 0)
    with pytest.raises(ValueError, match="and should have"):
        opened(content + b"\0", SIZE, 0)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"instruction set \(=9\) is not one of this machine"):
        opened(sound().content(), SIZE, 9)


def test_wrong_bits_are_found_or_harmless() -> None:
    ran = [try_damaged(seed, number_of(name)) for seed in range(200) for name in instruction_sets()]
    assert 0.1 < sum(ran) / len(ran) < 0.9


# ----------------------------------------------------------------------------------------------------------------------
# Ways to run a file


def run(input: Tensor, instruction_set: int = 0, threads: int = 1) -> list[Tensor]:
    module: Any = kernels()
    handle = opened(sound().content(), (input.shape[2], input.shape[3]), instruction_set)
    outputs = outputs_of(handle, input, threads)
    module.plan_close(handle)
    return outputs


@pytest.mark.parametrize("size", [(9, 7), (5, 12), (3, 3)])
def test_all_ways_give_the_same_bits(size: tuple[int, int]) -> None:
    input = torch.randn(9, 3, *size, generator=torch.Generator().manual_seed(0))
    wanted = [torch.cat(parts) for parts in zip(*(run(image[None]) for image in input), strict=True)]
    last = input.contiguous(memory_format=torch.channels_last)
    for name in instruction_sets():
        for threads in (1, 2, 3):
            for given in (input, last, input[:2], input[:5]):
                for output, whole in zip(run(given, number_of(name), threads), wanted, strict=True):
                    assert torch.equal(output, whole[: len(output)])


def test_an_image_with_nan_or_inf_spoils_its_own_outputs_alone() -> None:
    input = torch.randn(6, 3, *SIZE)
    wanted = run(input)
    input[1, 2, 3, 4], input[4, 0, 0, 0] = torch.nan, -torch.inf
    for threads in (1, 2):
        for output, whole in zip(run(input, threads=threads), wanted, strict=True):
            assert output[[1, 4]].isnan().all()
            assert torch.equal(output[[0, 2, 3, 5]], whole[[0, 2, 3, 5]])


def test_no_images_and_wrong_arguments() -> None:
    assert [len(output) for output in run(torch.zeros(0, 3, *SIZE))] == [0, 0]
    module: Any = kernels()
    handle = opened(sound().content(), SIZE, 0)
    with pytest.raises(TypeError, match="takes 5 numbers for each of 3 values, not 5"):
        module.plan_run(handle, 1, 1, 1, 0, 0, 0, 0, 0)
    module.plan_close(handle)


def test_threads_may_call_one_plan_at_once() -> None:
    module: Any = kernels()
    inputs = [torch.randn(count, 3, *SIZE) for count in (1, 2, 5, 9)]
    wanted = [run(input) for input in inputs]
    handle, wrong = opened(sound().content(), SIZE, 0), []

    def calls(input: Tensor, outputs: list[Tensor]) -> None:
        for _ in range(200):
            found = outputs_of(handle, input, 2)
            if not all(map(torch.equal, found, outputs)):
                wrong.append(found)

    threads = [threading.Thread(target=calls, args=each) for each in zip(inputs, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    module.plan_close(handle)
    assert not wrong


def _in_child(handle: int, input: Tensor, outputs: list[Tensor], queue: Any) -> None:
    queue.put(all(map(torch.equal, outputs_of(handle, input, 2), outputs)))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    input = torch.randn(5, 3, *SIZE)
    handle, context = opened(sound().content(), SIZE, 0), multiprocessing.get_context("fork")
    outputs, queue = outputs_of(handle, input, 2), context.SimpleQueue()
    child = context.Process(target=_in_child, args=(handle, input, outputs, queue))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert queue.get()
    assert all(map(torch.equal, outputs_of(handle, input, 2), outputs))
