//! Enumerations of the admin service as the words that people and programs read.

pub use super::table::{policy_name as policy, state_name as allocation, state_of_gpu as gpu};
