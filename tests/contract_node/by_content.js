'use strict'
// A decode engine that asks for a state by its content: it hashes a prompt as the comment of
// HashForm says, finds who holds its beginning, reads that state, and computes the rest itself.
// Its model is that of docs/examples/engine.py, with all heads on one rank.
const { createHash } = require('node:crypto')
const { setTimeout: sleep } = require('node:timers/promises')
const { call, client } = require('./contract')
const { Rank } = require('./rank')
const { Session, blockList } = require('./session')

const { broker, daemon, prompt, steps } = JSON.parse(process.argv[2])
const HEADS = 8
const QUANTUM = 16
const FORM = { algorithm: 'restow content 1', quantum_tokens: QUANTUM, hash_bytes: 32 }
const BLOCK = 3
const LAYOUT = {
  model: {
    name: 'toy',
    revision: '1',
    fields: [{ name: 'h', kind: 'FIELD_KIND_SNAPSHOT', axes: ['head'], shape: [HEADS] }]
  },
  ranks: [
    {
      rank: 0,
      regions: [{ name: 'state', group: 'state', page_stride_bytes: 4 * HEADS }],
      shards: [
        {
          field: 'h', box: [{ start: 0, stop: HEADS }], dtype: 'DATA_TYPE_FLOAT32',
          region: 'state', strides_bytes: [4]
        }
      ]
    }
  ]
}

/** The hash of a prompt's first tokens, without adapter, salt or images. */
function hashOf(tokens) {
  const numbers = Buffer.alloc(8 + 4 * tokens.length)
  tokens.forEach((token, at) => numbers.writeUInt32LE(token, 8 + 4 * at))
  return createHash('sha256').update('restow content 1\0').update(numbers).digest()
}

/** The model's state after one more token. */
function step(h, token) {
  return h.map((value, head) => (31 * value + token * (head + 1)) % 65521)
}

async function main() {
  const session = new Session(broker, 'node', LAYOUT)
  const rank = new Rank(daemon, session.ref, 0, [{ name: 'state', pages: 8, bytes: 4 * HEADS }], 0)
  await session.start()
  await rank.start()
  const ends = Array.from({ length: Math.floor(prompt.length / QUANTUM) }, (_, at) => QUANTUM * (at + 1))
  const chain = ends.map((end) => hashOf(prompt.slice(0, end)))
  const asked = {
    engine_id: 'node', form: FORM,
    chains: [{ hashes: Buffer.concat(chain), below_tokens: prompt.length }]
  }
  const stub = client('Broker', broker)
  let found = []
  while (!found.length) { // the holder may just be starting
    await sleep(50)
    found = (await call(stub, 'Find', asked, 1000)).found[0].holders
  }
  const held = found[0].tokens
  const end = await session.request({
    handoff_id: 'by-content', blocks: [blockList('state', [BLOCK])], timeout_ms: 30_000,
    position_tokens: held,
    prefix: { form: FORM, hashes: Buffer.concat(chain.slice(0, held / QUANTUM)) }
  })
  const page = rank.read('state', BLOCK)
  let h = Array.from({ length: HEADS }, (_, head) => page.readFloatLE(4 * head))
  for (const token of prompt.slice(held)) h = step(h, token)
  const tokens = []
  for (let count = 0; count < steps; count++) {
    tokens.push(h.reduce((sum, value) => sum + value, 0) % 1000)
    h = step(h, tokens.at(-1))
  }
  console.log(JSON.stringify({ holder: found[0].engine_id, held, state: end.state, tokens }))
  await rank.close()
  await session.close()
  process.exit(0)
}

main()
