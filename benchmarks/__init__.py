"""Benchmarks, each a command: ``python -m benchmarks.NAME [-n N] [--server KIND | --database-url URL] [--json]``.

A figure counts only if every item of its run is accounted for; otherwise the command fails and prints none. Figures of
different machines, or of different moments of a busy one, cannot be compared: that is why each run measures a peer beside
it, and why the ratio says more than the number.

========  ====================================================  ===============  ===================
name      measures                                              quick look, -n   full, -n
========  ====================================================  ===============  ===================
tracked   no-op jobs, from submit to recorded                   10000            100000
submit    items into the ledger                                 50000            300000
small     Tasks of one item each, over HTTP             1000             20000
poll      one look at the progress of a large Task              20000            1000000
sheet     an uploaded file, from its last byte to the ledger    20000            500000
claim     jobs of a Task borrowed by many processes            10000            1000000
figures   all of them, and writes the page of figures
========  ====================================================  ===============  ===================
"""
