"""For tests of applications and of implementations: waiting for facts, and the suites that a broker must pass."""
