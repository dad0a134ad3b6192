'use strict'
// Hands prompts over from an engine to another, both written from the contract alone, and says
// on its standard output, a JSON value a line, how far it is and what it found. Each line that it
// reads is how many prompts it may have begun by then, "alone": the broker is dead, or "open": tell
// what has no end yet.
const { EventEmitter, once } = require('node:events')
const readline = require('node:readline')
const { setTimeout: sleep } = require('node:timers/promises')
const { Engine, POSITION } = require('./engines')
const { Session } = require('./session')

const { broker, daemons, prompts } = JSON.parse(process.argv[2])
const AT_ONCE = 8
const TRIES = 5
// A P whose broker was killed after it told D, and before it told P, holds its blocks so long.
const LEASE_MS = 20_000
const HOLD_MS = 40_000
const TIMEOUT_MS = 90_000
const LATE = 50 // of so many prompts D asks for one when P's first lease would have run out
const SHORT_LEASE_MS = 6000

const say = (value) => process.stdout.write(JSON.stringify(value) + '\n')
const found = { done: 0, wrong: [], lost: [], again: [], renewals: 0 }
const limits = new EventEmitter().setMaxListeners(0)
let may = 0

readline.createInterface({ input: process.stdin }).on('line', (line) => {
  if (line === 'alone' || line === 'open') return limits.emit(line)
  may = Number(line)
  limits.emit('raised')
})

/** Resolves when so many prompts may have begun. */
async function until(begun) {
  while (may < begun) await once(limits, 'raised')
}

/** P's side of a handoff. Resolves with its end; then its blocks are spoilt. */
async function prefill(p, id, seed, lease_ms, renewed) {
  const blocks = p.take()
  p.compute(blocks, seed)
  const words = { handoff_id: id, position_tokens: POSITION, lease_ms }
  const ends = []
  if (seed % 2) p.ranks.forEach((rank) => rank.fence(id))
  if (seed % 3) {
    ends.push(p.session.publish({ ...words, blocks: p.lists(blocks), final: true }, HOLD_MS, renewed))
  } else { // in two chunks, of which the second one is final
    ends.push(p.session.publish({ ...words, blocks: p.lists(blocks, 0, 1) }, HOLD_MS))
    ends.push(p.session.publish({ ...words, blocks: p.lists(blocks, 1), final: true }, HOLD_MS, renewed))
  }
  if (!(seed % 2)) p.ranks.forEach((rank) => rank.fence(id))
  const told = await Promise.all(ends)
  p.giveBack(blocks)
  return told.at(-1)
}

/** D's side: its end, and whether what arrived is the prompt's state. */
async function decode(d, id, seed) {
  const blocks = d.take()
  const words = { handoff_id: id, blocks: d.lists(blocks), timeout_ms: TIMEOUT_MS }
  const end = await d.session.request(words)
  const wrong = end.state === 'HANDOFF_STATE_DONE' ? d.wrong(blocks, seed) : []
  d.giveBack(blocks)
  return { ...end, wrong }
}

/** One prompt, under another id if D was not told of a state that P was told it has. */
async function handOver(p, d, seed) {
  for (let tried = 0; tried < TRIES; tried++) {
    const id = `prompt-${seed}.${tried}`
    let renewals = 0
    let toldP = null
    let ask = () => {}
    const lateEnough = new Promise((resolve) => (ask = resolve))
    const renewed = () => {
      found.renewals += 1
      if (++renewals > 3) ask()
    }
    const early = seed % 2 ? decode(d, id, seed) : null
    const late = seed % LATE === 0
    const leaseMs = late ? SHORT_LEASE_MS : LEASE_MS
    const published = prefill(p, id, seed, leaseMs, renewed).then((end) => (toldP = end))
    if (late) await Promise.race([lateEnough, published])
    const end = await (early ?? decode(d, id, seed))
    if (end.wrong.length) found.wrong.push({ id, where: end.wrong })
    if (end.state === 'HANDOFF_STATE_DONE') {
      await published
      found.done += 1
      return say({ done: found.done })
    }
    const why = { id, state: end.state, reason: end.reason, detail: end.detail, p: toldP }
    found.again.push(why)
    // A broker that is killed between its words to P and to D leaves such a one behind.
    if (toldP?.state !== 'HANDOFF_STATE_DONE') found.lost.push(why)
    if (found.lost.length > 2) throw new Error(JSON.stringify(found))
  }
}

/** While no broker is there D waits no longer than it said. */
async function waitsItself(d) {
  await once(limits, 'alone')
  while (d.session._stream) await sleep(10)
  const end = await d.session.request({ handoff_id: 'nobody-hears', blocks: [], timeout_ms: 200 })
  say({ silent: end.reason })
}

async function main() {
  const p = new Engine('prefill', broker, daemons.p, 2, 16)
  const d = new Engine('decode', broker, daemons.d, 4, 8)
  await Promise.all([p.start(), d.start()])
  say({ done: 0 })
  limits.on('open', () => say({ open: [p, d].map((engine) => engine.session.told()) }))
  waitsItself(d)
  let next = 0
  const worker = async () => {
    while (next < prompts) {
      const seed = next++
      await until(seed + 1)
      await handOver(p, d, seed)
    }
  }
  await Promise.all(Array.from({ length: AT_ONCE }, worker))
  const fences = () => p.ranks.reduce((sum, rank) => sum + rank.fences.size, 0)
  while (fences() || p.session.open || d.session.open) await sleep(10)
  found.ghosts = [...p.ghosts(), ...d.ghosts()]
  found.epochs = d.session.epochs.size
  found.streams = [p.session.streams, d.session.streams, p.ranks[0].streams, d.ranks[0].streams]
  // Another life under P's name ends P, which does not come back.
  const other = new Session(broker, 'prefill', p.session._layout)
  await other.start()
  found.replaced = await p.session.lost
  say(found)
  await until(Infinity)
  await other.close()
  await p.close()
  await d.close()
  process.exit(0)
}

main().catch((error) => {
  say({ ...found, failed: String(error) })
  process.exit(1)
})
