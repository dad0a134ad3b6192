"""Programs that ask a connector's own functions what they would copy.

They run in the connector's environment, where Restow may not be installed: they import nothing of
it, and each other by relative names, because this folder alone is on the path.
"""
