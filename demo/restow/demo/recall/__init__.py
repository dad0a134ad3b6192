"""The recall model is a small hybrid that recalls its prompt, so that corrupted state shows."""
