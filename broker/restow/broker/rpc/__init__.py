"""Common parts of gRPC servers and channels: errors as statuses, messages as values, pings."""
