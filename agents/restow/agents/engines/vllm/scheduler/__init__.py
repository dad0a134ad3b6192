"""The connector in vLLM's scheduler, which follows requests and speaks to the broker."""
