"""Subscribes to KV events and decodes them with vLLM's own classes. Runs beside vLLM.

    kv_events_main.py ENDPOINT REPLAY_ENDPOINT EVENTS

Prints the messages of the first events, as a replay has them. Each payload must have the fields
that vLLM's encoder makes of the same events, in their order. With 0.32 the bytes are the same; with
0.33 msgspec writes the length of a map in another form.
"""

from __future__ import annotations

import json
import sys
import time

import msgspec
import zmq
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher


def plain(payload: bytes) -> str:
    """Return the content of a payload, with fields in their order."""
    return json.dumps(msgspec.msgpack.decode(payload))


endpoint, replay_endpoint, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
decoder, encoder = msgspec.msgpack.Decoder(type=KVEventBatch), msgspec.msgpack.Encoder()
context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
subscriber, replays = context.socket(zmq.SUB), context.socket(zmq.DEALER)
subscriber.connect(endpoint)
subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv@")
replays.connect(replay_endpoint)
replayed: list[list[bytes]] = []
until_s, heard = time.monotonic() + 60, 0
while heard < count and time.monotonic() < until_s:
    replays.send_multipart((b"", (0).to_bytes(8, "big")))
    replayed = []
    while (frames := replays.recv_multipart()[1:])[1] != ZmqEventPublisher.END_SEQ:
        replayed.append(frames)
    heard = sum(len(decoder.decode(payload).events) for _, _, payload in replayed)
for topic, sequence, payload in replayed:
    batch = decoder.decode(payload)
    print(
        json.dumps(
            {
                "topic": topic.decode(),
                "sequence": int.from_bytes(sequence, "big"),
                "rank": batch.data_parallel_rank,
                "same_fields": plain(encoder.encode(batch)) == plain(payload),
                "events": [
                    {
                        "type": type(event).__name__,
                        **msgspec.to_builtins(event),
                    }
                    for event in batch.events
                ],
            }
        )
    )
