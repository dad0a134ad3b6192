'use strict'
// An engine's session, as the comments of Broker.Session and Broker.RegisterEngine have it.
const { randomUUID } = require('node:crypto')
const { Backoff, call, client, over, reasonOf, statusOf } = require('./contract')

const RENEWALS_PER_LEASE = 3
const LOOK_EVERY_MS = 50
const SILENCE_MS = 45_000
const MAX_BATCH = 128
const TRIED_AGAIN = new Set(['UNAVAILABLE', 'DEADLINE_EXCEEDED', 'RESOURCE_EXHAUSTED'])
const MENDED_BY_SOMEBODY = new Set(['UNAUTHENTICATED', 'PERMISSION_DENIED'])

/** Block ids as they travel. */
function blockList(group, ids, firstBlock = 0) {
  return { group, first_block: firstBlock, block_ids: Buffer.from(Int32Array.from(ids).buffer) }
}

class Session {
  /** Prepares; `start` connects. `lost` resolves with the reason if the session ends for good. */
  constructor(address, engineId, layout) {
    this.ref = { engine_id: engineId, incarnation: randomUUID() }
    this.epochs = new Set()
    this.streams = 0
    this.lost = new Promise((resolve) => (this._lose = resolve))
    this._layout = layout
    this._stub = client('Broker', address)
    this._words = new Map() // what has no end yet, by number, in the order in which it was said
    this._lastNumber = 0
    this._stream = null
    this._backoff = new Backoff()
    this._closed = false
    this._timer = setInterval(() => this._keepTime(), LOOK_EVERY_MS)
  }

  /** Resolves when the session is open for the first time. */
  async start() {
    const opened = new Promise((resolve) => (this._opened = resolve))
    this._runner = this._run()
    await opened
  }

  /** Words that have no end yet. */
  get open() {
    return this._words.size
  }

  /** What has no end yet, and whether there is a stream. */
  told() {
    const open = [...this._words.values()].map(({ message, said }) => ({ ...message, said }))
    return { streaming: this._stream !== null, streams: this.streams, open }
  }

  /** P has state. Resolves with the end: P's pages are free. `renewed` hears of each renewal. */
  publish(publication, holdMs, renewed = () => {}) {
    const now = Date.now()
    const more = {
      renewAt: now + publication.lease_ms / RENEWALS_PER_LEASE,
      holdUntil: now + holdMs,
      until: now + holdMs + publication.lease_ms,
      renewed
    }
    return this._say({ publish: publication }, publication.handoff_id, more)
  }

  /** D wants state. Resolves with the end: D's pages are its own. */
  request(demand) {
    return this._say({ request: demand }, demand.handoff_id, { until: Date.now() + demand.timeout_ms })
  }

  async close() {
    this._closed = true
    clearInterval(this._timer)
    this._stream?.cancel()
    await this._runner
    if (!this._isLost) await call(this._stub, 'UnregisterEngine', { engine: this.ref }).catch(() => {})
    this._stub.close()
  }

  // -- inside ---------------------------------------------------------------------------------

  _say(body, handoffId, more) {
    const message = { message_id: ++this._lastNumber, ...body }
    return new Promise((resolve) => {
      const word = { message, handoffId, tell: resolve, said: this._stream !== null, ...more }
      this._words.set(message.message_id, word)
      this._stream?.write({ messages: [message] })
    })
  }

  /** One stream after the other; the engine registers again before each. */
  async _run() {
    while (!this._closed) {
      try {
        await call(this._stub, 'RegisterEngine', { engine: this.ref, layout: this._layout })
        const error = await this._serve()
        if (reasonOf(error) === 'ENGINE_REPLACED') return this._end('ENGINE_REPLACED')
      } catch (error) {
        if (this._isFinal(error)) return this._end(reasonOf(error) || statusOf(error))
      }
      if (!this._closed) await this._backoff.pause()
    }
  }

  /** Whether a refused registration is refused for good. */
  _isFinal(error) {
    const status = statusOf(error)
    if (MENDED_BY_SOMEBODY.has(status)) return this.streams === 0
    return reasonOf(error) !== '' && !TRIED_AGAIN.has(status)
  }

  _end(reason) {
    this._isLost = true
    for (const word of [...this._words.values()]) {
      this._finish(word, { state: 'HANDOFF_STATE_FAILED', reason })
    }
    this._lose(reason)
  }

  async _serve() {
    const stream = this._stub.Session()
    const ended = over(stream)
    stream.on('data', (batch) => batch.events.forEach((event) => this._hear(stream, event)))
    stream.write({ engine: this.ref, messages: [] })
    const error = await ended
    this._stream = null
    return error
  }

  _hear(stream, event) {
    if (event.opened) {
      this.epochs.add(event.opened.broker_epoch)
      this.streams += 1
      this._backoff.began()
      this._sayAgain(stream)
      this._stream = stream
      this._opened()
    } else if (event.ended) {
      const { handoff_id: handoffId, demand } = event.ended
      for (const word of [...this._words.values()]) {
        const mine = demand ? word.message.message_id === demand : word.message.publish
        if (mine && word.handoffId === handoffId) this._finish(word, event.ended)
      }
    } else if (event.refused) {
      const word = this._words.get(event.refused.message_id)
      if (word) this._finish(word, { state: 'REFUSED', ...event.refused })
    }
  }

  /** Says everything that has no end, in the order in which it was said first. */
  _sayAgain(stream) {
    const now = Date.now()
    const again = []
    for (const word of this._words.values()) {
      const body = word.message.publish ?? word.message.request
      if (word.said) body.repeated = true
      if (word.message.request) body.timeout_ms = Math.max(1, word.until - now)
      word.said = true
      again.push(word.message)
    }
    while (again.length) stream.write({ messages: again.splice(0, MAX_BATCH) })
  }

  _finish(word, end) {
    this._words.delete(word.message.message_id)
    word.tell(end)
  }

  /** Renews leases, and waits for a broker that is gone no longer than was agreed. */
  _keepTime() {
    const now = Date.now()
    for (const word of [...this._words.values()]) {
      const publication = word.message.publish
      if (this._stream && publication && word.renewAt <= now && now < word.holdUntil) {
        const { handoff_id, lease_ms } = publication
        word.renewAt = now + lease_ms / RENEWALS_PER_LEASE
        this._stream.write({ messages: [{ renew: { handoff_id, lease_ms } }] })
        word.renewed()
      }
      // A broker that is there says when no rank can write to D's pages any more.
      if (word.message.request && this._stream) continue
      const silent = { state: 'HANDOFF_STATE_EXPIRED', reason: 'BROKER_SILENT' }
      const free = word.said ? word.until + SILENCE_MS : word.until
      if (now >= free && (word.said || !this._stream)) this._finish(word, silent)
    }
  }
}

module.exports = { Session, blockList }
