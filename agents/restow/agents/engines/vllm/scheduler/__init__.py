"""The connector in vLLM's scheduler, which follows requests and talks to the broker."""
