//! The file `libtessera.so` that is shipped: it loads wherever glibc 2.17 or newer is, and brings
//! nothing into a process but the hooks. A dynamic linker that can't satisfy it would leave it out
//! and run the program without a quota, so these are properties of the quota.

use std::collections::BTreeSet;
use std::process::Command;

use tessera_cuda::hooks::HOOKS;
use tessera_cuda::nvml::NVML_HOOKS;
use tessera_tests::{artefacts, external};

/// What a binutils program prints about the shim.
fn about_the_shim(program: &str, flags: &[&str]) -> String {
    let out = Command::new(program).args(flags).arg(artefacts().shim()).output();
    let out = out.expect("binutils are part of every C compiler");
    assert!(out.status.success(), "{program}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// The glibc version in `GLIBC_2.17`, as numbers that compare.
fn glibc_version(symbol_version: &str) -> Option<Vec<u32>> {
    symbol_version.strip_prefix("GLIBC_")?.split('.').map(|part| part.parse().ok()).collect()
}

#[test]
fn versions_compare_by_number() {
    assert_eq!(glibc_version("GLIBC_2.3.4"), Some(vec![2, 3, 4]));
    assert!(glibc_version("GLIBC_2.4") < glibc_version("GLIBC_2.17"));
    assert_eq!(glibc_version("GCC_3.0"), None);
    assert_eq!(glibc_version("GLIBC_PRIVATE"), None);
}

#[test]
fn the_shim_exports_the_hooks_and_dlsym_and_nothing_else() {
    // A further export would take the place of a function of that name in every process.
    let listing = about_the_shim("nm", &["-D", "--defined-only"]);
    let exported: BTreeSet<&str> =
        listing.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    let mut expected: BTreeSet<&str> = HOOKS.iter().map(|hook| hook.export).collect();
    expected.extend(NVML_HOOKS);
    expected.insert("dlsym");
    assert_eq!(exported, expected);
}

#[test]
fn the_shim_needs_the_c_library_and_nothing_else() {
    // Not libgcc_s: slim images lack it. Not ld-linux: musl doesn't know it. Not libdl: one more file
    // to open in every process.
    let dynamic = about_the_shim("readelf", &["-dW"]);
    let needed: Vec<&str> = dynamic
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| line.split(['[', ']']).nth(1))
        .collect();
    assert_eq!(needed, ["libc.so.6"], "{dynamic}");
}

#[test]
fn the_shim_asks_for_no_symbol_that_glibc_2_17_lacks() {
    let local = artefacts().dir().join("libtessera.so.local");
    if local.exists() {
        let reason = "shim/release had no zig, so the shim is linked for this machine alone";
        return external::skip("the check of glibc versions", reason);
    }
    let listing = about_the_shim("readelf", &["-VW"]);
    let names = listing.split_whitespace().filter(|word| word.starts_with("GLIBC_"));
    let names: BTreeSet<&str> = names.collect();
    assert!(names.contains("GLIBC_2.2.5") || names.contains("GLIBC_2.17"), "{listing}");
    for name in names {
        let version = glibc_version(name);
        assert!(version.is_some_and(|version| version <= vec![2, 17]), "{name} is needed");
    }
}

#[test]
fn the_shim_is_small() {
    // It is mapped into every process of the container.
    let bytes = std::fs::metadata(artefacts().shim()).expect("just found").len();
    assert!(bytes <= 500 << 10, "{bytes} bytes");
}

#[test]
fn the_shim_can_be_mapped_without_writing_to_code_or_an_executable_stack() {
    // SELinux and hardened kernels refuse either, and with it the shim.
    assert!(!about_the_shim("readelf", &["-dW"]).contains("TEXTREL"));
    let segments = about_the_shim("readelf", &["-lW"]);
    let stack = segments.lines().find(|line| line.contains("GNU_STACK")).expect("declared");
    assert!(stack.contains(" RW ") && !stack.contains("RWE"), "{stack}");
}
