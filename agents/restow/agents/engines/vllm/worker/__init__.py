"""The connector in vLLM's workers, which describes and serves the caches of their ranks."""
