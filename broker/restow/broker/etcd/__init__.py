"""A client of etcd, for the few calls that several brokers need."""
