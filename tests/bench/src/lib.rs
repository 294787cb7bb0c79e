//! tessera-bench.
