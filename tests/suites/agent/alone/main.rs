//! Tests of the plugin that flood it, measure it, or count what their own process has: one at a time.

mod doors;
mod load;
mod many;
mod series;
