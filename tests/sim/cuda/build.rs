//! Links as `libcuda.so.1`.

include!("../link.rs");

fn main() {
    link_as("libcuda.so.1");
}
