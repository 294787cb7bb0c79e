//! The shim beside what else is in a process, and in a container.

mod closed;
mod guest;
mod lookup;
mod second_preload;
mod upgrade;
