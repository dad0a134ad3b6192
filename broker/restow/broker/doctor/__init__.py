"""The checks of `restow doctor`: host, packages, certificates, registry and brokers."""
