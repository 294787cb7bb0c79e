//! Link arguments of `libtessera.so`.

use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The table of hooks holds the addresses of this library's own exports. Without this the dynamic
    // linker would fill in whatever library defines those names first, such as a wrapper that is
    // preloaded before the shim. (zig's linker does not know the narrower -Bsymbolic-functions.)
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Every dynamic linker of the last fifteen years reads the GNU table of symbols.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--hash-style=gnu");
    // Users' processes map it: without the symbol table it is a quarter smaller. What is exported
    // stays named, and the build id tells debuggers and profilers one version from another.
    if std::env::var("PROFILE").is_ok_and(|profile| profile == "release") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--strip-all,--build-id=sha1");
    }
    if std::env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|env| env == "gnu") {
        link_unwinder_statically();
    }
}

/// std asks for `libgcc_s.so.1`, which would be one more library to find, map and relocate in every
/// process of the container, whether it uses a GPU or not (100 µs of `/bin/true`). Its static twin
/// has the same functions. rustc names the library itself, so the name is made to mean the twin.
/// (`shim/release` links with zig, which has an unwinder of its own and ignores this.)
fn link_unwinder_statically() {
    let dir = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    std::fs::write(dir.join("libgcc_s.so"), "INPUT(-lgcc_eh -lgcc)\n").expect("OUT_DIR is ours");
    println!("cargo:rustc-link-search=native={}", dir.display());
}
