"""Memory: the ledger (the book of bytes), the host's memory, and the devices."""
