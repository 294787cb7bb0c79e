//! Every function that NVIDIA's headers declare is hooked, unhooked with a reason, or inert.
//!
//! Headers of two CUDA generations come with the Python environment. A CUDA release that adds a way
//! to obtain memory or to launch fails here until somebody has looked at it.

use std::collections::BTreeSet;
use std::path::PathBuf;

use tessera_cuda::hooks::HOOKS;
use tessera_cuda::nvml_unhooked::nvml_accounted_for;
use tessera_cuda::unhooked::place;
use tessera_tests::external;

/// The functions that headers with this `prefix` in their file name declare, as `MARK name(`.
fn declared(mark: &str, prefix: &str) -> Option<BTreeSet<String>> {
    let include = match external::headers() {
        Ok(include) => include,
        Err(reason) => {
            external::skip("the coverage test", &reason);
            return None;
        }
    };
    let is_header = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.ends_with(".h") && name.starts_with(prefix)
    };
    let files = include
        .iter()
        .flat_map(|dir| std::fs::read_dir(dir).expect("just found"))
        .map(|entry| entry.expect("readable").path())
        .filter(is_header);
    let mut names = BTreeSet::new();
    for file in files {
        let text = String::from_utf8_lossy(&std::fs::read(file).expect("readable")).into_owned();
        names.extend(declarations(&text, mark));
        names.extend(text.lines().filter_map(renamed));
    }
    Some(names)
}

/// The export that a header's macro puts in place of a declared name: `cuInit_v2` of
/// `#define cuInit cuInit_v2`, `cuInit_ptsz` of `#define cuInit __CUDA_API_PTSZ(cuInit)`.
fn renamed(line: &str) -> Option<String> {
    let mut words = line.trim().strip_prefix("#define")?.split_whitespace();
    let (name, target) = (words.next()?, words.next()?);
    if !is_driver_name(name) {
        return None;
    }
    for (macro_call, suffix) in [("__CUDA_API_PTSZ(", "_ptsz"), ("__CUDA_API_PTDS(", "_ptds")] {
        if let Some(inner) = target.strip_prefix(macro_call) {
            return Some(format!("{}{suffix}", inner.strip_suffix(')')?));
        }
    }
    let plain = target.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    (is_driver_name(target) && plain).then(|| target.to_owned())
}

/// `cuInit` of `CUresult CUDAAPI cuInit(`; function pointer types have a `(` or `*` in between.
fn declarations(text: &str, mark: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (at, _) in text.match_indices(mark) {
        let rest = text[at + mark.len()..].trim_start();
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(0);
        if rest[end..].trim_start().starts_with('(') && rest.starts_with(|c: char| c.is_lowercase())
        {
            names.push(rest[..end].to_owned());
        }
    }
    names
}

#[test]
fn declarations_are_found_and_function_pointer_types_are_not() {
    let text = "CUresult CUDAAPI cuInit(unsigned f);\nCUresult CUDAAPI\n cuX_v2 (int);\n\
                typedef void (CUDA_CB *CUhostFn)(void*);\ntypedef CUresult (CUDAAPI *PFN_a)(int);";
    assert_eq!(declarations(text, "CUDAAPI"), ["cuInit", "cuX_v2"]);
}

#[test]
fn names_that_macros_put_in_place_are_found() {
    let is = |line: &str| renamed(line);
    assert_eq!(is("#define cuMemAlloc    cuMemAlloc_v2").as_deref(), Some("cuMemAlloc_v2"));
    let indented = "    #define cuMemcpy __CUDA_API_PTDS(cuMemcpy)";
    assert_eq!(is(indented).as_deref(), Some("cuMemcpy_ptds"));
    assert_eq!(is("#define CUDA_VERSION 12090"), None);
    assert_eq!(is("#define cuParam ((unsigned)1)"), None);
}

#[test]
fn every_declared_driver_function_is_accounted_for() {
    let Some(names) = declared("CUDAAPI", "cuda") else { return };
    // A static inline function of cuda.h itself.
    let inline = "cuGetProcAddress_v2_ptsz";
    let drivers = names.iter().filter(|name| is_driver_name(name) && *name != inline);
    let drivers: Vec<_> = drivers.collect();
    assert!(
        drivers.len() > 500,
        "only {} functions found: has the headers' form changed?",
        drivers.len()
    );
    let unknown: Vec<_> = drivers.into_iter().filter(|name| place(name).is_none()).collect();
    assert!(
        unknown.is_empty(),
        "in neither HOOKS, UNHOOKED nor INERT (proto/cuda/src): {unknown:?}"
    );
}

#[test]
fn every_hook_is_a_declared_function() {
    let Some(names) = declared("CUDAAPI", "cuda") else { return };
    let invented: Vec<_> =
        HOOKS.iter().map(|hook| hook.export).filter(|export| !names.contains(*export)).collect();
    assert!(invented.is_empty(), "hooked, but in no header: {invented:?}");
}

#[test]
fn every_declared_nvml_function_that_tells_about_tenants_is_accounted_for() {
    let Some(names) = declared("DECLDIR", "nvml") else { return };
    assert!(names.len() > 300, "only {} functions found", names.len());
    let unknown: Vec<_> = names.iter().filter(|name| !nvml_accounted_for(name)).collect();
    assert!(
        unknown.is_empty(),
        "neither hooked nor in NVML_UNHOOKED (proto/cuda/src): {unknown:?}"
    );
}

/// `cu[A-Z]…`: the driver's names; `cuda…` is the runtime's.
fn is_driver_name(name: &str) -> bool {
    name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
}
