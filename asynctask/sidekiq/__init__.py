"""Sidekiq's format: its jobs as text, its keys in Redis, and its tools' view of a worker process.

``payload`` and ``activejob`` are values; ``broker`` works on a Redis server, in Sidekiq's own keys;
``client`` only pushes; ``worker_file`` reads the file of ``-C``; ``sharing`` is what the runtime of a worker process calls.

Redis Cluster is out of scope: a job moves between keys that it would keep on different nodes. A replicated Redis with
failover is one server to this package.
"""
