//! Dynamic Resource Allocation: shares of any size, as claims ask for them. Both GPUs of the node are the
//! driver's in these cases; see [`crate::dra::mode`].

mod examples;
mod outages;
mod sharing;
mod sizes;

pub use examples::*;
pub use outages::*;
pub use sharing::*;
pub use sizes::*;
