//! Pointer routing against NVIDIA's real driver library, without a device.
//!
//! The same program asks for every name, version and flag, through `dlsym` and both forms of
//! `cuGetProcAddress`, with and without the shim. Where the bare answer is a hooked export, the
//! shim's answer must be exactly that export's hook; all else must be the driver's own answer,
//! results and statuses included.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::process::Command;

use tessera_cuda::hooks::HOOKS;
use tessera_cuda::inert::INERT;
use tessera_cuda::nvml::NVML_HOOKS;
use tessera_cuda::nvml_unhooked::nvml_accounted_for;
use tessera_cuda::unhooked::{UNHOOKED, base_name, place};
use tessera_tests::{Output, Preloaded, compile_c, external};

/// Every version from which cudaTypedefs.h (12.9 to 13.5) knows some function, and versions between
/// and beyond.
const VERSIONS: &[u32] = &[
    1000, 2000, 2010, 2020, 2030, 3000, 3010, 3020, 4000, 4010, 5000, 5050, 6000, 6050, 7000, 7050,
    8000, 9000, 9020, 10000, 10010, 10020, 11000, 11010, 11020, 11030, 11040, 11050, 11060, 11070,
    11080, 12000, 12010, 12020, 12030, 12040, 12050, 12060, 12080, 12090, 13000, 13010, 13050,
    99000,
];

fn real_driver(test: &str) -> Option<std::path::PathBuf> {
    external::real_driver().map_err(|reason| external::skip(test, &reason)).ok()
}

/// All names that could be asked for: of functions, of their variants, of nothing.
fn names() -> BTreeSet<String> {
    let bases = HOOKS.iter().map(|hook| base_name(hook.export));
    let bases = bases.chain(UNHOOKED.iter().map(|row| row.function)).chain(INERT.iter().copied());
    let mut names: BTreeSet<String> = bases.map(str::to_owned).collect();
    names.extend(HOOKS.iter().map(|hook| hook.export.to_owned()));
    names.extend(
        ["cuBogus", "cuMemAlloc_v9", "cudaMalloc", "curl_easy_init", "malloc"].map(String::from),
    );
    names
}

fn ask(program: Preloaded, driver: &Path) -> Output {
    let mut program = program.env("LD_LIBRARY_PATH", driver);
    for version in VERSIONS {
        program = program.arg(version.to_string());
    }
    let mut running = program.spawn();
    let mut stdin = running.take_stdin().expect("piped");
    let asking = std::thread::spawn(move || {
        for name in names() {
            // It ends early only if the program died, which its status tells.
            let _ = writeln!(stdin, "{name}");
        }
    });
    let output = running.wait();
    asking.join().expect("it only writes");
    assert!(output.success(), "{}", output.stderr);
    output
}

/// Question → place, of `routing`'s lines.
fn answers(output: &Output) -> BTreeMap<&str, &str> {
    output.stdout.lines().filter_map(|line| line.split_once(" -> ")).collect()
}

#[test]
fn every_lookup_reaches_its_hook_or_the_drivers_own_function() {
    let Some(driver) = real_driver("pointer routing on the real libcuda") else { return };
    let program = compile_c("routing");
    let (bare, shim) =
        (ask(Preloaded::bare(&program), &driver), ask(Preloaded::new(&program), &driver));
    let (bare, shim) = (answers(&bare), answers(&shim));
    // The question holds result and status, so equal keys mean that those are unchanged.
    let mut wrong = Vec::new();
    for question in bare.keys().filter(|question| !shim.contains_key(*question)) {
        wrong.push(format!("{question}: result or status changed"));
    }
    let mut reached = BTreeSet::new();
    for (question, answer) in &shim {
        let Some(own) = bare.get(question) else { continue };
        let hooked = own
            .strip_prefix("libcuda.so.1 ")
            .filter(|symbol| HOOKS.iter().any(|hook| hook.export == *symbol));
        let expected = hooked.map_or((*own).to_owned(), |symbol| format!("libtessera.so {symbol}"));
        reached.extend(hooked);
        if *answer != expected {
            wrong.push(format!("{question}: {answer}, expected {expected}"));
        }
    }
    let shown: Vec<_> = wrong.iter().take(20).collect();
    assert!(wrong.is_empty(), "{} of {} answers differ: {shown:#?}", wrong.len(), shim.len());
    assert!(bare.len() > 100_000, "only {} questions were asked", bare.len());
    // Driver 550 speaks CUDA 12.4; everything that it has must have been reached.
    let missed: Vec<_> = HOOKS
        .iter()
        .filter(|hook| hook.since <= 12_040 && !reached.contains(hook.export))
        .collect();
    assert!(missed.is_empty(), "no look-up led to {missed:?}");
}

#[test]
fn the_tables_versions_and_flavours_are_the_real_drivers() {
    let Some(driver) = real_driver("table versions on the real libcuda") else { return };
    let bare = ask(Preloaded::bare(compile_c("routing")), &driver);
    // Export → lowest version that led to it, and the flags that did at any version.
    let mut first: BTreeMap<&str, u32> = BTreeMap::new();
    let mut flags: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (question, answer) in answers(&bare) {
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
    for hook in HOOKS.iter().filter(|hook| hook.since <= 12_040) {
        let Some(lowest) = first.get(hook.export) else {
            panic!("cuGetProcAddress never answers {}", hook.export);
        };
        // Versions below the asked ones are indistinguishable from the lowest asked.
        assert_eq!(*lowest, hook.since, "{}", hook.export);
        let only_per_thread = !flags[hook.export].contains("1");
        assert_eq!(only_per_thread, hook.flavour == "ptsz", "{}", hook.export);
    }
}

#[test]
fn the_real_driver_initialises_as_without_the_shim() {
    let Some(driver) = real_driver("cuInit of the real libcuda") else { return };
    let program = compile_c("routing");
    let bare = ask(Preloaded::bare(&program), &driver);
    let shim = ask(Preloaded::new(&program), &driver);
    assert_eq!(shim.number("cuInit"), bare.number("cuInit"));
    assert_eq!(shim.stderr, bare.stderr);
}

#[test]
fn every_export_of_the_real_libraries_is_accounted_for() {
    let Some(driver) = real_driver("exports of the real libcuda") else { return };
    let unknown: Vec<_> = exports(&driver.join("libcuda.so.1"))
        .into_keys()
        .filter(|name| name.starts_with("cu") && !name.starts_with("cudbg"))
        .filter(|name| place(name).is_none())
        .collect();
    assert!(unknown.is_empty(), "libcuda exports what no list knows: {unknown:?}");
    let unknown: Vec<_> = exports(&driver.join("libnvidia-ml.so.1"))
        .into_keys()
        .filter(|name| !nvml_accounted_for(name))
        .collect();
    assert!(unknown.is_empty(), "libnvidia-ml exports what no list knows: {unknown:?}");
}

#[test]
fn the_real_libraries_export_every_hook_at_an_address_of_its_own() {
    let Some(driver) = real_driver("hooks on the real libcuda") else { return };
    let cuda = exports(&driver.join("libcuda.so.1"));
    let nvml = exports(&driver.join("libnvidia-ml.so.1"));
    for hook in HOOKS.iter().filter(|hook| hook.since <= 12_040) {
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
