"""The Restow broker: layouts, planner, directory of handoffs, gRPC service, client and commands."""
