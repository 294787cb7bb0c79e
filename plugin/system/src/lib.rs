//! The operating system, bounded: files by descriptor, sockets that leave descriptors for others, locks, the
//! terminal.
//!
//! **For**: every contact with the file system or a listener that a container could make slow or hostile. One
//! module for files ([`files`]), one rule for descriptors ([`descriptors`]), one for connections, whatever listens
//! ([`connections`]). [`panics`] says what a panic does.
//!
//! **May use**: the system's libraries. **Must not**: know anything of GPUs, allocations or Kubernetes.
#![forbid(unsafe_code)]

pub mod connections;
pub mod descriptors;
pub mod files;
pub mod locks;
pub mod panics;
pub mod terminal;
