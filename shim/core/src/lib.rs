//! tessera-shim-core.
