"""What went on lately: fixed rings of counts, of the broker, of a tenant, of two engines."""
