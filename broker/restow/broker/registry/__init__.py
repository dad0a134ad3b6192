"""Who leads among several brokers: a registry, and the rules by which a broker leads."""
