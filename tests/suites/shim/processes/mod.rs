//! Processes that start, fork and end, well or badly.

mod lifecycle;
mod several_shares;
mod teardown;
mod unruly;
