//! The shim beside what else is in a process, and in a container.

mod artefact;
mod closed;
mod foreign_libc;
mod guest;
mod lookup;
mod second_preload;
mod upgrade;
