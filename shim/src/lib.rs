//! tessera-shim.
