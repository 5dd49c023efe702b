"""Pure decisions over plain values: the states, and what each transition does. No clock, no server, no I/O."""
