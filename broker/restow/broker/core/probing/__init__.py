"""Two agents try a read between their hosts, to find what it costs or over what it goes."""
