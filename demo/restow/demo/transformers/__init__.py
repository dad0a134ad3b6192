"""An engine that runs a Hugging Face model on torch CPU, with its state in paged, cut memory."""
