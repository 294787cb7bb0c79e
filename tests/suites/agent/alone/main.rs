//! Tests of the plugin that flood it, measure it, or count what their own process has: one at a time.

#![allow(clippy::await_holding_lock, reason = "each test has a runtime, and a thread, of its own")]

mod doors;
mod load {
    //! The plugin's process under what a node does to it over the months: the wall clock jumps, quotas are
    //! changed while pods come and go, it is killed. Nothing is lost, and its memory stays what it was.

    mod plugin;
    mod quotas;
}
mod many;
