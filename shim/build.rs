//! Link arguments of `libtessera.so`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The table of hooks holds the addresses of this library's own exports. Without this the dynamic
    // linker would fill in whatever library defines those names first, such as a wrapper that is
    // preloaded before the shim.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}
