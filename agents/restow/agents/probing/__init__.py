"""What reading and copying cost here, and over which transport a peer is read."""
