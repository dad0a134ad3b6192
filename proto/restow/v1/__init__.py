"""The contract: messages and services of `restow.v1`, generated from the .proto files."""
