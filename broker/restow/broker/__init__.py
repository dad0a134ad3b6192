"""The broker: layouts, planner, directory, service, client and admin CLI."""
