"""The runtime: the process that fetches jobs and performs them."""
