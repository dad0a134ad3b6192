"""What `restow top` shows: a screen that follows the broker, or lines."""
