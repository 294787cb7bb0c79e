//! Views of the agent: the admin service, metrics and probes, explanations.
//!
//! **For**: composing what the agent knows into answers for people and machines. [`admin`] serves and asks the
//! admin socket, [`metrics`] the HTTP port, [`explain`] the story of one container.
//!
//! **May use**: the agent and everything below it. **Must not**: decide anything, or keep state that the agent
//! would need.
#![forbid(unsafe_code)]

pub mod admin;
pub mod explain;
pub mod metrics;
