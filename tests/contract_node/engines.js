'use strict'
// A prefill engine of two ranks and a decode engine of one, whose states are numbers that name
// their prompt, token and head: who holds them can say whether each is right.
const { Rank } = require('./rank')
const { Session, blockList } = require('./session')

const HEADS = 4
const STATE = 32
const ITEM_BYTES = 4
const POSITION = 37
const BLOCKS = 64
const POISON = 0xa5

/** The number that stands for a part of a prompt's state. */
function number(seed, at, head) {
  return (Math.imul(seed + 1, 0x9e3779b1) ^ Math.imul(at + 1, 0x85ebca6b) ^ (head * 0x27d4eb2f)) >>> 0
}

/** A shard of all heads from `start` to `stop`. */
function shards(start, stop) {
  const heads = stop - start
  const whole = { start: 0, stop: STATE }
  return [
    {
      field: 'kv', box: [{ start, stop }], dtype: 'DATA_TYPE_FLOAT32', region: 'kv',
      strides_bytes: [ITEM_BYTES], token_stride_bytes: heads * ITEM_BYTES
    },
    {
      field: 'state', box: [{ start, stop }, whole], dtype: 'DATA_TYPE_FLOAT32', region: 'state',
      strides_bytes: [STATE * ITEM_BYTES, ITEM_BYTES]
    }
  ]
}

class Engine {
  /** An engine whose ranks hold `headsOfRank` heads each, in pages of `pageTokens` tokens. */
  constructor(name, broker, daemon, headsOfRank, pageTokens) {
    this.heads = headsOfRank
    this.pageTokens = pageTokens
    const kvBytes = pageTokens * headsOfRank * ITEM_BYTES
    const stateBytes = headsOfRank * STATE * ITEM_BYTES
    const numbers = Array.from({ length: HEADS / headsOfRank }, (_, rank) => rank)
    const layout = {
      model: {
        name: 'numbers',
        fields: [
          { name: 'kv', kind: 'FIELD_KIND_PER_TOKEN', axes: ['head'], shape: [HEADS] },
          { name: 'state', kind: 'FIELD_KIND_SNAPSHOT', axes: ['head', 'item'], shape: [HEADS, STATE] }
        ]
      },
      ranks: numbers.map((rank) => ({
        rank,
        regions: [
          { name: 'kv', group: 'attention', page_stride_bytes: kvBytes, page_tokens: pageTokens },
          { name: 'state', group: 'recurrent', page_stride_bytes: stateBytes }
        ],
        shards: shards(rank * headsOfRank, (rank + 1) * headsOfRank)
      }))
    }
    this.session = new Session(broker, name, layout)
    const regions = [
      { name: 'kv', pages: BLOCKS, bytes: kvBytes },
      { name: 'state', pages: BLOCKS, bytes: stateBytes }
    ]
    this.ranks = numbers.map((rank) => new Rank(daemon, this.session.ref, rank, regions, POISON))
    this.free = { kv: [...Array(BLOCKS).keys()], state: [...Array(BLOCKS).keys()] }
  }

  async start() {
    await this.session.start()
    await Promise.all(this.ranks.map((rank) => rank.start()))
  }

  /** Blocks for one prompt. There are enough for all that are under way at once. */
  take() {
    const count = Math.ceil(POSITION / this.pageTokens)
    return { kv: this.free.kv.splice(0, count), state: this.free.state.splice(0, 1) }
  }

  /** Gives blocks back, spoilt: who reads them late reads what is wrong. */
  giveBack(blocks) {
    for (const region of ['kv', 'state']) {
      for (const block of blocks[region]) this._poison(region, block)
      this.free[region].push(...blocks[region])
    }
  }

  /** Everything of the blocks, or a part of them, as it is published or asked for. */
  lists(blocks, from = 0, to = blocks.kv.length) {
    const lists = [blockList('attention', blocks.kv.slice(from, to), from)]
    if (to === blocks.kv.length) lists.push(blockList('recurrent', blocks.state))
    return lists
  }

  /** What a prefill leaves in the blocks. */
  compute(blocks, seed) {
    this._each(blocks, seed, (rank, region, block, data) => rank.write(region, block, data))
  }

  /** Where the blocks hold another state than the prompt's; empty: nowhere. */
  wrong(blocks, seed) {
    const found = []
    this._each(blocks, seed, (rank, region, block, data, bytes) => {
      const there = rank.read(region, block)
      if (Buffer.compare(there.subarray(0, bytes), data.subarray(0, bytes))) {
        found.push(`${region} block ${block}`)
      }
    })
    return found
  }

  /** Free blocks that somebody has written to. */
  ghosts() {
    const found = []
    for (const rank of this.ranks) {
      for (const region of ['kv', 'state']) {
        for (const block of this.free[region]) {
          if (rank.read(region, block).some((byte) => byte !== POISON)) found.push(`${region} ${block}`)
        }
      }
    }
    return found
  }

  async close() {
    await Promise.all(this.ranks.map((rank) => rank.close()))
    await this.session.close()
  }

  _poison(region, block) {
    for (const rank of this.ranks) {
      rank.write(region, block, Buffer.alloc(rank.read(region, block).length, POISON))
    }
  }

  /** Calls `visit` with every page of the prompt as it should be, and how much of it counts. */
  _each(blocks, seed, visit) {
    for (const [index, rank] of this.ranks.entries()) {
      const first = index * this.heads
      for (const [at, block] of blocks.kv.entries()) {
        const tokens = Math.min(this.pageTokens, POSITION - at * this.pageTokens)
        const items = new Uint32Array(this.pageTokens * this.heads)
        for (let item = 0; item < items.length; item++) {
          const token = at * this.pageTokens + Math.floor(item / this.heads)
          items[item] = number(seed, token, first + (item % this.heads))
        }
        visit(rank, 'kv', block, Buffer.from(items.buffer), tokens * this.heads * ITEM_BYTES)
      }
      const items = new Uint32Array(this.heads * STATE)
      for (let item = 0; item < items.length; item++) {
        items[item] = number(seed, 1000 + (item % STATE), first + Math.floor(item / STATE))
      }
      visit(rank, 'state', blocks.state[0], Buffer.from(items.buffer), items.byteLength)
    }
  }
}

module.exports = { Engine, POSITION }
