"""A test in whose background something went wrong has failed, whatever it asserted."""

from broker.conftest import nothing_unhandled

__all__ = ["nothing_unhandled"]
