'use strict'
// One rank: memory in a shared-memory object, and the stream to the daemon that serves it.
const fs = require('node:fs')
const { Backoff, client, over } = require('./contract')

class Rank {
  /** Makes the memory, filled with `poison`. `regions`: name, pages and bytes of a page. */
  constructor(socket, ref, rank, regions, poison) {
    this.name = `restow-contract-${process.pid}-${ref.engine_id}-${rank}`
    this.fences = new Set()
    this.streams = 0
    this._regions = new Map()
    let offset = 0
    for (const one of regions) {
      this._regions.set(one.name, { ...one, offset })
      offset += one.pages * one.bytes
    }
    this._file = fs.openSync(`/dev/shm/${this.name}`, 'wx+', 0o600)
    fs.writeSync(this._file, Buffer.alloc(offset, poison))
    this._attach = {
      engine: ref,
      rank,
      regions: [...this._regions.values()].map((one) => ({
        name: one.name,
        shared_memory: this.name,
        offset_bytes: one.offset,
        page_count: one.pages,
        page_stride_bytes: one.bytes
      }))
    }
    this._stub = client('AgentDaemon', `unix:${socket}`)
    this._stream = null
    this._closed = false
  }

  /** Resolves when the daemon serves the rank for the first time. */
  async start() {
    const served = new Promise((resolve) => (this._served = resolve))
    this._runner = this._run()
    await served
  }

  write(region, page, data) {
    const { offset, bytes } = this._regions.get(region)
    fs.writeSync(this._file, data, 0, data.length, offset + page * bytes)
  }

  read(region, page) {
    const { offset, bytes } = this._regions.get(region)
    const data = Buffer.alloc(bytes)
    fs.readSync(this._file, data, 0, bytes, offset + page * bytes)
    return data
  }

  /** Says that the rank's part is in memory: again to each daemon, until it is of no use. */
  fence(handoffId) {
    this.fences.add(handoffId)
    this._stream?.write({ messages: [{ fence: { handoff_id: handoffId } }] })
  }

  async close() {
    this._closed = true
    this._stream?.end()
    await this._runner
    this._stub.close()
    fs.closeSync(this._file)
    fs.unlinkSync(`/dev/shm/${this.name}`)
  }

  async _run() {
    const backoff = new Backoff()
    while (!this._closed) {
      const stream = this._stub.Serve()
      const ended = over(stream)
      stream.on('data', (response) => {
        if (response.attached) {
          this.streams += 1
          backoff.began()
          this._stream = stream
          const messages = [...this.fences].map((handoff_id) => ({ fence: { handoff_id } }))
          if (messages.length) stream.write({ messages })
          this._served()
        }
        response.unfenced.forEach((handoffId) => this.fences.delete(handoffId))
      })
      stream.write({ messages: [{ attach: this._attach }] })
      await ended
      this._stream = null
      if (!this._closed) await backoff.pause()
    }
  }
}

module.exports = { Rank }
