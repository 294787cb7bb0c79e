//! Pointer routing against NVIDIA's real driver library, without a device.
//!
//! The same program asks for every name, version and flag, through `dlsym` and both forms of
//! `cuGetProcAddress`, with and without the shim. Where the bare answer is a hooked export, the
//! shim's answer must be exactly that export's hook; all else must be the driver's own answer,
//! results and statuses included.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use tessera_cuda::coverage::{accounted_for, nvml_accounted_for};
use tessera_cuda::hooks::{HOOKS, Hook};
use tessera_cuda::nvml::NVML_HOOKS;
use tessera_harness::external;
use tessera_harness::routing::Answers;
use tessera_tenant::delivery::driver::LIBRARIES;

/// The CUDA version of driver 550: hooks from later versions are not there.
const CUDA_VERSION: u32 = 12_040;

fn real_driver(test: &str) -> Option<PathBuf> {
    external::or_skip(external::real_driver(), test)
}

/// The hooks that driver 550 has.
fn hooks() -> impl Iterator<Item = &'static Hook> {
    HOOKS.iter().filter(|hook| hook.since <= CUDA_VERSION)
}

#[test]
fn every_lookup_reaches_its_hook_or_the_drivers_own_function() {
    let Some(driver) = real_driver("pointer routing on the real libcuda") else { return };
    let bare = Answers::bare(&driver);
    let reached = bare.check_routing(&Answers::through_shim(&driver));
    let missed: Vec<_> = hooks().filter(|hook| !reached.contains(hook.export)).collect();
    assert!(missed.is_empty(), "no look-up led to {missed:?}");
}

#[test]
fn the_tables_versions_and_flavours_are_the_real_drivers() {
    let Some(driver) = real_driver("table versions on the real libcuda") else { return };
    let bare = Answers::bare(&driver);
    // Export → lowest version that led to it, and the flags that did at any version.
    let mut first: BTreeMap<&str, u32> = BTreeMap::new();
    let mut flags: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (question, answer) in bare.by_question() {
        let words: Vec<&str> = question.split(' ').collect();
        let (["v2", _, version, flag, ..], Some(symbol)) =
            (words.as_slice(), answer.strip_prefix("libcuda.so.1 "))
        else {
            continue;
        };
        let version = version.parse().expect("routing prints numbers");
        let lowest = first.entry(symbol).or_insert(version);
        *lowest = (*lowest).min(version);
        flags.entry(symbol).or_default().insert(flag);
    }
    for hook in hooks() {
        let Some(lowest) = first.get(hook.export) else {
            panic!("cuGetProcAddress never answers {}", hook.export);
        };
        // Versions below the asked ones are indistinguishable from the lowest asked.
        assert_eq!(*lowest, hook.since, "{}", hook.export);
        let only_per_thread = !flags[hook.export].contains("1");
        assert_eq!(only_per_thread, hook.flavour != "legacy", "{}", hook.export);
    }
}

#[test]
fn the_real_driver_initialises_as_without_the_shim() {
    let Some(driver) = real_driver("cuInit of the real libcuda") else { return };
    let (bare, shim) = (Answers::bare(&driver), Answers::through_shim(&driver));
    assert_eq!(shim.output.number("cuInit"), bare.output.number("cuInit"));
    assert_eq!(shim.output.stderr, bare.output.stderr);
}

#[test]
fn every_export_of_the_real_libraries_is_accounted_for() {
    let Some(driver) = real_driver("exports of the real libcuda") else { return };
    let unknown: Vec<_> = exports(&driver.join("libcuda.so.1"))
        .into_keys()
        .filter(|name| name.starts_with("cu") && !name.starts_with("cudbg"))
        .filter(|name| !accounted_for(name))
        .collect();
    assert!(unknown.is_empty(), "libcuda exports what no list knows: {unknown:?}");
    let unknown: Vec<_> = exports(&driver.join("libnvidia-ml.so.1"))
        .into_keys()
        .filter(|name| !nvml_accounted_for(name))
        .collect();
    assert!(unknown.is_empty(), "libnvidia-ml exports what no list knows: {unknown:?}");
}

/// What libcuda opens by name and a container needs not from us: the C library's, those of graphics and of Tegra, which
/// are no part of `compute` and `utility`, and OpenSSL, which is the container's own.
const OPENED_ELSEWHERE: [&str; 16] = [
    "libc",
    "libm",
    "libdl",
    "libpthread",
    "librt",
    "libcrypto",
    "libGL",
    "libEGL",
    "libEGL_nvidia",
    "libEGL_tegra",
    "libGLX_nvidia",
    "libnvrm_surface",
    "libnvrm_sync",
    "libnvscibuf",
    "libnvscisync",
    "libnvidia-opencl",
];

#[test]
fn every_library_that_the_real_libcuda_opens_is_given_or_an_exception() {
    let Some(driver) = real_driver("libraries of the real libcuda") else { return };
    let content = std::fs::read(driver.join("libcuda.so.1")).unwrap();
    let texts = content.split(|byte| !byte.is_ascii_graphic());
    let names: BTreeSet<&str> = texts
        .filter_map(|text| std::str::from_utf8(text).ok())
        .filter(|text| text.starts_with("lib"))
        .filter_map(|text| text.split_once(".so").map(|(name, _)| name))
        .filter(|name| name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b)))
        .collect();
    assert!(names.contains("libnvidia-ptxjitcompiler"), "{names:?}");
    let is_known = |name: &&str| {
        LIBRARIES.iter().any(|library| library.strip_suffix(".so") == Some(name))
            || OPENED_ELSEWHERE.contains(name)
    };
    let unknown: Vec<_> = names.iter().filter(|name| !is_known(name)).collect();
    assert!(unknown.is_empty(), "libcuda opens what driver.root does not give: {unknown:?}");
}

#[test]
fn the_real_libraries_export_every_hook_at_an_address_of_its_own() {
    let Some(driver) = real_driver("hooks on the real libcuda") else { return };
    let cuda = exports(&driver.join("libcuda.so.1"));
    let nvml = exports(&driver.join("libnvidia-ml.so.1"));
    for hook in hooks() {
        let address = cuda.get(hook.export).unwrap_or_else(|| panic!("no export {}", hook.export));
        // Routing takes the address for the function, so a shared one would be ambiguous.
        let sharing = cuda.iter().filter(|(_, other)| *other == address);
        assert_eq!(sharing.count(), 1, "{} shares its address", hook.export);
    }
    for export in NVML_HOOKS {
        assert!(nvml.contains_key(*export), "no export {export}");
    }
}

/// A library's exported functions and their addresses.
fn exports(library: &Path) -> BTreeMap<String, String> {
    let nm = Command::new("nm").arg("-D").arg("--defined-only").arg(library).output();
    let nm = nm.expect("binutils are part of every C compiler");
    assert!(nm.status.success(), "{}", String::from_utf8_lossy(&nm.stderr));
    String::from_utf8_lossy(&nm.stdout)
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (address, kind, name) = (words.next()?, words.next()?, words.next()?);
            let name = name.split('@').next()?;
            matches!(kind, "T" | "W" | "i").then(|| (name.to_owned(), address.to_owned()))
        })
        .collect()
}
