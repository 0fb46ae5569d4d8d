#!/usr/bin/env bash
# tensorflowjs 4.22.0: --quantize_uint8 gives variances of batch normalizations 8 bits; float16 makes them infinite.
#
# Expected: 8 bits for kernels, and floats for what is small and counts: biases, and the mean and variance of each
# channel. TensorFlow Lite's converter and others keep those in 32 bits.
# Happens: of a Keras network, every float array gets one step, also the array of variances. A channel whose variance is
# far below the largest is divided by the root of the smallest variance or of another step. Nothing is said. With
# float16, a variance above 65504, as of pictures from 0 to 255, becomes infinite, and its channel is constant; NumPy
# warns of an "overflow encountered in cast", and no more. uint16 is right within 1 %.
# Seen, for 12 filters of sizes from 0.01 to 1 and pictures from 0 to 255, as standard deviation of outputs by the right
# one: only kernels in uint8 0.97 to 1.11; only variances 0.72 to 2.27; all in uint8, as with --quantize_uint8, 0.74 to
# 2.48; float16 0 for the two largest filters, 1 for the others.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python tensorflowjs==4.22.0 tensorflow==2.17.0 tf-keras==2.17.0 \
    tensorflow-decision-forests==1.10.0 setuptools==80.9.0 numpy==1.26.4
npm install --silent --no-audit --no-fund @tensorflow/tfjs@4.22.0 >log 2>&1 || { cat log; exit 1; }
TF_USE_LEGACY_KERAS=1 environment/bin/python -W ignore - >log 2>&1 <<'PYTHON' || { cat log; exit 1; }
import numpy as np
import tensorflow as tf
import tensorflowjs

COUNT = 12
random = np.random.default_rng(0)
kernel = random.normal(size=(3, 3, 3, COUNT)) * np.geomspace(0.01, 1, COUNT)
for white in (1, 255):
    x = white * random.random(size=(4, 8, 8, 3)).astype(np.float32)
    convolution = tf.keras.layers.Conv2D(COUNT, 3, use_bias=False)
    normalization = tf.keras.layers.BatchNormalization(epsilon=1e-5)
    network = tf.keras.Sequential([tf.keras.Input((8, 8, 3)), convolution, normalization])
    convolution.set_weights([kernel])
    numbers = convolution(x).numpy()
    mean, variance = numbers.mean((0, 1, 2)), numbers.var((0, 1, 2))
    normalization.set_weights([np.ones(COUNT), np.zeros(COUNT), mean, variance])
    np.savetxt(f"x_{white}", x.ravel())
    tensorflowjs.converters.save_keras_model(network, f"float32_{white}")
    for name in ("uint8", "uint16", "float16"):
        tensorflowjs.converters.save_keras_model(network, f"{name}_{white}", quantization_dtype_map={name: True})
    for name in ("kernel", "variance"):
        types = {"uint8": f"*{name}"}
        tensorflowjs.converters.save_keras_model(network, f"{name}_{white}", quantization_dtype_map=types)
PYTHON
cat >script.js <<'JAVASCRIPT'
const assert = require('assert')
const fs = require('fs')
const tf = require('@tensorflow/tfjs')

async function deviations(name, white) {
  const file = JSON.parse(fs.readFileSync(`${name}_${white}/model.json`))
  const [{ weights: weightSpecs, paths }] = file.weightsManifest
  const bytes = fs.readFileSync(`${name}_${white}/${paths[0]}`)
  const weightData = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length)
  const handler = tf.io.fromMemory({ modelTopology: file.modelTopology, weightSpecs, weightData })
  const model = await tf.loadLayersModel(handler)
  const x = tf.tensor(fs.readFileSync(`x_${white}`, 'utf8').trim().split('\n').map(Number), [4, 8, 8, 3])
  return Array.from(tf.sqrt(tf.moments(model.predict(x), [0, 1, 2]).variance).dataSync())
}

async function main() {
  await tf.setBackend('cpu')
  const found = {}
  for (const white of [1, 255]) {
    const right = await deviations('float32', white)
    for (const name of ['kernel', 'variance', 'uint8', 'uint16', 'float16']) {
      const ratios = (await deviations(name, white)).map((each, channel) => each / right[channel])
      console.log(`pictures from 0 to ${white}, ${name}:`, ratios.map((ratio) => ratio.toFixed(2)).join(' '))
      found[`${name} ${white}`] = ratios
    }
  }
  const wrong = (ratios) => ratios.filter((ratio) => Math.abs(ratio - 1) > 0.15).length
  for (const white of [1, 255]) {
    assert(wrong(found[`uint8 ${white}`]) >= 2)
    assert(wrong(found[`variance ${white}`]) >= 2)
    assert.equal(wrong(found[`kernel ${white}`]), 0)
    assert.equal(wrong(found[`uint16 ${white}`]), 0)
  }
  assert.equal(wrong(found['float16 1']), 0)
  assert(found['float16 255'].filter((ratio) => ratio === 0).length >= 1)
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
JAVASCRIPT
node script.js 2>errors || { cat errors; exit 1; }
