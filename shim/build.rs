//! Link arguments of `libtessera.so`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The table of hooks holds the addresses of this library's own exports. Without this the dynamic
    // linker would fill in whatever library defines those names first, such as a wrapper that is
    // preloaded before the shim. (zig's linker does not know the narrower -Bsymbolic-functions.)
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    // Every dynamic linker of the last fifteen years reads the GNU table of symbols.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--hash-style=gnu");
    // Users' processes map it: without the symbol table it is a quarter smaller. What is exported
    // stays named, and the build id lets debuggers and profilers distinguish versions.
    if std::env::var("PROFILE").is_ok_and(|profile| profile == "release") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--strip-all,--build-id=sha1");
    }
}
