//! Views of the agent: status and what root asks, metrics and probes, explanations.
//!
//! **For**: composing what the agent knows into answers for people and machines. [`admin`] serves and asks the
//! admin socket, [`metrics`] the HTTP port, `explain` the story of one container, [`history`] what was, [`view`]
//! the JSON API; [`print`] lays text out for people.
//!
//! **May use**: the agent and everything below it. **Must not**: decide anything, or keep state that the agent
//! would need.

// `terminal::print`: a reader that goes away, like `head`, must not end a process by a panic.
#![cfg_attr(not(test), deny(clippy::print_stdout))]
#![forbid(unsafe_code)]

pub mod admin;
mod explain;
pub mod history;
pub mod metrics;
pub mod print;
pub mod view;
