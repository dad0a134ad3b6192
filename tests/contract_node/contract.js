'use strict'
// What every client takes from the contract: the .proto files, and what their comments say of
// channels, reasons and pauses. Nothing else of Restow's is read.
const path = require('node:path')
const grpc = require('@grpc/grpc-js')
const loader = require('@grpc/proto-loader')

const FILES = ['restow/v1/broker.proto', 'restow/v1/daemon.proto']
const definitions = loader.loadSync(FILES, {
  includeDirs: [path.resolve(__dirname, '../../proto')],
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true
})
const { v1 } = grpc.loadPackageDefinition(definitions).restow

const MIB = 1 << 20
const CHANNEL = {
  'grpc.max_send_message_length': 16 * MIB,
  'grpc.max_receive_message_length': 64 * MIB,
  'grpc.keepalive_time_ms': 3000,
  'grpc.keepalive_timeout_ms': 5000,
  'grpc.keepalive_permit_without_calls': 1,
  'grpc.initial_reconnect_backoff_ms': 200,
  'grpc.max_reconnect_backoff_ms': 2000
}

/** A client of one service at an address. */
function client(service, address) {
  return new v1[service](address, grpc.credentials.createInsecure(), CHANNEL)
}

/** The stable reason of a call that was refused; empty: nobody of ours refused it. */
function reasonOf(error) {
  return error?.metadata?.get('restow-reason')[0] ?? ''
}

/** The status of a call that failed, as a word. */
function statusOf(error) {
  return grpc.status[error.code]
}

/** Pauses between tries: from 0.1 s, doubled up to 5 s, each by a random factor; from the
 * beginning again after what has held for a second. */
class Backoff {
  #nextMs = 100
  #worksSince = Infinity

  began() {
    this.#worksSince = Date.now()
  }

  async pause() {
    if (Date.now() - this.#worksSince >= 1000) this.#nextMs = 100
    this.#worksSince = Infinity
    const pauseMs = this.#nextMs * (0.5 + Math.random())
    this.#nextMs = Math.min(2 * this.#nextMs, 5000)
    await new Promise((resolve) => setTimeout(resolve, pauseMs))
  }
}

/** Resolves when a stream is over, with its error if it has one. */
function over(stream) {
  return new Promise((resolve) => {
    stream.on('error', resolve)
    stream.on('end', () => resolve(null))
  })
}

/** Calls a unary method. Rejects with gRPC's error. */
function call(stub, method, request, deadlineMs = 20_000) {
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + deadlineMs
    stub[method](request, { deadline }, (error, response) =>
      error ? reject(error) : resolve(response)
    )
  })
}

module.exports = { Backoff, call, client, over, reasonOf, statusOf }
