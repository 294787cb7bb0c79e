//! What a container gets: which GPU, how much of it, and how it is delivered.

mod allocation;
mod contexts;
mod delivery;
mod mig;
mod placement;
mod shares;
mod shims;
