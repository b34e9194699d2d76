"""How inductor compiles in tests: as fast as a few small kernels can be had from an empty cache."""

from __future__ import annotations

# No pool of compilers, whose processes would each load torch anew; and the processor's vector
# instructions are believed, not tried with a program of each kind, which takes as long as the
# kernels.
QUICK = {"compile_threads": 1, "cpp.vec_isa_ok": True}
