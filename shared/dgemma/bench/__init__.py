"""Measuring: what a pass, a reply and the host cost here, and how a peer does on the same machine.

    machine.py            what this machine is
    measure.py            one backend: prefill, a step, the host, whole replies, peak memory
    compare.py, side.py   two programs on one checkpoint, in alternating processes
    random_checkpoint.py  a checkpoint of any shape with random weights

Figures are medians with their range over repeats; the last line of a run is one JSON object.

Not here: quality (a fast wrong answer looks fine in this table).
"""
