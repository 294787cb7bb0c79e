//! A tenant at its gate, under an arbiter that the test scripts.

mod failing;
mod turns;
mod work;
