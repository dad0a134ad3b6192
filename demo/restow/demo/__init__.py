"""The demo: prompts prefilled on one engine and answered by another that is cut differently."""
