//! Links as `libnvidia-ml.so.1`.

include!("../link.rs");

fn main() {
    link_as("libnvidia-ml.so.1");
}
