//! tessera-tests.
