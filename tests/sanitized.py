"""Random calls of all kernels of the library whose path is given, which was built to stop at a wrong access."""

import importlib.util
import itertools
import random
import sys

import torch
from gradient_cases import cases
from settings import each_instruction_set
from test_program import every

from qconv.kernels import bits, level_rounding, look_up, native, native_bits, native_weight, norm, rprelu, slopes
from qconv.kernels.operators import pack_weight
from qconv.program.plan import Plan, program_bytes


def load(path: str) -> None:
    """Use this library in place of the installed one."""
    spec = importlib.util.spec_from_file_location("_binary", path)
    assert spec is not None
    assert spec.loader is not None
    native._binary = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native._binary)
    native.kernels.cache_clear()


def run_programs(draw: random.Random) -> None:
    """Programs as they should be, and damaged ones: refused, or run within their memory."""
    refused = ran = 0
    for kinds, groups in itertools.product(range(3), (1, 2, 6)):
        program, size = every(kinds, groups), (draw.randint(9, 17), draw.randint(9, 17))
        content, images = program_bytes(program, True), torch.randn(draw.randint(1, 5), 5, *size)
        for name in native.instruction_sets():
            Plan(content, size, instruction_set=name)(images, threads=draw.randint(1, 3))
        for _ in range(60):
            damaged = content.clone()
            for _ in range(draw.randint(1, 3)):
                place = draw.randrange(min(len(damaged), draw.choice([2000, 20000])))
                damaged[place] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
                word = damaged[place // 4 * 4 :][:4].view(torch.int32)
                word[:] = draw.choice([0, 1, 2, 3, 16, -1, 1 << 24, word.item()])
            try:
                Plan(damaged[: draw.choice([len(damaged), draw.randrange(len(damaged))])].clone(), size)(
                    images, threads=2
                )
                ran += 1
            except ValueError:
                refused += 1
    assert refused > 100, (refused, ran)
    assert ran > 50, (refused, ran)


def main() -> None:
    load(sys.argv[1])
    draw = random.Random(0)
    run_programs(draw)
    for case in cases(50):
        torch.set_num_threads(draw.randint(1, 3))
        sizes, window = case.sizes, case.sizes.window
        if draw.random() < 0.3:
            case.grad_output, case.numbers = case.grad_output.bfloat16(), case.numbers.bfloat16()
        weight, tap_sums = pack_weight(case.filters, window.groups)
        packed = bits.pack_signs(case.signs, window.groups)
        for _ in each_instruction_set():
            look_up.look_up_conv2d(*case.of_forward(), always=True)
            look_up.look_up_grad_input(*case.of_input(), always=True)
            look_up.look_up_grad_weight(*case.of_weight(), always=True)
            native_weight.pack_weight(case.filters, window.groups)
            for input in (case.signs, packed):
                operands = input, weight, tap_sums, sizes.channels, window
                native.binary_conv2d(*operands)
            signs = case.signs.to(draw.choice([torch.float32, torch.bfloat16]))
            if draw.random() < 0.5:
                signs = signs.contiguous(memory_format=torch.channels_last)
            passes = native_bits.pack_signs_and_passes(signs, -1, 1, window.groups)
            native_bits.clamp_and_pack(signs, -0.5, 0.5)
            if passes is not None:
                native_bits.where_passes(signs, passes[1], window.groups)
                native_bits.unpack_signs(passes[0], sizes.channels[0], window.groups)
            over, per = case.signs.movedim(1, -1).contiguous().movedim(-1, 1), torch.ones(3, sizes.channels[0])
            norm.by_kernel(over, over.clone(), per[0], per[1], per[2])
            rprelu.forward_by_kernel(over, per[0], per[1], per[2])
            rprelu.backward_by_kernel(over, over, per[0], per[1])
            slopes.by_kernel(signs, signs, signs)
            divisor = torch.rand(len(over), 1, 1, 1) + 0.1
            level_rounding.rounded(over, divisor, -8.0, 7.0, 1.0, 8)
            level_rounding.stepped_back(over, over, divisor, -8, 7, False, 1.0, 1e-6)
            for width in (1, 2, 4, 8):
                codes = torch.randint(2**width, sizes.input, dtype=torch.uint8)
                found = native_bits.pack_codes(codes, width)
                if found is not None:
                    native_bits.unpack_codes(found, sizes.channels[0], width)


if __name__ == "__main__":
    main()
