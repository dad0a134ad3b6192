"""The pages of a broker over HTTP: metrics, probes and the status page; and its traces."""
