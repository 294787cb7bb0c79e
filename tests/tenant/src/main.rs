//! tessera.

fn main() {}
