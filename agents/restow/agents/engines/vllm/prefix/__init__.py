"""What vLLM's prefix cache holds, by content, and how it is kept in place for others."""
