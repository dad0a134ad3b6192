"""A test in whose background something went wrong has failed, whatever it asserted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
async def nothing_unhandled(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """Check that no task dies unheard, and that gRPC reports no unexpected error of a servicer.

    What Restow itself logs is said on purpose.
    """
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    yield
    assert not unhandled
    errors = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert not [one for one in errors if not one.name.startswith("restow.")]
