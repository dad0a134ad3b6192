"""The calls of etcd that are used: messages and services, generated from rpc.proto."""
