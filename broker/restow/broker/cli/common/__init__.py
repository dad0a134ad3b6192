"""What all commands use: connections, output, files, and ids that a user may shorten."""
