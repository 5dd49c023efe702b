"""Pure decisions over plain values: states, transitions, and when a Task may start jobs. No clock, no server, no I/O."""
