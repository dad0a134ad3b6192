"""The client, with which engines and tools call the broker. It needs no torch."""

from restow.broker.client.admin import AdminClient, AsyncAdminClient
from restow.broker.client.connection.channel import Credentials
from restow.broker.client.connection.errors import (
    BrokerCallError,
    BrokerUnreachableError,
    ForkedError,
    NoWelcomeError,
    PagesNotFreeError,
    SessionClosedError,
)
from restow.broker.client.engine.blocking import BlockingDelivery, BlockingSession
from restow.broker.client.engine.chains import (
    ContentChain,
    HashForm,
    Offer,
    Prefix,
    PrefixChain,
    PrefixHolder,
    chain_of,
    content_of,
)
from restow.broker.client.engine.handoff_futures import Delivery, HandoffEnded
from restow.broker.client.engine.session import EngineSession

__all__ = [
    "AdminClient",
    "AsyncAdminClient",
    "BlockingDelivery",
    "BlockingSession",
    "BrokerCallError",
    "BrokerUnreachableError",
    "ContentChain",
    "Credentials",
    "Delivery",
    "EngineSession",
    "ForkedError",
    "HandoffEnded",
    "HashForm",
    "NoWelcomeError",
    "Offer",
    "PagesNotFreeError",
    "Prefix",
    "PrefixChain",
    "PrefixHolder",
    "SessionClosedError",
    "chain_of",
    "content_of",
]
