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
from restow.broker.client.engine.commands import CommandStatus, StateOrder
from restow.broker.client.engine.handoff_futures import Delivery, HandoffEnded
from restow.broker.client.engine.session import EngineSession
from restow.broker.state_commands import Answer, Outcome, Verb

__all__ = [
    "AdminClient",
    "Answer",
    "AsyncAdminClient",
    "BlockingDelivery",
    "BlockingSession",
    "BrokerCallError",
    "BrokerUnreachableError",
    "CommandStatus",
    "ContentChain",
    "Credentials",
    "Delivery",
    "EngineSession",
    "ForkedError",
    "HandoffEnded",
    "HashForm",
    "NoWelcomeError",
    "Offer",
    "Outcome",
    "PagesNotFreeError",
    "Prefix",
    "PrefixChain",
    "PrefixHolder",
    "SessionClosedError",
    "StateOrder",
    "Verb",
    "chain_of",
    "content_of",
]
