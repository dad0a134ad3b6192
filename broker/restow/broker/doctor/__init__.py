"""What `restow doctor` looks at: the host, the packages, the certificates, the broker."""
