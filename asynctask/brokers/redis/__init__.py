"""The broker that is a Redis server, in Sidekiq's own keys and texts; and a client that only pushes.

Redis Cluster is out of scope: a job moves between keys that it would keep on different nodes. A replicated Redis with
failover is one server to this module.
"""
