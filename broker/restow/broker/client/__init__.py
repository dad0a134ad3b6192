"""The client: how an engine or a tool speaks to the broker. Needs no torch."""

from restow.broker.client.admin import AdminClient
from restow.broker.client.async_admin import AsyncAdminClient
from restow.broker.client.blocking import BlockingSession
from restow.broker.client.book import HandoffEnded
from restow.broker.client.credentials import Credentials
from restow.broker.client.errors import BrokerCallError, BrokerUnreachableError
from restow.broker.client.session import EngineSession

__all__ = [
    "AdminClient",
    "AsyncAdminClient",
    "BlockingSession",
    "BrokerCallError",
    "BrokerUnreachableError",
    "Credentials",
    "EngineSession",
    "HandoffEnded",
]
