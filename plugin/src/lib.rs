//! tessera-plugin.
