"""The connector in vLLM's workers, which serve the caches of their ranks."""
