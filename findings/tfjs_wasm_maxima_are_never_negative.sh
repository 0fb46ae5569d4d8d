#!/usr/bin/env bash
# TensorFlow.js 4.22.0, backend wasm: maxima of negative numbers are 0, and integers are read as floats, where the
# backend cpu is right.
#
# Expected: both backends give the same numbers, or one says that it does not know the type.
# Happens: maxPool3d and dilation2d start from the smallest float above 0. clipByValue and stridedSlice of int32, as of
# codes, work on the bits as if they were floats, and stridedSlice says that its result is float32. A cast to bool cuts
# off decimals and high bits, so that 0.3 and 256 are false, and counts of a mask add its codes. prelu takes factors per
# row for factors per channel. Nothing is said. 2-D pools, and clipByValue of floats, are right.
# Seen: 24 maxima of numbers from -24 to -1 are 1e-38; codes 1, 5, 9 clipped to 2 to 7 are 1,073,741,824; codes 2, 3, 5
# are denormal floats; of 0.3, 0, -1, 256, 2, not 4 numbers are true, but 257; 12 of 36 numbers of prelu are wrong.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
npm install --silent --no-audit --no-fund @tensorflow/tfjs@4.22.0 @tensorflow/tfjs-backend-wasm@4.22.0 >log 2>&1 ||
    { cat log; exit 1; }
cat >script.js <<'END'
const assert = require('assert')
const tf = require('@tensorflow/tfjs')
require('@tensorflow/tfjs-backend-wasm')

const volume = () => tf.range(-24, 0).reshape([1, 2, 3, 4, 1])
const image = () => tf.range(-18, 18).reshape([1, 3, 4, 3])
const codes = (numbers) => tf.tensor(numbers, undefined, 'int32')
const LAYERS = {
  maxPool3d: () => tf.maxPool3d(volume(), 2, 1, 'same'),
  dilation2d: () => tf.dilation2d(tf.range(-12, 0).reshape([1, 3, 4, 1]), tf.zeros([2, 2, 1]), 1, 'same'),
  maxPool: () => tf.maxPool(tf.range(-12, 0).reshape([1, 3, 4, 1]), 2, 1, 'same'),
  clipCodes: () => codes([1, 5, 9]).clipByValue(2, 7),
  clipFloats: () => tf.tensor([1, 5, 9]).clipByValue(2, 7),
  stridedSlice: () => tf.stridedSlice(codes([[0, 1, 2], [3, 4, 5]]), [0, 0], [2, 3], [1, 2]),
  trueNumbers: () => tf.tensor([0.3, 0, -1, 256, 2]).cast('bool').sum(),
  preluOfRows: () => tf.prelu(image(), tf.tensor([0.5, 0.25, 0.125], [3, 1, 1])),
  preluOfChannels: () => tf.prelu(image(), tf.tensor([0.5, 0.25, 0.125], [1, 1, 3])),
}

async function main() {
  const found = {}
  for (const backend of ['cpu', 'wasm']) {
    await tf.setBackend(backend)
    await tf.ready()
    for (const [name, layer] of Object.entries(LAYERS)) {
      const result = layer()
      const numbers = Array.from(result.dataSync())
      found[name] = { ...found[name], [backend]: numbers, [backend + 'Type']: result.dtype }
    }
  }
  for (const [name, { cpu, wasm, wasmType }] of Object.entries(found)) {
    const wrong = cpu.filter((number, i) => !(Math.abs(number - wasm[i]) < 1e-5)).length
    console.log(`${name}: ${wrong} wrong; cpu ${cpu.slice(0, 4)}; wasm ${wasm.slice(0, 4)}, ${wasmType}`)
    if (['maxPool', 'clipFloats', 'preluOfChannels'].includes(name)) assert.equal(wrong, 0)
  }
  for (const name of ['maxPool3d', 'dilation2d']) {
    assert(found[name].cpu.every((number) => number < 0))
    assert(found[name].wasm.every((number) => number >= 0 && number < 1e-30))
  }
  assert.deepEqual(found.clipCodes.cpu, [2, 5, 7])
  assert.deepEqual(found.clipCodes.wasm, Array(3).fill(2 ** 30))
  assert.deepEqual(found.stridedSlice.cpu, [0, 2, 3, 5])
  assert(found.stridedSlice.wasm.every((number) => number < 1e-40) && found.stridedSlice.wasmType === 'float32')
  assert.equal(found.trueNumbers.cpu[0], 4)
  assert.equal(found.trueNumbers.wasm[0], 257)
  const { cpu, wasm } = found.preluOfRows
  assert(cpu.some((number, i) => number !== wasm[i]))
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
END
node script.js 2>errors || { cat errors; exit 1; }
