"""The last module that the fork server loads: what is loaded by then stays out of every collection
of its children.

A collection walks all modules of torch and DeepSpeed and, because it writes to each object, copies
their memory; an engine has several of them at its start and end.
"""

import gc

gc.collect()
gc.freeze()
