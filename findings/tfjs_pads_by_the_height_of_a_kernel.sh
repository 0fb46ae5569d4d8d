#!/usr/bin/env bash
# TensorFlow.js 4.22.0: a padding given as a number makes images of wrong width where kernel or stride are not square.
#
# Expected: conv2d, depthwiseConv2d and pools with padding 0 give what "valid" gives.
# Happens: the size of the output is computed with the height of the kernel and of the stride, for the width as well. A
# flat kernel gives columns beyond the image, of sums cut off at the edge; an upright one loses columns. Nothing is
# said. "valid", "same" and paddings given for each side are right. Apart from that, rgbToGrayscale of int32, whose
# weights sum to 0.9999, cuts off the decimals: each grey but 0 becomes one darker.
# Seen: of 5 x 9 pixels, a 1 x 5 kernel makes 5 x 9 numbers, not 5 x 5; with strides 2 and 1 a pool of 8 x 8 makes 4 x
# 4, not 4 x 7. White, 255, becomes 254.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
npm install --silent --no-audit --no-fund @tensorflow/tfjs@4.22.0 >log 2>&1 || { cat log; exit 1; }
cat >script.js <<'END'
const assert = require('assert')
const tf = require('@tensorflow/tfjs')

const flat = (pad) => tf.conv2d(tf.ones([1, 5, 9, 1]), tf.ones([1, 5, 1, 1]), 1, pad)
const upright = (pad) => tf.conv2d(tf.ones([1, 9, 5, 1]), tf.ones([5, 1, 1, 1]), 1, pad)
const depthwise = (pad) => tf.depthwiseConv2d(tf.ones([1, 5, 9, 1]), tf.ones([1, 5, 1, 1]), 1, pad)
const pool = (pad) => tf.avgPool(tf.ones([1, 8, 8, 1]), 2, [2, 1], pad)
const square = (pad) => tf.conv2d(tf.ones([1, 5, 9, 1]), tf.ones([3, 3, 1, 1]), 1, pad)

async function main() {
  await tf.setBackend('cpu')
  const shapes = {}
  for (const layer of [flat, upright, depthwise, pool, square]) {
    shapes[layer.name] = ['valid', 0].map((pad) => layer(pad).shape.slice(1, 3).join(' x '))
    console.log(`${layer.name}: "valid" makes ${shapes[layer.name][0]}, and 0 makes ${shapes[layer.name][1]}`)
  }
  assert.deepEqual(shapes.flat, ['5 x 5', '5 x 9'])
  assert.deepEqual(shapes.upright, ['5 x 5', '5 x 1'])
  assert.deepEqual(shapes.depthwise, ['5 x 5', '5 x 9'])
  assert.deepEqual(shapes.pool, ['4 x 7', '4 x 4'])
  assert.equal(...shapes.square)
  assert.deepEqual(Array.from(flat('valid').dataSync()), Array(25).fill(5))
  assert.deepEqual(Array.from(flat(0).dataSync()).slice(0, 9), [5, 5, 5, 5, 5, 4, 3, 2, 1])
  const sides = [[0, 0], [0, 0], [0, 0], [0, 0]]
  assert.deepEqual(flat(sides).shape, [1, 5, 5, 1])

  const greys = tf.range(0, 256, 1, 'int32').reshape([16, 16, 1])
  const found = Array.from(tf.image.rgbToGrayscale(tf.tile(greys, [1, 1, 3])).dataSync())
  console.log('greys 0, 1, 100, 255 become', [0, 1, 100, 255].map((grey) => found[grey]).join(', '))
  assert.deepEqual(found, [0, ...Array(255).keys()])
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
END
node script.js 2>errors || { cat errors; exit 1; }
