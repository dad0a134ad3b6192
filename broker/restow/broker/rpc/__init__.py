"""What every gRPC server and channel of ours has: typed errors as status, parsing, pings."""
